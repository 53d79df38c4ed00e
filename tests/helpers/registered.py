"""A tiny model that is registered, and rollouts for it to learn from."""

from pathlib import Path

from art_core import LocalBackend, TrainableModel, TrainConfig
from art_core.config import GuardrailConfig, ReplayConfig

ASK = [{"role": "user", "content": "answer yes or no"}]
TRAIN = TrainConfig(
    learning_rate=1e-2,
    replay=ReplayConfig(groups=1),
    guardrails=GuardrailConfig(max_kl=None, max_norm_growth=None),
)


def registered(base_model: str, root: Path, name: str = "agent", **settings: object) -> TrainableModel:
    keep = settings.pop("keep", 3)
    options: dict[str, object] = {"train": TRAIN, "lora_rank": 4, **settings}
    model = TrainableModel(base_model=base_model, project="p", name=name, **options)
    model.register(LocalBackend(root=root, dtype="float32", max_model_len=256, keep_checkpoints=keep))
    return model


def collect(model: TrainableModel, rewards: tuple[float, ...] = (0.0, 1.0), seed: int = 0) -> None:
    for i, reward in enumerate(rewards):
        trajectory = model.start_trajectory()
        model.chat.completions.create(messages=ASK, max_tokens=2, seed=seed + i)
        model.end_trajectory(trajectory, reward=reward)
