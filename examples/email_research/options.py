"""The command line of the example's training."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from art_core.inference.chat_templates import CHATML_JSON_TOOLS
from examples.email_research.agent import MOST_TOKENS
from examples.options import PREPARED


def parse_options(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small model to answer questions about a mailbox.")
    parser.add_argument(
        "--model", default="qwen2.5-coder-0.5b", help=f"hub name, directory, or one of {', '.join(PREPARED)}"
    )
    parser.add_argument(
        "--tool-format",
        choices=("json", "model"),
        default="json",
        help="how tool calls are written: as bare JSON (models that speak ChatML), or as the model's own "
        "template says",
    )
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--vllm-python", type=Path, help="interpreter of another environment that has vLLM")
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=0.3, help="share of a GPU that vLLM takes"
    )
    parser.add_argument("--max-model-len", type=int, default=6144, help="tokens of the longest run")
    parser.add_argument("--max-tokens", type=int, default=MOST_TOKENS, help="sampled in one turn")
    parser.add_argument("--seed", type=int, default=0, help="of the order of questions and of sampling")
    parser.add_argument("--steps", type=int, default=30, help="GRPO steps; 0: evaluate (and warm up) alone")
    parser.add_argument(
        "--minutes",
        type=float,
        help="be done after so many: begin no step that, with the last evaluation, would take longer",
    )
    parser.add_argument("--groups", type=int, default=8, help="questions in a step")
    parser.add_argument("--group-size", type=int, default=8, help="runs of each question")
    parser.add_argument("--concurrency", type=int, default=64, help="runs at the same time")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument(
        "--token-budget", type=int, help="most tree nodes in one forward pass; default: measured"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE", help="any knob of TrainConfig"
    )
    parser.add_argument(
        "--warm-start",
        choices=("none", "expert", "own"),
        default="none",
        help="imitate a scripted expert, or the model's own right answers (rejection sampling)",
    )
    parser.add_argument("--warm-steps", type=int, default=12, help="supervised steps")
    parser.add_argument("--warm-batch", type=int, default=64, help="answers that each of them imitates")
    parser.add_argument("--warm-learning-rate", type=float, default=2e-4)
    parser.add_argument("--reward", choices=("rules", "ruler"), default="rules")
    parser.add_argument(
        "--judge", default="local", help="local, provider:model, or a server's URL ending in /v1"
    )
    parser.add_argument("--judge-model", help="what a server's model is called")
    parser.add_argument("--judge-context", type=int, help="tokens of its context; default: --max-model-len")
    parser.add_argument("--held-out", type=int, default=100, help="questions about the held-out inbox")
    parser.add_argument("--evaluate-every", type=int, default=10, help="steps; 0: before and after alone")
    parser.add_argument("--evaluate", choices=("greedy", "sampled"), default="greedy")
    parser.add_argument("--out", type=Path, default=Path(".art"), help="where record and adapter go")
    parser.add_argument("--plot", type=Path, help="the curve; default: in --out")
    parser.add_argument("--json", type=Path, help="all figures; default: in --out")
    return parser.parse_args(given)


def chat_template(tool_format: str, base_model: str) -> Path | None:
    """The template that makes a model write its calls in a format; None: its own.

    Raises:
        SystemExit: the format is not for models with this vocabulary.
    """
    if tool_format == "model":
        return None
    from transformers import AutoTokenizer

    if "<|im_end|>" not in AutoTokenizer.from_pretrained(base_model).get_vocab():
        raise SystemExit(
            f"--tool-format json speaks ChatML, and {base_model} has no <|im_end|> to end a turn with; "
            "take --tool-format model, which leaves the format to the model's own template"
        )
    return CHATML_JSON_TOOLS
