"""Checkpoints: everything that the next update depends on, on disk.

Invariant: a directory named ``checkpoint-<version>`` is complete, or does not exist; a run resumed from
it makes the same updates as one that was never interrupted, bit for bit on a CPU.

A checkpoint is written to a temporary directory, synced and renamed. Its manifest
(``checkpoint.json``) holds size and checksum of every other file, and its own checksum::

    checkpoint-00000012/
        adapter/            an ordinary PEFT directory; or model/, the whole model, without LoRA
        training.pt         optimizers, schedules, random generators
        checkpoint.json     format, policy version, caller's state, base model, LoRA, checksums
"""

import hashlib
import json
import logging
import os
import random
import shutil
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from art_core.config import LoRAConfig, RetentionConfig
from art_core.errors import CheckpointError
from art_core.training.written_whole import WRITING, refused_by_the_disk, taking_the_place_of

logger = logging.getLogger(__name__)

FORMAT = 2
PREFIX = "checkpoint-"
MANIFEST = "checkpoint.json"
ADAPTER = "adapter"
MODEL = "model"
TRAINING_STATE = "training.pt"
_WAY_OUT = (
    "restore a copy, or move the directory of this checkpoint away to go on from the one before; a fork from "
    "an earlier version leaves everything where it is"
)


class Kept(Protocol):
    """What a checkpoint keeps of a policy."""

    lock: threading.RLock

    @property
    def lora(self) -> LoRAConfig | None:
        """The adapter; None: all weights are trained."""
        ...

    @property
    def base_model(self) -> str:
        """The base model's hub name or directory."""
        ...

    def base_fingerprint(self) -> str:
        """Tells base models apart by their weights."""
        ...

    def save_weights(self, directory: Path) -> None:
        """Write what is trained as an ordinary directory, of PEFT or of transformers."""
        ...

    def load_weights(self, directory: Path) -> None:
        """Replace what is trained by what `save_weights` wrote."""
        ...


class Resumable(Protocol):
    """A trainer that can go on from a checkpoint, in this process or in others."""

    @property
    def policy(self) -> Kept:
        """What it trains."""
        ...

    def save_state(self, path: Path, generators: Mapping[str, Any]) -> None:
        """Write everything that the next update depends on, beside the adapter and the configuration."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `save_state` wrote."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been written or read.

    Attributes:
        directory: where it lies.
        version: number of the policy version that it holds.
        state: what the caller wanted kept: data position, anything that is JSON.
    """

    directory: Path
    version: int
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def weights_dir(self) -> Path:
        """What was trained: an ordinary PEFT directory, or the whole model."""
        return trained_dir(self.directory)


def save(
    root: Path, trainer: Resumable, *, version: int, state: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Write a checkpoint under ``root``.

    Args:
        root: directory of a run's checkpoints; made when missing.
        trainer: what is kept, with the random generators of torch, NumPy and Python.
        version: number of the policy version that the adapter is.
        state: kept as JSON for the caller.

    Raises:
        CheckpointError: there is a checkpoint of this version, the state is not JSON, or the disk
            refuses. Earlier checkpoints are untouched in each case.
    """
    target = root / f"{PREFIX}{version:08d}"
    if target.exists():
        raise CheckpointError(f"{target} exists already; a policy version is written once")
    try:
        kept = json.dumps(dict(state or {}), sort_keys=True)
    except (TypeError, ValueError) as unfit:
        raise CheckpointError(f"{target}: the caller's state is not JSON: {unfit}") from unfit
    try:
        with taking_the_place_of(target) as scratch:
            _write(scratch, trainer, version, json.loads(kept))
    except (OSError, CheckpointError) as refused:
        raise CheckpointError(
            f"cannot write {target}: {refused}. Earlier checkpoints are untouched; training goes on from "
            "memory once there is room"
        ) from refused
    return Checkpoint(target, version, json.loads(kept))


def load(directory: Path, trainer: Resumable) -> Checkpoint:
    """Make a trainer go on from a checkpoint; random generators are set too.

    Args:
        directory: what `save` wrote.
        trainer: of the same base model and LoRA; its settings may differ.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, damaged, of a newer format, or of another
            base model or LoRA. The trainer is then as it was.
    """
    manifest = verify(directory)
    _check_fits(directory, manifest, trainer)
    path = directory / TRAINING_STATE
    try:
        training = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as unreadable:  # pickle, zip and torch each raise their own
        raise CheckpointError(f"{path} cannot be read: {unreadable}") from unreadable
    trainer.policy.load_weights(trained_dir(directory))
    trainer.load_state_dict(training["trainer"])
    _restore_generators(training["generators"])
    return Checkpoint(directory, manifest["version"], manifest["state"])


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints under ``root``, oldest first."""
    found = [p for p in root.glob(f"{PREFIX}*") if p.name.removeprefix(PREFIX).isdecimal() and p.is_dir()]
    return sorted(found, key=number_of)


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint under ``root``; None when there is none."""
    found = list_checkpoints(root)
    return found[-1] if found else None


def number_of(directory: Path) -> int:
    """The policy version that a checkpoint's directory holds, by its name."""
    return int(directory.name.removeprefix(PREFIX))


def trained_dir(directory: Path) -> Path:
    """Where a checkpoint has what was trained: an ordinary PEFT directory, or the whole model."""
    whole = directory / MODEL
    return whole if whole.is_dir() else directory / ADAPTER


def prune(
    root: Path,
    retention: RetentionConfig,
    versions: Collection[int] = (),
    scores: Mapping[int, float] | None = None,
) -> list[Path]:
    """Delete the checkpoints that nothing says to keep; returns what is gone.

    One that cannot be deleted costs room and no training: it is said in the log.

    Args:
        root: directory of a run's checkpoints.
        retention: which ones stay.
        versions: numbers of others that stay, since they are served.
        scores: ``retention.metric`` of versions whose rollouts are known.
    """
    found = list_checkpoints(root)
    there = {number_of(p) for p in found}
    known = {n: score for n, score in (scores or {}).items() if n in there}
    best = sorted(known, key=lambda n: (known[n], n), reverse=True)[: retention.best]
    kept = {*versions, *best, *map(number_of, found[-retention.last :])}
    if retention.every is not None:
        kept |= {n for n in there if n % retention.every == 0}
    gone: list[Path] = []
    for directory in (p for p in found if number_of(p) not in kept):
        # Renamed first: a directory that is half deleted must not look like a checkpoint.
        doomed = directory.with_name(f"{WRITING}{os.getpid()}-{directory.name}")
        try:
            directory.rename(doomed)
            gone.append(directory)
            shutil.rmtree(doomed)
        except OSError as stuck:
            logger.warning("%s is not needed any more and cannot be deleted: %s", directory, stuck)
    return gone


def fork(directory: Path, root: Path) -> Path:
    """Copy a checkpoint to where another run's are, for that run to go on from it; returns the copy.

    Args:
        directory: what `save` wrote.
        root: directory of the other run's checkpoints; made when missing.

    Raises:
        CheckpointError: the checkpoint is damaged, the other run has checkpoints already, or the disk
            refuses.
    """
    verify(directory)
    if others := list_checkpoints(root):
        raise CheckpointError(
            f"{root} has checkpoints already, up to {others[-1].name}; fork under another name"
        )
    target = root / directory.name
    try:
        with taking_the_place_of(target) as scratch:
            shutil.copytree(directory, scratch, dirs_exist_ok=True)
    except OSError as refused:
        raise CheckpointError(f"cannot copy {directory} to {target}: {refused}") from refused
    return target


def _write(scratch: Path, trainer: Resumable, version: int, state: Mapping[str, Any]) -> None:
    with trainer.policy.lock, refused_by_the_disk(scratch):
        trainer.policy.save_weights(scratch / (MODEL if trainer.policy.lora is None else ADAPTER))
        trainer.save_state(scratch / TRAINING_STATE, _generators())
    files = sorted(p for p in scratch.rglob("*") if p.is_file())
    manifest = {
        "format": FORMAT,
        "version": version,
        "state": state,
        "base_model": trainer.policy.base_model,
        "base_fingerprint": trainer.policy.base_fingerprint(),
        "lora": _settings(trainer.policy.lora),
        "files": {
            p.relative_to(scratch).as_posix(): {"bytes": p.stat().st_size, "sha256": _checksum(p)}
            for p in files
        },
    }
    manifest["sha256"] = _digest(manifest)
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True))


