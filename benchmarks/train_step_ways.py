"""Ways to make one optimizer step over the same rollouts: libraries as people use them, and ours.

Each way is a function that loads a model and returns `Way`: a function that makes one whole step, gradient,
clipping and AdamW included, and returns the gradient's norm. All of them train LoRA of rank 16 on all linear
layers with the same loss: minus advantage times ratio, mean over the trained tokens of the step.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

RANK, ALPHA = 16, 32
RATE = 1e-5
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Job:
    """What a way is asked to do.

    Attributes:
        directory: of the model.
        rollouts: groups of `train_step_work.Rollout`.
        device: cuda or cpu.
        checkpointing: gradient checkpointing.
        rows: rows in one forward pass, where rows are computed.
        budget: places in one forward pass, where we cut.
        exact: float32 (on a CPU) in place of bfloat16.
        options: a way's own.
    """

    directory: str
    rollouts: Any
    device: str
    checkpointing: bool
    rows: int
    budget: int
    exact: bool
    options: dict[str, Any]


@dataclass
class Way:
    """A step to be timed, and what is worth knowing about it."""

    step: Callable[[], float]
    notes: dict[str, Any]


def kind(job: Job) -> Any:
    import torch

    return torch.float32 if job.exact else torch.bfloat16


def reset(job: Job) -> None:
    import gc

    import torch

    gc.collect()
    if job.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# -- rows, as one writes them by hand --------------------------------------------------------------------


def merged_rows(job: Job) -> list[tuple[list[int], list[bool], float]]:
    """Each rollout once: its last prompt holds all that came before."""
    return [(r.ids, r.sampled, r.advantage) for group in job.rollouts for r in group]


def step_rows(job: Job) -> list[tuple[list[int], list[bool], float]]:
    """Each call by itself, with its whole prompt."""
    return [
        (r.ids[:end], [False] * start + [True] * (end - start), r.advantage)
        for group in job.rollouts
        for r in group
        for start, end in r.calls
    ]


def rows_step(
    job: Job,
    parameters: Sequence[Any],
    hidden_states: Callable[[Any], Any],
    head: Callable[[Any], Any],
    rows: list[tuple[list[int], list[bool], float]],
) -> Callable[[], float]:
    """Right-padded rows in micro-batches; logits of sampled tokens alone, in recomputed chunks."""
    import torch
    from torch.utils.checkpoint import checkpoint

    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    total = sum(sum(sampled) for _, sampled, _ in rows)
    batches: list[Any] = []
    for at in range(0, len(rows), job.rows):
        part = rows[at : at + job.rows]
        longest = max(len(ids) for ids, _, _ in part) - 1
        ids = torch.zeros(len(part), longest, dtype=torch.long)
        places: list[int] = []
        tokens: list[int] = []
        advantages: list[float] = []
        for i, (row, sampled, advantage) in enumerate(part):
            ids[i, : len(row) - 1] = torch.tensor(row[:-1])
            chosen = [t for t, was in enumerate(sampled) if was]
            places += [i * longest + t - 1 for t in chosen]
            tokens += [row[t] for t in chosen]
            advantages += [advantage] * len(chosen)
        batches.append([t.to(job.device) for t in (ids, *map(torch.tensor, (places, tokens, advantages)))])

    def chunk(hidden: Any, tokens: Any) -> Any:
        logits = head(hidden).float()
        return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]

    def step() -> float:
        for ids, places, tokens, advantages in batches:
            with torch.autocast(job.device, torch.bfloat16, enabled=not job.exact):
                hidden = hidden_states(ids).flatten(0, 1)[places]
                logprobs = torch.cat(
                    [
                        checkpoint(chunk, hidden[i : i + 1024], tokens[i : i + 1024], use_reentrant=False)
                        for i in range(0, len(tokens), 1024)
                    ]
                )
            ratio = torch.exp(logprobs - logprobs.detach())
            (-(advantages * ratio).sum() / total).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)

    return step


def peft_model(job: Job) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        job.directory, dtype=kind(job), attn_implementation="sdpa"
    ).to(job.device)
    if job.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEAR))
    model.train()
    return model


def peft(job: Job, rows: list[tuple[list[int], list[bool], float]]) -> Way:
    model = peft_model(job)
    causal_lm = model.get_base_model()
    decoder = causal_lm.get_decoder()
    parameters = [p for p in model.parameters() if p.requires_grad]
    step = rows_step(
        job,
        parameters,
        lambda ids: decoder(input_ids=ids, use_cache=False).last_hidden_state,
        causal_lm.get_output_embeddings(),
        rows,
    )
    return Way(step, {"rows": len(rows), "row_tokens": sum(len(r[0]) for r in rows)})


def peft_rows(job: Job) -> Way:
    return peft(job, merged_rows(job))


def peft_step_rows(job: Job) -> Way:
    return peft(job, step_rows(job))


def unsloth_model(job: Job) -> tuple[Any, Any]:
    from unsloth import FastLanguageModel

    longest = max(len(r.ids) for group in job.rollouts for r in group)
    model, tokenizer = FastLanguageModel.from_pretrained(
        job.directory, dtype=kind(job), load_in_4bit=False, max_seq_length=longest + 64
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        bias="none",
        target_modules=LINEAR,
        use_gradient_checkpointing="unsloth" if job.checkpointing else False,
        random_state=0,
        max_seq_length=longest + 64,
    )
    model.train()
    return model, tokenizer


def unsloth_rows(job: Job) -> Way:
    """Unsloth's model in the same loop as PEFT's."""
    model, _ = unsloth_model(job)
    causal_lm = model.get_base_model()
    decoder = causal_lm.get_decoder()
    rows = merged_rows(job)
    step = rows_step(
        job,
        [p for p in model.parameters() if p.requires_grad],
        lambda ids: decoder(input_ids=ids, use_cache=False).last_hidden_state,
        causal_lm.get_output_embeddings(),
        rows,
    )
    return Way(step, {"rows": len(rows)})


# -- TRL -------------------------------------------------------------------------------------------------


def trl_trainer(job: Job, model: Any, tokenizer: Any) -> Any:
    import tempfile

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    longest = max(len(r.ids) - r.calls[0][0] for group in job.rollouts for r in group)
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=job.rows,
        gradient_accumulation_steps=1,
        num_generations=2,
        max_completion_length=longest,
        beta=0.0,
        loss_type="dapo",
        learning_rate=RATE,
        bf16=job.device == "cuda",
        fp16=False,
        use_cpu=job.device == "cpu",
        gradient_checkpointing=job.checkpointing,
        report_to=[],
        use_vllm=False,
        **job.options.get("grpo_config", {}),
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def trl_batches(job: Job) -> list[dict[str, Any]]:
    """Micro-batches as GRPOTrainer makes them: prompts, and completions with the tools' tokens masked."""
    import torch

    rollouts = [r for group in job.rollouts for r in group]
    total = torch.tensor(float(sum(sum(r.sampled) for r in rollouts)), device=job.device)
    found: list[dict[str, Any]] = []
    for at in range(0, len(rollouts), job.rows):
        part = rollouts[at : at + job.rows]
        start = part[0].calls[0][0]
        ids = torch.tensor([r.ids for r in part], device=job.device)
        sampled = torch.tensor([r.sampled for r in part], device=job.device).long()
        prompt, completion = ids[:, :start].contiguous(), ids[:, start:].contiguous()
        found.append(
            {
                "prompt_ids": prompt,
                "prompt_mask": torch.ones_like(prompt),
                "completion_ids": completion,
                "completion_mask": torch.ones_like(completion),
                "tool_mask": sampled[:, start:].contiguous(),
                "advantages": torch.tensor([r.advantage for r in part], device=job.device),
                "num_items_in_batch": total,
            }
        )
    return found


