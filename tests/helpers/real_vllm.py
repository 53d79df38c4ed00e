"""What a real vLLM is told that is one of several processes on a machine of few cores."""

import os
from pathlib import Path

PATIENT = Path(__file__).parent / "patient_vllm"


def share_the_machine() -> None:
    """Have every vLLM that this process starts from now on leave room for others."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # any core that is free
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(PATIENT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PATIENT), *paths)))
