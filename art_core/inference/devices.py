"""Which GPUs each replica of a server has.

Invariant: no GPU is given to two replicas, unless the settings say so.
"""

from collections.abc import Sequence

from art_core.config import EngineConfig
from art_core.errors import ConfigError


def replica_configs(config: EngineConfig, visible: Sequence[str]) -> list[EngineConfig]:
    """The settings of each replica: its own devices, and a port of its own on this machine.

    Args:
        config: how the whole is served.
        visible: the GPUs that can be used, as ``CUDA_VISIBLE_DEVICES`` lists them; empty on a CPU.

    Raises:
        ConfigError: there are too few.
    """
    each = config.tensor_parallel_size * config.data_parallel_size
    needed = each * config.replicas
    blocks: Sequence[str] | None = config.devices
    if blocks is None and visible and config.replicas > 1:
        if len(visible) < needed:
            raise ConfigError(
                f"replicas={config.replicas} of {each} GPUs each need {needed}, and {len(visible)} are "
                f"visible; lower replicas, or let them share: devices={('0',) * config.replicas}"
            )
        blocks = [",".join(visible[i : i + each]) for i in range(0, needed, each)]
    one = config.replace(replicas=1, devices=None, gateway=False)
    if config.replicas > 1 or config.gateway:
        one = one.replace(host="127.0.0.1", port=None)  # those of the gateway
    return [one.replace(devices=(block,)) for block in blocks] if blocks else [one] * config.replicas
