"""Fused kernels over layers that FSDP2 has sharded: two processes on gloo, a tiny model of five layers."""

from pathlib import Path

from helpers.sharded import differences
from helpers.tiny import tiny_model

LAYERS = 5


def test_gradients_over_sharded_layers_are_those_over_whole_ones(tmp_path: Path):
    model = tiny_model(tmp_path / "model", layers=LAYERS)
    records = differences(model, tmp_path)
    assert len(records) == 2 * 4
    for record in records:
        assert record["gradients"] == record["expected"] == 2 * 7 * LAYERS
        assert record["largest"] > 0.1
        assert record["difference"] < 1e-5 * record["largest"], record
        assert record["states"] < 1e-5
        # One that is used, its neighbour in the same call, and one on its way.
        assert record["most"] in ((1, 2) if record["checkpointing"] else (2, 3)), record
        assert record["after_forward"] == record["after_backward"] == 0
    orders = {(r["compiled"], r["checkpointing"]): [] for r in records}
    for record in records:
        orders[record["compiled"], record["checkpointing"]].append(record["order"])
    for on_one, on_other in orders.values():
        assert on_one == on_other
        passes = [*range(LAYERS), *reversed(range(LAYERS))]
        assert on_one == [*passes, *passes, *range(LAYERS)]
