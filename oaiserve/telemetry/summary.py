"""Summarise the engine's account of a request: the steps it was in, and the percentiles of the time between tokens."""

from __future__ import annotations

from array import array
from math import ceil
from typing import NamedTuple

from oaiserve.facts.record import RequestRecord

MOST_SORTED = 8192  # gaps to sort in one call, which holds the GIL for about a millisecond


class Steps(NamedTuple):
    """The engine's steps from the first to the last one of a request, with the sequences of other requests included."""

    first: int
    number: int
    mean_sequences: float
    mean_tokens: float
    model_ns: int
    between_ns: int | None  # the rest of prefill and decode; None if there was no last token


def steps_of(record: RequestRecord) -> Steps | None:
    """Return the summary of a request's steps, or None if the request was in no step."""
    account, times = record.account, record.times
    if account.first_step is None or account.num_steps == 0:
        return None
    between_ns = None
    if times.scheduled is not None and times.last_token is not None:
        between_ns = times.last_token - times.scheduled - account.model_ns
    return Steps(
        account.first_step,
        account.num_steps,
        account.num_step_sequences / account.num_steps,
        account.num_step_tokens / account.num_steps,
        account.model_ns,
        between_ns,
    )


class TokenGaps(NamedTuple):
    """The distribution of the time between consecutive tokens of a choice (ITL), over all choices, by nearest rank."""

    number: int
    p50_ns: int
    p99_ns: int
    max_ns: int


def token_gaps(gaps_ns: array[int]) -> TokenGaps | None:
    """Return percentiles and maximum of the gaps, or None if no choice has a second token.

    The percentiles of more than MOST_SORTED gaps are those of an evenly spaced sample. The maximum is always exact.
    """
    if not gaps_ns:
        return None
    ranked = sorted(gaps_ns[:: ceil(len(gaps_ns) / MOST_SORTED)])
    max_ns = max(max(gaps_ns[start : start + MOST_SORTED]) for start in range(0, len(gaps_ns), MOST_SORTED))
    return TokenGaps(len(gaps_ns), _percentile(ranked, 50), _percentile(ranked, 99), max_ns)


def _percentile(ranked: list[int], percent: int) -> int:
    return ranked[ceil(len(ranked) * percent / 100) - 1]
