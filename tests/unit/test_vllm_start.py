import io
import logging
from pathlib import Path

import pytest
from rich.console import Console
from rich.status import Status

from art_core.inference.vllm_start import FIRST_PHASE, READY, StartDisplay, StartProgress, find_phase

LOG = """\
(APIServer pid=1) INFO 11-29 20:25:08 [model.py:733] Resolved architecture: LlamaForCausalLM
(EngineCore pid=2) INFO 11-29 20:25:49 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: ...
(Worker pid=3) INFO 11-29 20:26:24 [gpu_model_runner.py:5040] Starting to load model Qwen/Qwen2.5-7B...
Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<00:01,  1.57it/s]
(Worker pid=3) INFO 11-29 20:26:25 [gpu_model_runner.py:5150] Model loading took 14.2 GiB and 9.1 seconds
(Worker pid=3) INFO 11-29 20:26:27 [backends.py:1105] Using cache directory: /c for vLLM's torch.compile
(Worker pid=3) INFO 11-29 20:26:40 [backends.py:1167] Dynamo bytecode transform time: 8.70 s
(Worker pid=3) INFO 11-29 20:26:41 [backends.py:296] Directly load the compiled graph(s) from the cache
(EngineCore pid=2) INFO 11-29 20:26:44 [kv_cache_utils.py:2327] GPU KV cache size: 93,184 tokens
Capturing CUDA graphs (decode, FULL):  50%|#####     | 17/35 [00:01<00:01]
(Worker pid=3) INFO 11-29 20:26:50 [gpu_model_runner.py:6582] Graph capturing finished in 9 secs
(APIServer pid=1) INFO 11-29 20:26:52 [entry.py:140] Starting vLLM server on http://127.0.0.1:33917
"""
EXPECTED = [
    FIRST_PHASE,
    "starting the engine",
    "loading weights",
    "loading weights",
    "measuring memory",
    "compiling",
    "compiling",
    "loading compiled graphs from the cache",
    "warming up",
    "capturing CUDA graphs",
    "starting the HTTP server",
    "starting the HTTP server",
]


def test_the_newest_line_that_says_so_names_the_phase():
    lines = LOG.splitlines()
    assert [find_phase("\n".join(lines[: n + 1])) for n in range(len(lines))] == EXPECTED
    assert find_phase("") == FIRST_PHASE


def steps() -> list[StartProgress]:
    log = Path("vllm.log")
    phases = [("loading weights", False), ("loading weights", False), ("compiling", False), (READY, True)]
    return [
        StartProgress(phase, float(seconds), "a [line]", log, ended)
        for seconds, (phase, ended) in enumerate(phases)
    ]


def test_a_log_gets_one_line_for_each_phase(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    shown = io.StringIO()
    display = StartDisplay("agent", Console(file=shown, force_terminal=False))
    for step in steps():
        display(step)
    assert [r.getMessage() for r in caplog.records if r.name.startswith("art_")] == [
        "agent: loading weights (0 s), log in vllm.log",
        "agent: compiling (2 s), log in vllm.log",
        "agent: ready (3 s), log in vllm.log",
    ]
    assert shown.getvalue() == ""


def test_a_terminal_shows_what_is_waited_for_and_is_left_clean():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    display = StartDisplay("agent", console)
    for step in steps():
        display(step)
    assert "agent: compiling (2 s)" in shown.getvalue()
    assert "a [line]" in shown.getvalue()
    with console.status("free again"):
        pass


def test_what_was_chosen_is_said_once_and_stays_at_a_terminal():
    shown = io.StringIO()
    display = StartDisplay("agent", Console(file=shown, force_terminal=True, width=100))
    chosen = StartProgress(FIRST_PHASE, 0.0, "", Path("vllm.log"), note="tool calls are read by 'hermes'")
    for step in (chosen, *steps()):
        display(step)
    assert shown.getvalue().count("tool calls are read by 'hermes'") == 1


def test_a_start_beside_another_live_display_goes_to_the_log_alone(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    console = Console(file=io.StringIO(), force_terminal=True)
    with Status("rollouts", console=console):
        for step in steps():
            StartDisplay("agent", console)(step)
    assert "agent: compiling" in caplog.text
