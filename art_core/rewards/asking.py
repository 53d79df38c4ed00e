"""Asking a judge: a question to verdicts, from the cache or by calls, each of which is counted.

Invariant: a verdict is one of the judge's own on exactly this question, or there is none; every call is in
the usage, whatever came of it.
"""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from art_core.errors import ConfigError
from art_core.rewards.cache import VerdictCache, question_key
from art_core.rewards.judge import UNTOLD, Answer, Judge, JudgeError, Usage
from art_core.rewards.question import Question
from art_core.rewards.verdicts import Verdict, read_verdicts, verdict_schema
from art_core.types import Message

logger = logging.getLogger(__name__)

TRIES = 2
"""Calls for one verdict: the first, and one more when it cannot be used."""


@dataclass(slots=True)
class Asked:
    """What one judgement took so far.

    Attributes:
        usage: of its calls.
        problems: why answers could not be used.
    """

    usage: Usage = field(default_factory=Usage)
    problems: list[str] = field(default_factory=list[str])


class JudgeAsker:
    """Asks one judge, from any thread.

    Args:
        judge: which model judges.
        timeout: seconds for one call.
        cache: verdicts given before.

    Attributes:
        usage: what all calls so far took.

    Raises:
        ConfigError: the judge cannot be asked.
    """

    def __init__(self, judge: Judge, timeout: float, cache: VerdictCache) -> None:
        given: object = judge
        if not callable(getattr(given, "ask", None)) or not isinstance(getattr(given, "name", None), str):
            raise ConfigError(
                f"{_described(given)} is no judge: it needs a name and a method ask; "
                "art_langgraph.LangChainJudge makes one of a chat model or of 'provider:model'"
            )
        self.judge = judge
        self.usage = Usage()
        self._timeout = timeout
        self._cache = cache
        self._adding = threading.Lock()
        self._under_way: dict[tuple[int, str], asyncio.Future[Mapping[str, Verdict]]] = {}

    async def verdicts(self, question: Question, asked: Asked) -> Mapping[str, Verdict]:
        """The verdicts on a question: as they were given before, or asked for now.

        Who asks what is being asked already, as runs that did the same do, gets what the first one gets.

        Raises:
            JudgeError: there are none.
        """
        key = question_key(self.judge.name, question.messages)
        loop = asyncio.get_running_loop()
        place = (id(loop), key)  # what is awaited belongs to its loop
        while (found := self._cache.get(key)) is None:
            first = self._under_way.get(place)
            if first is None:
                break
            await asyncio.wait({first})
            if not first.cancelled():
                return first.result()
        if found is not None:
            return found
        ended: asyncio.Future[Mapping[str, Verdict]] = loop.create_future()
        self._under_way[place] = ended
        try:
            found = await self.answered(question, asked)
            self._cache.put(key, found)
            ended.set_result(found)
        except JudgeError as failure:
            ended.set_exception(failure)
            ended.exception()  # asyncio wants it looked at, also where nobody waits
            raise
        finally:
            del self._under_way[place]
            ended.cancel()  # where nothing came of it, somebody else asks
        return found

    async def answered(self, question: Question, asked: Asked) -> Mapping[str, Verdict]:
        """The verdicts on a question, asked twice at most, whatever was said before.

        Raises:
            JudgeError: neither answer can be used.
        """
        schema = verdict_schema(question.ids)
        messages, problems = question.messages, list[str]()
        for _ in range(TRIES):
            answer: Answer | None = None
            try:
                answer = await self._call(messages, schema, asked)
                return read_verdicts(answer.text, question.ids)
            except JudgeError as problem:
                problems.append(str(problem))
                asked.problems.append(str(problem))
                if answer is not None:
                    messages = question.again(answer.text, str(problem))
        raise JudgeError("; then ".join(problems))

    async def _call(self, messages: Sequence[Message], schema: Mapping[str, Any], asked: Asked) -> Answer:
        """One call of the judge, counted whatever comes of it.

        Raises:
            JudgeError: it raised, or gave no answer in time.
        """
        call = asyncio.ensure_future(_answer(self.judge, messages, schema))
        usage = UNTOLD
        try:
            # Not asyncio.timeout: a judge that ignores its cancellation would hold the group for ever.
            await asyncio.wait({call}, timeout=self._timeout)
            if not call.done():
                raise JudgeError(f"no answer within {self._timeout:g} s")
            try:
                answer = call.result()
            except (Exception, asyncio.CancelledError) as failure:
                raise JudgeError(f"the call failed: {type(failure).__name__}: {failure}") from failure
            usage = answer.usage
            return answer
        finally:
            if not call.done():
                call.cancel()
                call.add_done_callback(_look_at)
            asked.usage += usage
            with self._adding:
                self.usage += usage


async def _answer(judge: Judge, messages: Sequence[Message], schema: Mapping[str, Any]) -> Answer:
    """Ask somebody's judge, and hold its answer to what it promised."""
    given = cast(object, await judge.ask(messages, schema))
    if not isinstance(given, Answer) or not isinstance(cast(object, given.text), str):
        what = "an Answer without a text" if isinstance(given, Answer) else type(given).__name__
        raise TypeError(f"ask gave {what}, expected Answer(text, usage)")
    return given


def _described(given: object) -> str:
    """A value, or only its kind where it would fill the screen."""
    shown = repr(given)
    return shown if len(shown) <= 80 else f"an object of {type(given).__name__}"


def _look_at(call: "asyncio.Future[Answer]") -> None:
    """Take note of how an abandoned call ended, which asyncio asks of somebody."""
    if not call.cancelled() and (failure := call.exception()) is not None:
        logger.debug("a judge's call that ran out of time ended with %r", failure)
