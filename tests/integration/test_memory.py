"""Memory: budgets that are lowered when a pass does not fit, and what is kept out of the GPU."""

import json
import random
import resource
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers.ranks import LORA, FaultyPolicy, set_fault, tiny_policy
from helpers.tiny import tiny_model
from helpers.training import group, same, step, trajectory, weights

from art_core.config import GuardrailConfig, LoRAConfig, TrainConfig
from art_core.errors import OutOfMemoryError
from art_core.training import checkpoints
from art_core.training.footprint import CPU_BUDGET, SMALLEST, Footprint, footprint, peak_memory, probe
from art_core.training.grpo import Trainer
from art_core.training.measured import Measured, machine_key
from art_core.training.optimizer import Optimizer
from art_core.training.out_of_memory import is_out_of_memory
from art_core.training.paths import LONGEST, PathChoice
from art_core.training.ranks import Alone
from art_core.types import TrajectoryGroup

PROMPT = 40
CONFIG = TrainConfig(
    learning_rate=1e-3,
    kl_coef=0.1,
    token_budget=1024,
    gradient_checkpointing=False,
    guardrails=GuardrailConfig(max_kl=None, max_norm_growth=None),
)
SAID = [
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": word}]
    for word in ("one", "two", "three", "four", "five", "six")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    return tmp_path / "faults.json"


def trainer(model: Path, faults: Path, config: TrainConfig = CONFIG) -> Trainer:
    return Trainer(tiny_policy(model, faults)("cpu"), config)


def groups(seed: int) -> list[TrajectoryGroup]:
    dice = random.Random(seed)

    def answer() -> list[int]:
        return [dice.randint(8, 40) for _ in range(8)]

    return [
        group(
            *(
                trajectory(
                    f"{g}-{i}",
                    dice.random(),
                    step(f"{g}-{i}", [5, *[6 + g] * PROMPT], ids := answer(), logprobs=[-5.5] * len(ids)),
                )
                for i in range(8)
            ),
            scenario=f"s{g}",
        )
        for g in range(3)
    ]


def kinds(events: Sequence[object]) -> list[str]:
    return [event.kind for event in events]  # type: ignore[attr-defined]


def close(a: Trainer, b: Trainer) -> bool:
    return all(
        torch.allclose(x, y, atol=1e-5) for x, y in zip(weights(a.policy), weights(b.policy), strict=True)
    )


def test_a_pass_that_does_not_fit_is_made_again_in_smaller_ones_with_the_same_gradient(
    model: Path, faults: Path
):
    unharmed = trainer(model, faults)
    expected = unharmed.train(groups(0))
    set_fault(faults, most_tokens=120)
    lowered = trainer(model, faults)
    report = lowered.train(groups(0))
    assert kinds(report.events) == ["token_budget_lowered"] * 3
    assert [(e.limit, e.value) for e in report.events] == [(1024, 512), (512, 256), (256, 128)]
    assert "out of memory" in report.events[0].message
    assert report.metrics["updates"] == 1
    assert report.metrics["updates_skipped"] == 0
    assert report.metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=1e-5)
    assert report.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=1e-4)
    assert close(unharmed, lowered)
    assert lowered.train(groups(1)).events == ()  # what was learned about the memory is kept


def test_what_was_accumulated_before_the_pass_that_failed_is_kept(model: Path, faults: Path):
    """The imitated part comes second: when it fails, the policy's gradient is there already."""
    config = CONFIG.replace(sft_weight=0.5, sft_batch=6, kl_coef=0.0)
    unharmed = trainer(model, faults, config)
    unharmed.train(groups(0)[:1], imitate=SAID)
    found = trainer(model, faults, config)
    policy = found.policy
    assert isinstance(policy, FaultyPolicy)
    size_of_mixed = []
    states = FaultyPolicy.states

    def limited(self: FaultyPolicy, layout):  # the second tree of the update is one token too large
        if torch.is_grad_enabled():  # not one of the passes that look which paths are right
            size_of_mixed.append(len(layout))
            if len(size_of_mixed) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return states(self, layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultyPolicy, "states", limited)
        report = found.train(groups(0)[:1], imitate=SAID)
    assert kinds(report.events) == ["token_budget_lowered"]
    assert len(size_of_mixed) > 2
    assert close(unharmed, found)


def test_less_is_kept_in_memory_before_passes_become_tiny(model: Path, faults: Path):
    unharmed = trainer(model, faults)
    unharmed.train(groups(0))
    set_fault(faults, most_tokens=120)
    relieved = trainer(model, faults, CONFIG.replace(gradient_checkpointing="auto"))
    assert not relieved.policy.gradient_checkpointing
    report = relieved.train(groups(0))
    assert kinds(report.events) == ["gradient_checkpointing_on", *["token_budget_lowered"] * 3]
    assert relieved.policy.gradient_checkpointing
    assert close(unharmed, relieved)


