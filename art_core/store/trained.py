"""What training steps did with the steps of rollouts, as rows and back.

Invariant: of one training step there is at most one row for each step of a rollout; the last one counts.

For each sampled token there is a ratio (little-endian float32, NaN where there is none) and a byte of marks.
They come packed from the trainer and are unpacked when somebody looks at a trajectory.
"""

import math
import struct
from collections.abc import Sequence
from typing import Protocol

from sqlalchemy import Connection, delete, insert, select

from art_core.store.packing import pack, pack_noise, unpack
from art_core.store.prepared import Prepared
from art_core.store.records import TrainedStep
from art_core.store.schema import steps, trained_steps

_TRAINED, _CLIPPED = 1, 2  # of `art_core.training.trained`; kept bytes must go on meaning the same


class StepTraining(Protocol):
    """What the trainer says of one step; see `art_core.training.trained.StepTraining`."""

    @property
    def step_id(self) -> str:
        """Of the rollout's step."""
        ...

    @property
    def advantage(self) -> float:
        """What its tokens were pushed by."""
        ...

    @property
    def ratio(self) -> bytes:
        """Little-endian float32, NaN where there is none  [trained_tokens]."""
        ...

    @property
    def marks(self) -> bytes:
        """1 for a token that gave a gradient, 2 more when its ratio was clipped  [trained_tokens]."""
        ...


_INSERT = Prepared(lambda _: insert(trained_steps).inline())


def insert_trained(
    connection: Connection, run_id: str, train_step: int, trained: Sequence[StepTraining]
) -> None:
    """Write what one training step did; what was written of it before is replaced."""
    mine = (trained_steps.c.run_id == run_id) & (trained_steps.c.train_step == train_step)
    connection.execute(delete(trained_steps).where(mine))
    last = {each.step_id: each for each in trained}
    _INSERT.execute(
        connection,
        [
            {
                "run_id": run_id,
                "train_step": train_step,
                "step_id": each.step_id,
                "advantage": each.advantage,
                "ratio": pack_noise(each.ratio),
                "trained": pack(each.marks),
            }
            for each in last.values()
        ],
    )


def read_trained(connection: Connection, trajectory_id: str) -> list[TrainedStep]:
    """What was done with a trajectory's steps, in the order in which it was done."""
    joined = trained_steps.join(steps, trained_steps.c.step_id == steps.c.id)
    query = (
        select(trained_steps, steps.c.completion_tokens)
        .select_from(joined)
        .where(steps.c.rollout_id == trajectory_id)
        .order_by(trained_steps.c.seq)
    )
    found: list[TrainedStep] = []
    for row in connection.execute(query):
        marks, ratio = unpack(row.trained), unpack(row.ratio)
        sampled = len(unpack(row.completion_tokens)) // 4
        marks += bytes(sampled - len(marks))  # the end of a long answer may have been cut off
        ratios = (*struct.unpack(f"<{len(ratio) // 4}f", ratio), *[math.nan] * (sampled - len(ratio) // 4))
        found.append(
            TrainedStep(
                run_id=row.run_id,
                train_step=row.train_step,
                step_id=row.step_id,
                advantage=row.advantage,
                ratio=tuple(None if math.isnan(r) else r for r in ratios),
                trained=tuple(bool(mark & _TRAINED) for mark in marks),
                clipped=tuple(bool(mark & _CLIPPED) for mark in marks),
            )
        )
    return found
