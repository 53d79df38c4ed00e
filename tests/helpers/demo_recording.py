"""A recorded run of the demo, as a store for tests to read: 20 training steps of a real model.

``tests/data/demo_run.sql.xz`` was made from what ``examples/tic_tac_toe/demo.py`` wrote::

    python examples/tic_tac_toe/demo.py --steps 20 --opponents 2 --group-size 8 --warm-steps 10 \\
        --held-out 30 --out SOMEWHERE
    python tests/helpers/demo_recording.py SOMEWHERE/tic-tac-toe.db
"""

import argparse
import json
import lzma
import sqlite3
from pathlib import Path

RECORDING = Path(__file__).resolve().parents[1] / "data" / "demo_run.sql.xz"
PROJECT = "tic-tac-toe"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def unpack(root: Path) -> Path:
    """Write the recording as ``<root>/tic-tac-toe.db``; returns that path."""
    path = root / f"{PROJECT}.db"
    with sqlite3.connect(path) as database:
        database.executescript(lzma.decompress(RECORDING.read_bytes()).decode())
    database.close()
    return path


def pack(recorded: Path) -> None:
    """Make the recording of a demo's store; what only the recording machine knows is replaced."""
    copy = sqlite3.connect(":memory:")
    with sqlite3.connect(recorded) as database:
        database.backup(copy)
    database.close()
    runs = copy.execute("SELECT id, config FROM runs").fetchall()
    for run_id, text in runs:
        config = json.loads(text) | {"base_model": BASE_MODEL, "checkpoints": f"/recorded/{PROJECT}"}
        config["process"] = {"host": "recorded", "pid": 1}
        copy.execute("UPDATE runs SET config = ? WHERE id = ?", (json.dumps(config), run_id))
    copy.execute("UPDATE policy_versions SET adapter_dir = NULL")
    copy.commit()
    sql = "\n".join(copy.iterdump())
    RECORDING.write_bytes(lzma.compress(sql.encode(), preset=9 | lzma.PRESET_EXTREME))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("store", type=Path, help="the file that the demo wrote")
    pack(parser.parse_args().store)
    print(f"{RECORDING}: {RECORDING.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
