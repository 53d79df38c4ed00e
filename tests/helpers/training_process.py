"""A real run in a process of its own: a tiny model that takes a training step for every line it is sent.

    python tests/helpers/training_process.py ROOT

It answers each line with what it wrote: the run's id first, then a JSON object for each step.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, when run as a script
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROJECT = "live"


class TrainingProcess:
    """The process, as its tests drive it."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        self.steps = 0
        self.run_id: str = self._answer()["run"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(f"the training process ended: {self.process.wait(120)}")

    def step(self) -> dict[str, Any]:
        """One more training step; its metrics."""
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.steps += 1
        return answer

    def reach(self, count: int) -> int:
        """Take steps until there are at least so many; how many there are."""
        while self.steps < count:
            self.step()
        return self.steps

    def end(self) -> int:
        """Let the run end in good order; the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(120)

    def kill(self) -> None:
        """As when a machine is switched off."""
        self.process.kill()
        self.process.wait(120)


def main() -> None:
    from helpers.tiny import tiny_model

    from art_core import LocalBackend, TrainableModel, TrainConfig
    from art_core.config import GuardrailConfig

    root = Path(sys.argv[1])
    guardrails = GuardrailConfig(max_kl=None, max_norm_growth=None)
    model = TrainableModel(
        base_model=str(tiny_model(root / "base")),
        project=PROJECT,
        name="agent",
        train=TrainConfig(learning_rate=1e-2, guardrails=guardrails),
        lora_rank=4,
    )
    backend = LocalBackend(root=root, dtype="float32", max_model_len=256)
    model.register(backend)
    with model:
        from art_core.store import Store

        with Store.open(PROJECT, root) as store:
            print(json.dumps({"run": store.runs()[-1].id}), flush=True)
        for _ in sys.stdin:
            for seed, reward in enumerate((0.0, 1.0)):
                rollout = model.start_trajectory("colour")
                model.chat.completions.create(
                    messages=[{"role": "user", "content": "name a colour"}], max_tokens=2, seed=seed
                )
                model.end_trajectory(rollout, reward=reward)
            print(json.dumps(dict(model.train().metrics)), flush=True)


if __name__ == "__main__":
    main()