class Sharded(Alone):
    """Ranks of a sharded model, all of them here."""

    sharded = True


@pytest.mark.parametrize(("wanted", "found"), [("auto", True), (False, False), (True, True)])
def test_a_sharded_model_keeps_little_from_the_beginning(
    model: Path, faults: Path, wanted: object, found: bool
):
    """It cannot make a pass again that ran out of memory."""
    policy = tiny_policy(model, faults)("cpu")
    Trainer(policy, CONFIG.replace(gradient_checkpointing=wanted), ranks=Sharded())
    assert policy.gradient_checkpointing is found


def test_when_not_even_one_path_fits_the_error_names_its_length_and_nothing_has_changed(
    model: Path, faults: Path
):
    set_fault(faults, most_tokens=46)
    stuck = trainer(model, faults)
    before = weights(stuck.policy)
    with pytest.raises(
        OutOfMemoryError, match=f"at most {PROMPT + 9} tokens, the length of the longest path"
    ):
        stuck.train(groups(0))
    assert same(weights(stuck.policy), before)
    assert stuck.optimizer.updates == 0
    faults.unlink()
    assert stuck.train(groups(0)).updated


def test_other_errors_are_not_taken_for_a_lack_of_memory(model: Path, faults: Path):
    set_fault(faults, message="shapes do not match")
    broken = trainer(model, faults)
    with pytest.raises(ValueError, match="shapes do not match"):
        broken.train(groups(0))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of range"), False),
    ],
)
def test_errors_that_say_that_memory_is_short(error: Exception, expected: bool):
    assert is_out_of_memory(error) is expected


def test_an_optimizer_in_the_host_s_memory_makes_the_same_steps_and_checkpoints(
    model: Path, faults: Path, tmp_path: Path
):
    here, there = (trainer(model, faults, CONFIG.replace(optimizer_offload=on)) for on in (False, True))
    for seed in range(2):
        here.train(groups(seed))
        there.train(groups(seed))
    assert same(weights(here.policy), weights(there.policy))
    written = checkpoints.save(tmp_path, there, version=1)
    there.train(groups(2))
    checkpoints.load(written.directory, here)
    here.train(groups(2))
    assert same(weights(here.policy), weights(there.policy))


def test_steps_on_the_host_do_not_share_memory_with_the_weights():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Optimizer([parameter], weight_decay=0.0, max_grad_norm=1.0, offload=True)
    parameter.grad = torch.ones(3)
    optimizer.step(0.1, optimizer.grad_norm())
    assert parameter.detach().tolist() == pytest.approx([0.9] * 3, abs=1e-3)
    with torch.no_grad():
        parameter.fill_(5.0)  # as a checkpoint that is loaded would
    parameter.grad = torch.ones(3)
    optimizer.step(0.1, optimizer.grad_norm())
    assert parameter.detach().tolist() == pytest.approx([4.9] * 3, abs=1e-3)


def test_a_trajectory_of_eight_thousand_tokens_trains(tmp_path: Path):
    directory = tiny_model(tmp_path / "long", hidden=32)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 10_000}))
    config = CONFIG.replace(gradient_checkpointing=True, kl_coef=0.0)
    long = trainer(directory, tmp_path / "none", config)
    dice = random.Random(0)
    ids = [dice.randint(5, 300) for _ in range(8_000)]
    # One rollout of 16 turns, each of which continues the one before it.
    turns = [
        step(f"t{i}", ids[: 500 * i + 400], ids[500 * i + 400 : 500 * (i + 1)], logprobs=[-5.5] * 100)
        for i in range(16)
    ]
    short = step("short", [5, 6], [7], logprobs=[-5.5])
    report = long.train([group(trajectory("long", 1.0, *turns), trajectory("short", 0.0, short))])
    assert report.metrics["entries"] == 1601
    assert report.updated


def test_a_budget_is_what_fits_into_the_memory_left():
    line = Footprint(fixed=1e9, per_token=1e6)
    assert line.budget(10e9) == (8.5e9 - 1e9) / 1e6 // 256 * 256
    assert line.budget(1e9) == SMALLEST
    assert Footprint(0.0, 0.0).budget(1e9) == 32768


def test_on_a_cpu_the_budget_needs_no_measuring(model: Path, faults: Path):
    found = trainer(model, faults, CONFIG.replace(token_budget="auto"))
    assert found.budget.tokens == CPU_BUDGET