def trl_step(job: Job, trainer: Any, loss_of: Callable[[Any, dict[str, Any]], Any]) -> Callable[[], float]:
    import torch

    batches = trl_batches(job)
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)

    def step() -> float:
        for batch in batches:
            with trainer.compute_loss_context_manager():
                loss = loss_of(trainer, dict(batch))
            trainer.accelerator.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)

    return step


def trl(job: Job) -> Way:
    """TRL's GRPOTrainer: its own loss over rows merged by trajectory."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(job.directory, dtype=kind(job)).to(job.device)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEAR))
    trainer = trl_trainer(job, model, AutoTokenizer.from_pretrained(job.directory))
    return Way(trl_step(job, trainer, lambda t, batch: t._compute_loss(t.model, batch)), {})


def trl_unsloth(job: Job) -> Way:
    """The GRPOTrainer that Unsloth puts in the place of TRL's."""
    import unsloth  # noqa: F401 - replaces TRL's trainer; must come before it

    model, tokenizer = unsloth_model(job)
    trainer = trl_trainer(job, model, tokenizer)
    way = trl_step(job, trainer, lambda t, batch: t.compute_loss(t.model, batch))
    return Way(way, {"trainer": type(trainer).__module__})


# -- ours ------------------------------------------------------------------------------------------------


