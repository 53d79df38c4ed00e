"""Delivery: a batch of trajectories, to Langfuse.

Invariant: a trajectory counts as delivered when all its observations and then all its scores were accepted.
One that is refused keeps none of the others: since the server does not say which one it means, they are then
sent one by one. What comes twice that way replaces itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from art_core.store.marks import Mark
from art_langgraph.langfuse.client import LangfuseClient, LangfuseRefusedError

_HOPELESS = frozenset({401, 403, 404})
"""Answers that say nothing of what was sent: every other request would get them, too."""

_SCORES_BYTES = 900_000  # the endpoint takes 1 MiB


@dataclass(frozen=True, slots=True)
class Parcel:
    """One trajectory, ready to be sent.

    Attributes:
        mark: the state that it is in.
        requests: its observations; none where they are there already.
        observations: how many they are.
        scores: by the names of Langfuse's API.
    """

    mark: Mark
    requests: tuple[bytes, ...]
    observations: int
    scores: Sequence[Mapping[str, Any]]

    @property
    def size(self) -> int:
        """Bytes of its observations."""
        return sum(map(len, self.requests))


@dataclass(slots=True)
class Delivered:
    """What became of a batch.

    Attributes:
        whole: accepted, observations and scores.
        refused: why others were refused, by trajectory.
    """

    whole: list[Parcel] = field(default_factory=list[Parcel])
    refused: dict[str, str] = field(default_factory=dict[str, str])


def deliver(batch: Sequence[Parcel], client: LangfuseClient) -> Delivered:
    """Send a batch: the observations in one request where they can be, then the scores.

    Raises:
        LangfuseUnavailableError: the server did not answer; nobody knows what has arrived.
        LangfuseRefusedError: it would refuse anything: it does not know the keys, or has no such endpoint.
    """
    delivered = Delivered()
    taken = _send_observations(batch, client, delivered)
    _send_scores(taken, client, delivered)
    return delivered


def _send_observations(batch: Sequence[Parcel], client: LangfuseClient, delivered: Delivered) -> list[Parcel]:
    """Those whose observations were accepted."""
    together = [parcel for parcel in batch if len(parcel.requests) == 1]
    taken = [parcel for parcel in batch if not parcel.requests]
    alone = [parcel for parcel in batch if len(parcel.requests) > 1]
    if len(together) > 1 and not _refusal([b"".join(p.requests[0] for p in together)], client):
        taken += together
    else:
        alone = together + alone
    for parcel in alone:
        if (why := _refusal(parcel.requests, client)) is None:
            taken.append(parcel)
        else:
            delivered.refused[parcel.mark.trajectory_id] = why
    return taken


def _refusal(requests: Sequence[bytes], client: LangfuseClient) -> str | None:
    """Send observations; why they were refused, or None."""
    for request in requests:
        try:
            accepted = client.send_spans(request)
        except LangfuseRefusedError as refused:
            if refused.status in _HOPELESS:
                raise
            return str(refused)
        if accepted.rejected:
            return f"{accepted.rejected} observations were refused: {accepted.message}"
    return None


def _send_scores(parcels: Sequence[Parcel], client: LangfuseClient, delivered: Delivered) -> None:
    delivered.whole += [parcel for parcel in parcels if not parcel.scores]
    for some in _together([parcel for parcel in parcels if parcel.scores]):
        if _score_refusal([score for parcel in some for score in parcel.scores], client) is None:
            delivered.whole += some
            continue
        for parcel in some:
            if (why := _refused_scores(parcel, client)) is None:
                delivered.whole.append(parcel)
            else:
                delivered.refused[parcel.mark.trajectory_id] = why


def _refused_scores(parcel: Parcel, client: LangfuseClient) -> str | None:
    """Send scores one by one; which of them are refused and why, or None."""
    refused = [(s["name"], why) for s in parcel.scores if (why := _score_refusal([s], client))]
    return "; ".join(f"score {name!r}: {why}" for name, why in refused) or None


def _score_refusal(scores: Sequence[Mapping[str, Any]], client: LangfuseClient) -> str | None:
    try:
        accepted = client.send_scores(scores)
    except LangfuseRefusedError as refused:
        if refused.status in _HOPELESS:
            raise
        return str(refused)
    return accepted.message or "refused" if accepted.rejected else None


def _together(parcels: Sequence[Parcel]) -> Iterator[list[Parcel]]:
    """Parcels whose scores fit into one request."""
    some: list[Parcel] = []
    size = 0
    for parcel in parcels:
        more = sum(map(_weight, parcel.scores))
        if some and size + more > _SCORES_BYTES:
            yield some
            some, size = [], 0
        some.append(parcel)
        size += more
    if some:
        yield some


def _weight(score: Mapping[str, Any]) -> int:
    # Text may take six bytes a character where JSON escapes it; the rest is ids and times.
    return 500 + 6 * len(str(score.get("comment", ""))) + len(str(score.get("metadata", "")))
