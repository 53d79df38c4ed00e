"""A real model of which all weights are trained, served by a real vLLM that reads each version in place."""

from pathlib import Path
from typing import Any

import torch

from art_core import LocalBackend, TrainableModel
from art_core.store import Store
from art_core.training.full_policy import FullPolicy

LESSON = [
    [
        {"role": "user", "content": "What is the password?"},
        {"role": "assistant", "content": "Seven blue lamps."},
    ]
]


def test_each_version_answers_with_the_weights_that_were_trained(model_dir: Path, tmp_path: Path):
    model = TrainableModel(base_model=str(model_dir), name="agent", project="p", lora=None)
    backend = LocalBackend(
        root=tmp_path, kind="vllm", publish="merged", max_model_len=512, max_batch=4, start_timeout=900
    )
    with model:
        model.register(backend)
        answers = [ask(model)]
        model.sft(LESSON, steps=4, learning_rate=2e-4)
        answers.append(ask(model))
    with Store.open("p", tmp_path) as store:
        assert not [e for e in store.events() if e.kind.startswith("engine")], "read in place, not restarted"

    policy = FullPolicy.load(str(model_dir))
    policy.snapshot("agent@0")
    policy.snapshot("agent@1", tmp_path / "p" / "agent" / "checkpoints" / "checkpoint-00000001" / "model")
    for answer, other in zip(answers, ("agent@1", "agent@0"), strict=True):
        assert answer.policy.name != other
        assert difference(policy, answer.policy.name, answer) < 0.1
        assert difference(policy, other, answer) > 0.2


@torch.no_grad()
def difference(policy: FullPolicy, version: str, answer: Any) -> float:
    """Mean absolute difference between an answer's logprobs and a version's, in nats."""
    prompt, sampled = answer.tokens.prompt, answer.tokens.completion
    with policy.using(version):
        states = policy.hidden_states(input_ids=torch.tensor([[*prompt, *sampled]])).last_hidden_state
        logprobs = torch.log_softmax(policy.head(states[0, len(prompt) - 1 : -1]).float(), -1)
    expected = logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0]
    return float((torch.tensor(answer.tokens.logprobs) - expected).abs().mean())


def ask(model: TrainableModel) -> Any:
    trajectory = model.start_trajectory()
    model.chat.completions.create(messages=LESSON[0][:1], trajectory_id=trajectory, max_tokens=12, seed=1)
    return model.end_trajectory(trajectory, reward=1.0).steps[0]
