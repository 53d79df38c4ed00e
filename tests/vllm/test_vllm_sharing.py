"""Canaries on real vLLM. (Sleep itself needs a GPU: tests/gpu/test_vllm_sleep.py.)"""

from typing import Any

import torch

from art_core.config import EngineConfig
from art_core.inference.vllm_canary import TOLERANCE
from art_core.inference.vllm_sleep import SleepCycle
from art_core.types import PolicyVersion

BASE, V1, V2 = (PolicyVersion("agent", n) for n in range(3))


async def test_a_canary_is_the_same_twice_and_differs_between_versions(served: Any):
    """C42, the part that needs no sleep."""
    cycle = SleepCycle(EngineConfig(max_model_len=1024))
    server = served.engine._keeper.running()
    await cycle.remember(server, BASE, [V1, V2])
    assert max(reference.noise for reference in cycle.before.values()) < TOLERANCE
    checks = await cycle.check(server, [BASE, V1, V2])
    assert [(check.version, check.changed) for check in checks] == [(v, False) for v in (BASE, V1, V2)]
    readings = {version: await cycle.read(server, version) for version in (BASE, V1, V2)}
    for one, other in ((BASE, V1), (BASE, V2), (V1, V2)):
        assert readings[one].difference(readings[other]) > 10 * TOLERANCE
    assert len(readings[BASE].prefill) > 30
    assert len(set(readings[BASE].decode)) > 1


async def test_a_canary_reads_what_the_trainer_computes(served: Any):
    cycle = SleepCycle(EngineConfig(max_model_len=1024))
    server = served.engine._keeper.running()
    for version in (BASE, V1):
        reading = await cycle.read(server, version)
        ids = torch.tensor([cycle._prompt])
        with torch.no_grad(), served.trainer.using(None if version == BASE else version.name):
            hidden = served.trainer.hidden_states(input_ids=ids).last_hidden_state[0]
            logprobs = torch.log_softmax(served.trainer.head(hidden[:-1]).float(), -1)
        mine = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        assert float((torch.tensor(reading.prefill) - mine).abs().mean()) < 0.15
