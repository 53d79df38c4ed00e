"""Versions of vLLM: what this package asks of them, in one place.

Invariant: whatever is sent to a server is understood by every version from `OLDEST` to `NEWEST` alike; where
versions differ in what they do, the code does what is right for all of them.

Read in the sources of 0.24, 0.26, 0.27 and 0.29 to 0.33, and tested against the installed one:

- The server is started as a module in all of them; 0.32 calls that deprecated, but its ``vllm`` command asks
  for the metadata of a package of that name, which the CPU build does not have.
- Exact token ids: ``return_token_ids`` in all of them; reasoning is called ``reasoning``, and
  ``reasoning_content`` in older servers: readers take both.
- The prefix cache is keyed by an adapter's name until 0.30, by its name and path from 0.31 on. So a name is
  never given to other weights, and after an adapter was loaded again under its name the cache is dropped.
- ``load_inplace`` reads an adapter from disk again and again, and is not used.
- Waking up ends a pause by itself in all of them. So clients are held on our side until canaries were read.
- Full weights are read in place by ``reload_weights`` in all of them; with adapters switched on it fails in
  older ones. So a server of merged weights has none.
- Log-probabilities are the model's own by default, before temperature, penalties, biases and cuts. With
  ``--logprobs-mode processed_logprobs`` they are those of the distribution that was sampled from; of greedy
  tokens those at temperature 1, since a temperature of 0 switches cuts off and divides by nothing. The masks
  of structured outputs are in both kinds. Read and tested in 0.32.
- Parsers have more names in newer versions; `art_core.inference.model_families` has those that all know.
- Names of the base model lie in one list in all of them, the ``base_model_paths`` of the application state's
  ``openai_serving_models``.
"""

import logging
import re

from art_core.errors import EngineError

logger = logging.getLogger(__name__)

OLDEST = (0, 24)
NEWEST = (0, 33)

SERVER_MODULE = "vllm.entrypoints.openai.api_server"

PAUSE = "/pause?mode=wait&clear_cache=false"
"""Requests in flight end, new ones wait."""
RESUME = "/resume"
SLEEP = "/sleep?level=1"
"""Weights go to main memory, the KV cache is dropped. Level 2 cannot be undone with adapters."""
WAKE = "/wake_up"
RESET_PREFIX_CACHE = "/reset_prefix_cache"
WORKERS = "/collective_rpc"
"""Calls a method of each worker: ``{"method": ..., "kwargs": {...}}``."""
TOKENIZE = "/tokenize"


def check_version(version: str) -> None:
    """Whether a vLLM is one of those that are known.

    Raises:
        EngineError: it is older.
    """
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None:  # built from a source tree without tags
        logger.warning("vLLM says that its version is %r; %s to %s are known", version, *_known())
        return
    found = (int(number[1]), int(number[2]))
    if found < OLDEST:
        raise EngineError(
            f"vLLM {version} is too old: {' to '.join(_known())} are known; install a newer one, into an "
            "environment of its own if need be, and name that as EngineConfig.python"
        )
    if found > NEWEST:
        logger.warning("vLLM %s is newer than those that are known, %s to %s", version, *_known())


def _known() -> tuple[str, str]:
    return ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST))