def trained(job: Job, policy: Any) -> Way:
    """Our trainer's update, from trees that are cut already to the new weights."""
    import time

    import torch

    from art_core.config import TrainConfig
    from art_core.training.batch import prepare
    from art_core.training.grpo import Trainer
    from art_core.training.update import Passes, accumulate_policy_gradient
    from benchmarks.train_step_work import trajectory_groups

    for name, value in job.options.get("policy", {}).items():
        setattr(policy, name, value)
    policy.gradient_checkpointing = job.checkpointing
    config = TrainConfig(loss="dapo", learning_rate=RATE, token_budget=job.budget)
    trainer = Trainer(policy, config)
    groups = trajectory_groups(job.rollouts)
    began = time.perf_counter()
    batch = prepare(groups, config, torch.Generator().manual_seed(0))
    seconds = time.perf_counter() - began
    (minibatch,) = batch.minibatches
    tree = getattr(minibatch, "tree", minibatch)
    passes = Passes(policy, trainer.budget, trainer.ranks, lambda: None)

    def step() -> float:
        trainer.optimizer.zero_grad()
        accumulate_policy_gradient(passes, tree, config, trainer.coefficients, proximal=None, base=None)
        norm = trainer.optimizer.grad_norm()
        trainer.optimizer.step(RATE, norm)
        trainer.optimizer.zero_grad()
        return float(norm)

    pieces = trainer.budget.share(tree).pieces
    notes = {"prepare_seconds": round(seconds, 4), "nodes": len(tree), "pieces": len(pieces)}
    return Way(step, {**notes, "path": policy.path})


def peft_policy(job: Job, kernels: str) -> Any:
    from art_core.config import LoRAConfig
    from art_core.training.peft_policy import PeftPolicy

    return PeftPolicy.load(
        job.directory,
        LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=tuple(LINEAR)),
        dtype="float32" if job.exact else "bfloat16",
        device=job.device,
        kernels=kernels,
    )


def tree_modules(job: Job) -> Way:
    """Our tree in transformers' and PEFT's own modules."""
    return trained(job, peft_policy(job, "modules"))


def tree_fused(job: Job) -> Way:
    """Our tree in fused kernels, as it is by default."""
    return trained(job, peft_policy(job, "fused"))


def tree_flex(job: Job) -> Way:
    """The same with FlexAttention alone."""
    policy = peft_policy(job, "fused")
    policy.attention = "flex"
    return trained(job, policy)


def tree_trunk(job: Job) -> Way:
    """The same with trunks by a dense kernel, whatever their share."""
    policy = peft_policy(job, "fused")
    policy.attention = "trunk"
    return trained(job, policy)


def packed_fused(job: Job) -> Way:
    """Rows, packed, in fused kernels: what the tree saves, with all else equal."""
    policy = peft_policy(job, "fused")
    policy.path = "packed"
    return trained(job, policy)


def padded_fused(job: Job) -> Way:
    """Rows, padded, in fused kernels and plain causal attention."""
    policy = peft_policy(job, "fused")
    policy.path = "padded"
    return trained(job, policy)


def unsloth_policy(job: Job) -> Way:
    """Our trainer over Unsloth's rows."""
    import unsloth  # noqa: F401 - before transformers

    from art_core.config import LoRAConfig
    from art_core.training.unsloth_policy import UnslothPolicy

    longest = max(len(r.ids) for group in job.rollouts for r in group)
    policy = UnslothPolicy.load(
        job.directory,
        LoRAConfig(rank=RANK, alpha=ALPHA),
        dtype="float32" if job.exact else "bfloat16",
        device=job.device,
        max_length=max(longest, job.budget) + 64,
    )
    policy.path = job.options.get("path", "padded")
    return trained(job, policy)


WAYS: dict[str, Callable[[Job], Way]] = {
    "tree_fused": tree_fused,
    "unsloth_rows": unsloth_rows,
    "peft_rows": peft_rows,
    "unsloth_policy": unsloth_policy,
    "tree_flex": tree_flex,
    "tree_trunk": tree_trunk,
    "tree_modules": tree_modules,
    "trl": trl,
    "trl_unsloth": trl_unsloth,
    "padded_fused": padded_fused,
    "packed_fused": packed_fused,
    "peft_step_rows": peft_step_rows,
}
TREES = ("tree_fused", "tree_flex", "tree_trunk", "tree_modules")
OURS = (*TREES, "packed_fused", "padded_fused", "unsloth_policy")
MERGED_PEERS = ("unsloth_rows", "peft_rows", "trl", "trl_unsloth")
NEEDS_UNSLOTH = ("unsloth_rows", "trl_unsloth", "unsloth_policy")


def needs_missing(name: str) -> str | None:
    """The library that a way lacks here, if any."""
    from importlib.util import find_spec

    wanted = (["unsloth"] if name in NEEDS_UNSLOTH else []) + (["trl"] if name.startswith("trl") else [])
    return next((library for library in wanted if find_spec(library) is None), None)


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