def test_the_tree_that_is_measured_has_the_size_and_leaves_no_gradient(
    model: Path, faults: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy = tiny_policy(model, faults)("cpu")
    for size in (64, 512):
        tree = probe(policy, size)
        assert len(tree) == size
        assert len(tree.branch_starts) == 2
    for name, answer in {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 100,
        "max_memory_allocated": lambda device: 100 + 1000 * sizes[-1],
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    sizes: list[int] = []
    states = FaultyPolicy.states
    monkeypatch.setattr(
        FaultyPolicy,
        "states",
        lambda self, lay: sizes.append(512 if len(lay) < 600 else 2048) or states(self, lay),
    )
    policy.trainable_parameters()[0].grad = torch.ones_like(policy.trainable_parameters()[0])
    assert peak_memory(policy, probe(policy, 512)) == 512_000
    assert [p.grad is None for p in policy.trainable_parameters()][:2] == [False, True]
    monkeypatch.setenv("ART_CACHE", str(tmp_path))
    found = footprint(policy)
    assert found == Footprint(0.0, 1000.0)
    passes = len(sizes)
    assert footprint(policy) == found
    assert len(sizes) == passes  # out of the table
    assert footprint(policy, anew=True) == found
    assert len(sizes) > passes


@pytest.mark.parametrize(
    ("most", "found"), [(600, Footprint(0.0, 1000.0)), (100, None)], ids=["the larger", "both"]
)
def test_memory_that_is_too_short_for_what_is_measured_makes_a_small_budget_and_no_error(
    model: Path,
    faults: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    found: Footprint | None,
):
    policy = tiny_policy(model, faults)("cpu")
    for name, answer in {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 0,
        "max_memory_allocated": lambda device: 512_000,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setenv("ART_CACHE", str(tmp_path / "cache"))
    set_fault(faults, most_tokens=most)
    gradient = torch.ones_like(policy.trainable_parameters()[0])
    policy.trainable_parameters()[0].grad = gradient
    assert footprint(policy) == found
    assert policy.trainable_parameters()[0].grad is gradient
    assert not (tmp_path / "cache").exists()  # another time there may be more


def test_paths_are_timed_over_what_fits_into_memory(
    model: Path, faults: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy = tiny_policy(model, faults)("cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setenv("ART_CACHE", str(tmp_path))
    whole = min(LONGEST, policy.context_length or LONGEST)
    set_fault(faults, most_tokens=3 * whole)  # eight rollouts: as a tree, and not row by row
    choice = PathChoice(policy)
    asked = ["tree", "padded"]
    assert all(isinstance(found, float) and found > 0 for found in choice._kept(asked).values())
    table = json.loads((tmp_path / "paths.json").read_text())
    assert [list(rates) for rates in table.values()] == [["tree"]]  # another time there may be more
    set_fault(faults, most_tokens=100)
    with pytest.raises(torch.OutOfMemoryError):
        choice._kept(asked)


def test_checkpointing_that_was_asked_for_ends_when_it_is_left_to_us(model: Path, faults: Path):
    found = trainer(model, faults, CONFIG.replace(gradient_checkpointing=True))
    found.set_config(CONFIG.replace(gradient_checkpointing="auto"))
    assert not found.policy.gradient_checkpointing
    set_fault(faults, most_tokens=120)
    found.train(groups(0))
    assert found.policy.gradient_checkpointing
    found.set_config(CONFIG.replace(gradient_checkpointing="auto", learning_rate=1e-4))
    assert found.policy.gradient_checkpointing


def test_a_table_keeps_others_entries_and_outlives_damage(tmp_path: Path, model: Path, faults: Path):
    table = Measured("kind", tmp_path)
    assert table.get({"a": 1}) is None
    table.put({"a": 1}, {"x": 1.5})
    table.put({"a": 2}, {"x": 2.5})
    assert Measured("kind", tmp_path).get({"a": 1}) == {"x": 1.5}
    for damage in ("{half", "[1, 2]", json.dumps({'{"a": 1}': 3})):
        table.path.write_text(damage)
        assert table.get({"a": 1}) is None
    table.put({"a": 1}, {"x": 3.5})
    assert table.get({"a": 1}) == {"x": 3.5}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        table.put({"a": 2}, {"x": 2.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "kind"))] == ["kind.json"]
    policy = tiny_policy(model, faults)("cpu")
    other = FaultyPolicy.load(str(model), LoRAConfig(rank=8), dtype="float32")
    assert machine_key(policy) != machine_key(other)


def test_what_is_measured_with_other_kernels_is_measured_again(model: Path, faults: Path):
    keys = [machine_key(tiny_policy(model, faults, kernels)("cpu")) for kernels in ("modules", "fused")]
    exact = FaultyPolicy.load(str(model), LORA, dtype="float32", kernels="fused", adapter_compute="float32")
    keys.append(machine_key(exact))
    assert len({json.dumps(key) for key in keys}) == 3
