"""A chat template that is named in place of the model's own: everybody who renders messages uses it."""

from pathlib import Path

import pytest
from helpers.json_tools import LESSON, check_lesson, json_tools_model
from helpers.tiny import tiny_model
from transformers import AutoTokenizer

from art_core import LocalBackend, ParallelConfig, TrainableModel
from art_core.errors import ConfigError
from art_core.inference.chat_templates import CHATML_JSON_TOOLS


def test_what_is_fine_tuned_is_what_the_embedded_engine_feeds_and_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with json_tools_model(tmp_path, kind="embedded") as model:
        check_lesson(model, monkeypatch)


def make(tmp_path: Path, name: str, **backend: object) -> TrainableModel:
    base_model = tmp_path / "model"
    if not base_model.exists():
        tiny_model(base_model)
    model = TrainableModel(base_model=str(base_model), project="p", name=name, lora_rank=4)
    model.register(LocalBackend(root=tmp_path, dtype="float32", max_model_len=512, **backend))  # type: ignore[arg-type]
    return model


def test_trainer_processes_render_with_it_too(tmp_path: Path) -> None:
    tokens: dict[str, float] = {}
    with make(tmp_path, "here", chat_template=CHATML_JSON_TOOLS) as model:
        tokens["here"] = model.sft([LESSON], steps=1).metrics["tokens_total"]
    with make(tmp_path, "own") as model:
        tokens["own"] = model.sft([LESSON], steps=1).metrics["tokens_total"]
    apart = ParallelConfig(processes=1)
    with make(tmp_path, "apart", chat_template=CHATML_JSON_TOOLS, parallel=apart) as model:
        tokens["apart"] = model.sft([LESSON], steps=1).metrics["tokens_total"]
        model.save_model(tmp_path / "written")
    assert tokens["apart"] == tokens["here"] != tokens["own"]
    written = AutoTokenizer.from_pretrained(tmp_path / "written")
    assert written.chat_template == CHATML_JSON_TOOLS.read_text()


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"\xff\xfe\x00", "not UTF-8")])
def test_a_template_that_cannot_be_read_is_refused_before_a_model_is_loaded(
    tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "mine.jinja"
    if content is not None:
        path.write_bytes(content)
    model = TrainableModel(base_model=str(tmp_path / "no model"), project="p", name="agent")
    with pytest.raises(ConfigError, match=rf"EngineConfig.chat_template=.*mine.jinja: .*{why}"):
        model.register(LocalBackend(root=tmp_path, chat_template=path, kind="embedded"))
