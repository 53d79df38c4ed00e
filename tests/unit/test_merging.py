import json
import os
from pathlib import Path

import pytest
import torch
from helpers.tiny import tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from art_core.errors import ConfigError
from art_core.inference.merging import merge, read_adapter


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model in several files of weights."""
    path = tiny_model(tmp_path / "tiny", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=request.param)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def adapter(base: Path, into: Path, **settings) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **settings})
    peft = get_peft_model(model, config)
    torch.manual_seed(1)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    peft.save_pretrained(into)
    return into


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def merged_by_peft(base: Path, adapter_dir: Path) -> dict[str, torch.Tensor]:
    """In float32, as the reference."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return dict(PeftModel.from_pretrained(model, adapter_dir).merge_and_unload().state_dict())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"target_modules": ["q_proj", "down_proj"]},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 12}},
    ],
    ids=["plain", "rank-stabilised", "some-layers", "patterns"],
)
def test_merged_weights_are_those_that_peft_merges_rounded_once(base: Path, tmp_path: Path, settings: dict):
    adapter_dir = adapter(base, tmp_path / "adapter", **settings)
    merged = weights(merge(base, adapter_dir, tmp_path / "merged"))
    before, expected = weights(base), merged_by_peft(base, adapter_dir)
    assert merged.keys() == before.keys()
    changed = set(read_adapter(adapter_dir))
    assert changed
    for name, weight in merged.items():
        assert weight.dtype == before[name].dtype
        if name in changed:
            rtol = 1e-6 if weight.dtype == torch.float32 else 0.008  # one step of bfloat16
            torch.testing.assert_close(weight, expected[name].to(weight.dtype), rtol=rtol, atol=1e-6)
            assert not torch.equal(weight, before[name])
        else:
            assert torch.equal(weight, before[name]), f"{name} is not the adapter's to change"


def test_a_merged_directory_is_a_model_that_says_what_base_and_adapter_say(tmp_path: Path):
    base = tiny_model(tmp_path / "tiny")
    adapter_dir = adapter(base, tmp_path / "adapter")
    merged = merge(base, adapter_dir, tmp_path / "merged")
    ids = torch.tensor([[1, 5, 9, 2, 7]])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(model, adapter_dir)(ids).logits
        found = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (merged / name).read_bytes() == (base / name).read_bytes()


def test_nothing_is_left_when_an_adapter_belongs_to_another_model(tmp_path: Path):
    base = tiny_model(tmp_path / "small")
    deep = tiny_model(tmp_path / "deep", layers=3)
    adapter_dir = adapter(deep, tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"changes 7 weights that .*small does not have.*layers\.2"):
        merge(base, adapter_dir, tmp_path / "out" / "merged")
    wide = adapter(tiny_model(tmp_path / "wide", hidden=128), tmp_path / "other")
    with pytest.raises(ConfigError, match="the adapter is for"):
        merge(base, wide, tmp_path / "out" / "merged")
    assert os.listdir(tmp_path / "out") == []


def test_an_existing_directory_is_not_written_into(tmp_path: Path):
    base = tiny_model(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="exists"):
        merge(base, adapter(base, tmp_path / "adapter"), tmp_path)


def test_adapters_that_do_more_than_lora_are_refused_by_what_they_do(tmp_path: Path):
    base = tiny_model(tmp_path / "tiny")
    with pytest.raises(ConfigError, match=r"use_dora=True.*publish='adapter'"):
        merge(base, adapter(base, tmp_path / "dora", use_dora=True), tmp_path / "merged")
    with pytest.raises(ConfigError, match="modules_to_save"):
        merge(base, adapter(base, tmp_path / "saved", modules_to_save=["lm_head"]), tmp_path / "merged")
    with pytest.raises(ConfigError, match="no PEFT adapter directory"):
        merge(base, tmp_path, tmp_path / "merged")


def test_weights_that_are_quantised_or_of_another_kind_are_refused(tmp_path: Path):
    base = tiny_model(tmp_path / "tiny")
    adapter_dir = adapter(base, tmp_path / "adapter")
    (shard,) = base.glob("*.safetensors")
    tensors = {n: t.to(torch.int8) if "q_proj.weight" in n else t for n, t in load_file(shard).items()}
    save_file(tensors, shard)
    with pytest.raises(ConfigError, match=r"q_proj\.weight: .*torch\.int8.*16 or 32 bits"):
        merge(base, adapter_dir, tmp_path / "merged")
    shard.unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        merge(base, adapter_dir, tmp_path / "merged")


def test_the_scale_is_alpha_over_rank_or_over_its_root(tmp_path: Path):
    base = tiny_model(tmp_path / "tiny")
    plain = read_adapter(adapter(base, tmp_path / "plain", r=4, lora_alpha=6))
    assert {u.scale for u in plain.values()} == {1.5}
    stabilised = read_adapter(adapter(base, tmp_path / "rs", r=4, lora_alpha=6, use_rslora=True))
    assert {u.scale for u in stabilised.values()} == {3.0}
    settings = json.loads((tmp_path / "plain" / "adapter_config.json").read_text())
    assert settings["r"] == 4