def verify(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files, sizes and checksums are all as they were written.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, damaged or of another format.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        written = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as unreadable:
        raise CheckpointError(f"{path} is missing or damaged: {unreadable}; {_WAY_OUT}") from unreadable
    if written != FORMAT:
        raise CheckpointError(
            f"{path} has format {written}, this version reads {FORMAT}; use the version that wrote it"
        )
    if manifest.pop("sha256", None) != _digest(manifest):
        raise CheckpointError(f"{path} is damaged: it is not what was written; {_WAY_OUT}")
    for name, expected in manifest["files"].items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: the checkpoint is incomplete; {_WAY_OUT}")
        if (size := file.stat().st_size) != expected["bytes"]:
            raise CheckpointError(
                f"{file} is damaged: it has {size} bytes, {expected['bytes']} were written; {_WAY_OUT}"
            )
        if (found := _checksum(file)) != expected["sha256"]:
            raise CheckpointError(
                f"{file} is damaged: its sha256 is {found[:12]}..., {expected['sha256'][:12]}... was "
                f"written; {_WAY_OUT}"
            )
    return manifest


def _digest(manifest: Mapping[str, Any]) -> str:
    """Checksum of a manifest's content, however it is laid out."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check_fits(directory: Path, manifest: Mapping[str, Any], trainer: Resumable) -> None:
    written, ours = manifest["lora"], _settings(trainer.policy.lora)
    if (written is None) != (ours is None):  # their base models' checksums differ by the weights' names
        there, here = (
            "all weights, without LoRA (lora=None)" if one is None else "a LoRA adapter"
            for one in (written, ours)
        )
        raise CheckpointError(f"{directory} has trained {there}, and this model trains {here}")
    if manifest["base_fingerprint"] != trainer.policy.base_fingerprint():
        raise CheckpointError(
            f"{directory} was trained on {manifest['base_model']!r}, whose weights are not those of "
            f"{trainer.policy.base_model!r}"
        )
    if written is None or ours is None:
        return
    differing = [
        f"{k} is {written.get(k)!r} there, {v!r} here" for k, v in ours.items() if written.get(k) != v
    ]
    if differing:
        raise CheckpointError(f"{directory} holds another adapter: LoRA {'; '.join(differing)}")


def _settings(lora: LoRAConfig | None) -> dict[str, Any] | None:
    return None if lora is None else lora.model_dump(mode="json")


def _generators() -> dict[str, Any]:
    """States of the process's random generators, as plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        # Only where this process computes on a GPU: asking would set up a context on each of them.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "python": random.getstate(),
    }


def _restore_generators(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_initialized() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    random.setstate(states["python"])


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
