"""Memory that some processes have on a GPU, as its driver tells it: others may use the same GPU meanwhile."""

import os
import subprocess

import torch


def gib_of_group(group: int) -> float:
    """What the processes of a process group have on all GPUs together, in GiB.

    Where the driver names no process of theirs (in a container it may not), what is used of the first GPU by
    whomever.
    """
    asked = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    rows = [line.split(",") for line in said.splitlines() if line.strip()]
    used = [float(mib) for pid, mib in rows if mib.strip().isdecimal() and _group_of(int(pid)) == group]
    if used:
        return sum(used) / 2**10
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / 2**30


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None
