"""Work that is seen to its end, though whoever waits for it is cancelled.

Invariant: when the waiting ends, the work has ended, unless the waiting was cancelled twice.

For what would leave halves behind, or goes on in a thread that nobody can stop.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def seen_through(work: Coroutine[Any, Any, T], then: Callable[[], None] = lambda: None) -> T:
    """Do some work; a cancellation is heard when it is done.

    Args:
        work: what is done.
        then: what follows when it has succeeded, cancelled or not.

    Raises:
        asyncio.CancelledError: the waiting was cancelled; what the work raised then is in the log.
    """

    async def whole() -> T:
        result = await work
        then()
        return result

    task = asyncio.create_task(whole())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            logger.warning("cancelled: what has begun is seen to its end first; cancel again to leave it")
        await asyncio.wait({task})
        if not task.cancelled() and (failed := task.exception()) is not None:
            logger.error("what was seen to its end after a cancellation failed", exc_info=failed)
        raise
