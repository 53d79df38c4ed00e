"""Full fine-tuning (``lora=None``): against torch by hand, through checkpoints, served, and refused."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.vllm_interpreter import fake_interpreter
from fakes.vllm_sleeper import MAIN, fingerprint
from helpers.embedded import forward_logprobs, serving
from helpers.ranks import full_policy
from helpers.tiny import tiny_model
from helpers.training import group, passes, same, sample, step, trajectory, weights
from transformers import AutoModelForCausalLM

from art_core import LocalBackend, TrainableModel
from art_core.config import GuardrailConfig, LoRAConfig, ParallelConfig, TrainableModelConfig, TrainConfig
from art_core.errors import CheckpointError, ConfigError
from art_core.training import checkpoints
from art_core.training.coefficients import Coefficients
from art_core.training.full_policy import FullPolicy
from art_core.training.grpo import Trainer
from art_core.training.launch import TrainerProcesses
from art_core.training.logprobs import entry_logprobs
from art_core.training.peft_policy import PeftPolicy
from art_core.training.policy import BASE, TRAINING
from art_core.training.token_tree import build_tree
from art_core.training.update import accumulate_policy_gradient
from art_core.types import PolicyVersion, TrajectoryGroup

CONFIG = TrainConfig(learning_rate=1e-3, groups_per_update=1, guardrails=GuardrailConfig(max_kl=None))
LESSON = [[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]] * 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"))


def new_trainer(base: Path, dtype: Any = "float32", config: TrainConfig = CONFIG) -> Trainer:
    return Trainer(FullPolicy.load(str(base), dtype=dtype), config)


def played(dice: random.Random) -> list[TrajectoryGroup]:
    return [
        group(
            *(
                trajectory(f"t{i}", dice.random(), step(f"t{i}", [5, 6], [dice.randint(8, 40), 2]))
                for i in range(4)
            )
        )
    ]


def test_updates_are_those_of_torch_by_hand(base: Path):
    prompt = (5, 6, 7)
    batch = [((9, 12, 2), 1.5), ((9, 30, 31, 2), -0.5), ((40,), -1.0)]
    policy = FullPolicy.load(str(base), dtype="float32")
    config = CONFIG.replace(weight_decay=0.1, max_grad_norm=0.5, importance_cap=None)
    trainer = Trainer(policy, config)
    twin: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    adamw = torch.optim.AdamW(twin.parameters(), lr=1e-4, weight_decay=0.1)
    for _ in range(3):
        tree = build_tree(
            [
                sample(prompt, a, advantage=adv, step=f"s{i}", rollout=f"r{i}")
                for i, (a, adv) in enumerate(batch)
            ]
        )
        accumulate_policy_gradient(
            passes(policy), tree, config, Coefficients.of(config), proximal=None, base=None
        )
        trainer.optimizer.step(1e-4, trainer.optimizer.grad_norm())
        trainer.optimizer.zero_grad()

        loss = torch.zeros(())
        for answer, advantage in batch:
            logits = twin(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            loss = loss - advantage * logits.log_softmax(-1)[range(len(answer)), list(answer)].sum()
        adamw.zero_grad()
        (loss * _weight_of_one(tree)).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        adamw.step()
    theirs = [p.detach() for _, p in sorted(twin.named_parameters())]
    ours = weights(policy)
    began = [p for _, p in sorted(AutoModelForCausalLM.from_pretrained(base).named_parameters())]
    for mine, other, start in zip(ours, theirs, began, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
        assert not torch.equal(mine, start), "every weight is trained"


def _weight_of_one(tree: Any) -> float:
    (weight,) = {float(w) for w in tree.entries.weight}
    return weight


def test_in_bfloat16_small_updates_add_up_and_versions_are_what_the_model_computes_with(base: Path):
    trainer = new_trainer(base, "bfloat16", CONFIG.replace(learning_rate=1e-6))
    policy: Any = trainer.policy
    policy.snapshot("m@0")
    dice = random.Random(1)
    before = weights(policy)
    for _ in range(3):
        trainer.train(played(dice))
    moved = weights(policy)
    assert all(m.dtype == torch.float32 for m in moved)
    assert all(0 < float((a - b).abs().max()) < 1e-5 for a, b in zip(moved, before, strict=True))
    policy.snapshot("m@1")
    prompt, answer = [5, 6, 7], [9, 12, 30]
    trained = entry(policy, TRAINING, prompt, answer)
    assert entry(policy, "m@1", prompt, answer) == trained
    assert entry(policy, "m@0", prompt, answer) == entry(policy, BASE, prompt, answer)
    with policy.using(TRAINING):
        computed = [p.detach() for _, p in sorted(policy.model.named_parameters())]
        assert same(computed, [m.to(torch.bfloat16) for m in moved])
    policy.drop("m@0")
    assert entry(policy, "m@1", prompt, answer) == trained


def entry(policy: Any, version: str | None, prompt: list[int], answer: list[int]) -> list[float]:
    with torch.no_grad(), policy.using(version):
        return entry_logprobs(policy, build_tree([sample(prompt, answer)])).logprob.tolist()


def test_two_processes_make_the_weights_and_the_checkpoint_of_one(base: Path, tmp_path: Path):
    parallel = ParallelConfig(processes=2, strategy="ddp", timeout=60)
    config = CONFIG.replace(
        learning_rate=1e-4, token_budget=16
    )  # Adam's steps follow the sign of a tiny gradient
    together = TrainerProcesses(full_policy(base), None, config, parallel, log_dir=tmp_path)
    try:
        alone = new_trainer(base, config=config)
        for seed in (1, 2):
            together.train(played(random.Random(seed)))
            alone.train(played(random.Random(seed)))
        written = checkpoints.save(tmp_path / "run", together, version=1)
    finally:
        together.close()
    resumed = new_trainer(base, config=config)
    checkpoints.load(written.directory, resumed)
    for a, b in zip(weights(resumed.policy), weights(alone.policy), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    assert not same(weights(resumed.policy), weights(new_trainer(base).policy))


def test_a_step_on_the_host_is_the_same_step(base: Path):
    one, other = new_trainer(base), new_trainer(base, config=CONFIG.replace(optimizer_offload=True))
    assert one.optimizer.bytes_to_come == 8 * sum(p.numel() for p in one.optimizer.parameters)
    assert other.optimizer.bytes_to_come == 0, "of this device's memory"
    for trainer in (one, other):
        dice = random.Random(1)
        trainer.train(played(dice))
        trainer.train(played(dice))
    assert one.optimizer.bytes_to_come == 0
    for a, b in zip(weights(one.policy), weights(other.policy), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(base: Path, tmp_path: Path, dtype: str):
    """C50"""
    straight, dice = new_trainer(base, dtype), random.Random(1)
    straight.sft(LESSON, steps=1)
    straight.train(played(dice))
    written = checkpoints.save(tmp_path, straight, version=1)
    assert written.weights_dir == written.directory / "model"
    manifest = json.loads((written.directory / "checkpoint.json").read_text())
    assert manifest["lora"] is None
    assert "model/model.safetensors" in manifest["files"]

    resumed = new_trainer(base, dtype)
    checkpoints.load(written.directory, resumed)
    for trainer in (straight, resumed):
        then = random.Random(2)
        trainer.train(played(then))
        trainer.train(played(then))
    assert same(weights(straight.policy), weights(resumed.policy))


def test_checkpoints_of_all_weights_and_of_adapters_are_told_apart(base: Path, tmp_path: Path):
    full = new_trainer(base)
    lora = Trainer(PeftPolicy.load(str(base), LoRAConfig(rank=4), dtype="float32"), CONFIG)
    of_full = checkpoints.save(tmp_path / "full", full, version=1)
    of_lora = checkpoints.save(tmp_path / "lora", lora, version=1)
    with pytest.raises(CheckpointError, match=r"has trained all weights.*trains a LoRA adapter"):
        checkpoints.load(of_full.directory, lora)
    with pytest.raises(CheckpointError, match=r"has trained a LoRA adapter.*trains all weights"):
        checkpoints.load(of_lora.directory, full)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        full.policy.snapshot("m@1", of_lora.weights_dir)
    other = FullPolicy.load(str(tiny_model(tmp_path / "wider", hidden=128)), dtype="float32")
    with pytest.raises(CheckpointError, match=r"other shapes|cannot be read as this model"):
        other.load_weights(of_full.weights_dir)


def test_kl_to_the_base_model_reads_its_weights_again_or_says_that_they_are_others(tmp_path: Path):
    base = tiny_model(tmp_path / "base")
    trainer = new_trainer(base, config=CONFIG.replace(kl_coef=0.1))
    dice = random.Random(1)
    first = trainer.train(played(dice)).metrics["kl_base"]
    assert first == pytest.approx(0.0, abs=1e-9)
    for _ in range(3):
        last = trainer.train(played(dice)).metrics["kl_base"]
    assert last > 1e-6
    late = new_trainer(base, config=CONFIG.replace(kl_coef=0.1))
    tiny_model(base, seed=7)
    with pytest.raises(ConfigError, match="are others now"):
        late.train(played(dice))


async def test_the_embedded_engine_serves_versions_side_by_side(base: Path):
    trainer = new_trainer(base, config=CONFIG.replace(learning_rate=1e-2))
    policy: Any = trainer.policy
    async with serving(policy) as (engine, client):
        trainer.train(played(random.Random(1)))
        await engine.publish(PolicyVersion("tiny", 1), None)
        found: dict[str, tuple[list[int], list[int]]] = {}
        for version in ("tiny@0", "tiny@1"):
            answer = await client.chat.completions.create(
                model=version,
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=6,
                temperature=0,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            prompt: list[int] = answer.prompt_token_ids  # type: ignore[attr-defined]
            tokens: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
            said = [c.logprob for c in answer.choices[0].logprobs.content]  # type: ignore[union-attr]
            assert said == pytest.approx(forward_logprobs(policy, version, prompt, tokens), abs=1e-4)
            found[version] = prompt, tokens
        one, other = (forward_logprobs(policy, version, *found["tiny@1"]) for version in found)
        assert one != other


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainableModel]]:
    models: list[TrainableModel] = []
    base = tiny_model(tmp_path / "base")

    def start(**settings: Any) -> TrainableModel:
        if settings["kind"] == "vllm":
            python = tmp_path / "fake" / "python"
            if not python.exists():
                assert fake_interpreter(tmp_path / "fake", "answers", "vllm") == python
            (tmp_path / "fake/site/vllm/entrypoints/openai/api_server.py").write_text(MAIN)
            monkeypatch.setenv("FAKE_SLEEP_FAULT", "")
            monkeypatch.setenv("FAKE_LIVES", str(tmp_path / "lives"))
            settings["python"] = python
        model = TrainableModel(base_model=str(base), name="agent", project="p", lora=None, learning_rate=3e-3)
        model.register(LocalBackend(root=tmp_path / "art", **settings))
        models.append(model)
        return model

    yield start
    for model in models:
        model.close()


def says(model: TrainableModel, **settings: Any) -> str:
    trajectory = model.start_trajectory()
    answer = model.chat.completions.create(
        messages=[{"role": "user", "content": "hello"}], trajectory_id=trajectory, **settings
    )
    model.end_trajectory(trajectory, reward=1.0)
    return answer.choices[0].message.content or ""


def test_a_model_of_which_all_is_trained_learns_goes_on_and_is_saved(
    register: Callable[..., TrainableModel], tmp_path: Path
):
    model = register(kind="embedded", dtype="float32")
    before = says(model, temperature=0, max_tokens=4)
    model.sft(LESSON, steps=40)
    assert says(model, temperature=0, max_tokens=4) == "world" != before
    with pytest.raises(ConfigError, match=r"no adapter; save_model\(\)"):
        model.save_lora_adapter(tmp_path / "adapter")
    saved = model.save_model(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="exists"):
        model.save_model(saved)
    kept = tmp_path / "art" / "p" / "agent" / "checkpoints" / "checkpoint-00000001" / "model"
    assert fingerprint(str(saved)) == fingerprint(str(kept))
    with model.serve(0) as first:
        assert says_at(first) == before
    model.close()
    again = register(kind="embedded", dtype="float32")
    assert again.current_version().number == 1
    assert says(again, temperature=0, max_tokens=4) == "world"


def says_at(endpoint: Any) -> str:
    import httpx

    body = {
        "model": endpoint.wire_name(endpoint.current_version()),
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 4,
    }
    answer = httpx.post(f"{endpoint.base_url}/chat/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["message"]["content"]


def test_vllm_reads_the_whole_model_in_place_of_the_one_before(
    register: Callable[..., TrainableModel], tmp_path: Path
):
    kept = tmp_path / "art" / "p" / "agent" / "checkpoints"
    model = register(kind="vllm", publish="merged", dtype="float32")
    assert says(model) == fingerprint(str(tmp_path / "base"))
    for number in (1, 2, 3, 4):
        model.sft(LESSON, steps=1)
        assert says(model) == fingerprint(str(kept / f"checkpoint-{number:08d}" / "model"))
    assert not list((tmp_path / "art" / "p" / "agent").glob("merged/*/*")), "no copy but the checkpoint's"
    assert [checkpoints.number_of(p) for p in checkpoints.list_checkpoints(kept)] == [2, 3, 4]
    model.close()
    assert (kept / "checkpoint-00000004" / "model" / "model.safetensors").exists()
    again = register(kind="vllm", publish="merged", dtype="float32")
    assert again.current_version().number == 4
    assert says(again) == fingerprint(str(kept / "checkpoint-00000004" / "model"))


def test_an_adapter_is_folded_in_when_the_whole_model_is_saved(tmp_path: Path):
    model = TrainableModel(base_model=str(tiny_model(tmp_path / "base")), lora_rank=4)
    with model:
        model.register(LocalBackend(root=tmp_path / "art", kind="embedded", dtype="float32"))
        model.sft(LESSON, steps=2, learning_rate=1e-2)
        saved = model.save_model(tmp_path / "saved")
    assert fingerprint(str(saved)) != fingerprint(str(tmp_path / "base"))
    AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize(
    ("backend", "train", "says"),
    [
        ({"kind": "vllm"}, {}, r"LocalBackend\(publish='merged'\)"),
        ({"kind": "external", "base_url": "http://localhost:1/v1"}, {}, "takes adapters"),
        ({"kind": "embedded"}, {"policy": "unsloth"}, "policy='peft' alone"),
        ({"kind": "embedded", "parallel": ParallelConfig(strategy="fsdp2")}, {}, "strategy='ddp'"),
        ({"kind": "embedded"}, {"kernels": "fused"}, "leave kernels out"),
    ],
)
def test_what_cannot_train_or_serve_all_weights_says_what_can(
    base: Path, tmp_path: Path, backend: dict[str, Any], train: dict[str, Any], says: str
):
    model = TrainableModel(base_model=str(base), lora=None, train=TrainConfig(**train))
    with pytest.raises(ConfigError, match=says):
        model.register(LocalBackend(root=tmp_path, **backend))


def test_lora_is_an_adapter_unless_it_is_none():
    def settings(**given: Any) -> TrainableModelConfig:
        return TrainableModelConfig(base_model="org/m", **given)

    assert settings().lora == LoRAConfig(rank=16, alpha=32)
    assert settings(lora_rank=4).lora == LoRAConfig(rank=4, alpha=8)
    assert settings(lora=None).lora is None
    for config in (settings(lora=None), settings(lora=LoRAConfig(rank=3)), settings(lora_rank=4)):
        assert config.replace(seed=1).lora == config.lora
        assert TrainableModelConfig(**config.model_dump()) == config
    with pytest.raises(ConfigError, match="lora=None trains all weights, lora_rank=8 an adapter"):
        settings(lora=None, lora_rank=8)
    with pytest.raises(ConfigError, match=r"lora_rank=0"):
        settings(lora_rank=0)
