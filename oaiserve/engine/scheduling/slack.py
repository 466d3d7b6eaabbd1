"""`Slack` estimates the latest start of a request with deadlines, from how long recent requests took.

The engine thread notes ends and reads paces. Any thread may read the rest, which is three numbers. No torch, no clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable

from oaiserve.engine.backpressure import MOST_RETRY_SECONDS
from oaiserve.engine.forecast.last_values import LastValues
from oaiserve.engine.sequence import Sequence
from oaiserve.errors import DeadlineRefused
from oaiserve.explain.step_cost import Load, StepCost
from oaiserve.facts.forecast import Forecast

# Under the policy `deadline`, a sequence without a deadline, or with a late one, has its turn PATIENCE_NS after its
# arrival. A sequence whose latest start has passed goes back by the same time. No sequence that arrives later than its
# turn goes before it. For short prompts, the time is shorter, and for long ones up to MOST_SHARE times as long: under
# overload some have to be late, and in the time of one long prompt many short ones are answered.
PATIENCE_NS = 30_000_000_000
MOST_SHARE = 4.0
# Under overload, requests begin at their latest start, so it has to be early enough for most: this share of prompts and
# of the times of tokens was shorter. For the lengths of answers it is the median, or short ones are given up early.
SHARE = 0.85
MOST_REMEMBERED = 200  # requests
MOST_TOKENS = 2**20  # tokens of an answer without a limit
VERY_PROBABLY = 0.9  # a request that misses a deadline with this probability is refused


class Slack:
    """Recent lengths of answers, times of their tokens, and times of prompts relative to what they take alone."""

    def __init__(self) -> None:
        self._stretches, self._alone_ns, self._tokens_ns, self._lengths = (
            LastValues(MOST_REMEMBERED) for _ in range(4)
        )
        self._stretch = 1.0
        self._usual_ns = 0.0
        self._token_ns = 0.0
        self._length = 0.0

    def note(self, alone_ns: int, prefill_ns: int, decode_ns: int, num_tokens: int, *, is_whole: bool) -> None:
        """Note how long a prompt took, and how long it takes alone if that is known; and an answer, or its part."""
        if alone_ns:
            self._stretches.add(prefill_ns / alone_ns)
            self._stretch = max(1.0, _quantile(self._stretches, SHARE))
            self._alone_ns.add(alone_ns)
            self._usual_ns = _quantile(self._alone_ns, 0.5)
        if num_tokens > 1:
            # One that was cut off is as long as any: if most are, what begins then is what needs little time.
            self._lengths.add(num_tokens if is_whole else MOST_TOKENS)
            self._tokens_ns.add(decode_ns / (num_tokens - 1))
            self._length = _quantile(self._lengths, 0.5)
            self._token_ns = _quantile(self._tokens_ns, SHARE)

    def answer_ns(self, most_tokens: int) -> int:
        """Return the time that an answer of the median length takes, or one of `most_tokens` if that is shorter."""
        return int(min(self._length, most_tokens) * self._token_ns)

    def turn_share(self, alone_ns: int) -> float:
        """Return the share of its slack after which a prompt has its turn: its time in relation to the median."""
        if alone_ns and self._usual_ns:
            return min(MOST_SHARE, alone_ns / self._usual_ns)
        return 1.0

    def paces_ns(self, decodes: Iterable[Sequence], now_ns: int) -> list[float]:
        """Return for each decode with a deadline of its end the time of a step by which it keeps that."""
        return [
            (one.deadline_ns - now_ns) / self._rest(one.num_generated, one.max_len - one.num_tokens)
            for one in decodes
            if one.deadline_ns is not None
        ]

    def _rest(self, num_generated: int, most_tokens: int) -> float:
        """Return how many more tokens an answer has that is so long: as half of those that were longer, if any was."""
        lengths = self._lengths.in_order
        if not lengths:
            return max(1, most_tokens)
        first = bisect_right(lengths, num_generated)
        if first < len(lengths):
            rest = lengths[(first + len(lengths)) // 2] - num_generated
        else:
            rest = num_generated
        return max(1, min(rest, most_tokens))

    def latest_start_ns(self, first_ns: int | None, end_ns: int | None, alone_ns: int, most_tokens: int) -> int | None:
        """Return the latest start for deadlines of the first token and of the end, or None if there is none.

        `alone_ns` is the time of the prompt alone, or 0, and `most_tokens` the limit of the answer.
        """
        prompt_ns = self._stretch * alone_ns
        answer_ns = min(self._length, most_tokens) * self._token_ns
        starts = [] if first_ns is None else [first_ns - int(prompt_ns)]
        starts += [] if end_ns is None else [end_ns - int(prompt_ns + answer_ns)]
        return min(starts, default=None)


def turn_ns(arrived_ns: int, start_ns: int | None, share: float = 1.0) -> int:
    """Return the time of a sequence's turn under the policy `deadline`.

    That is after a share of the time until its latest start; without one, or if that is over, of the patience.
    """
    if start_ns is None or start_ns < arrived_ns:
        slack_ns = PATIENCE_NS
    else:
        slack_ns = min(start_ns - arrived_ns, PATIENCE_NS)
    return arrived_ns + int(share * slack_ns)


def _quantile(values: LastValues, share: float) -> float:
    return values.in_order[int(share * len(values.in_order))]


def alone_ns(cost: StepCost | None, num_tokens: int) -> int:
    """Return the time that a prompt takes alone, or 0 if that is not known."""
    if cost is None:
        return 0
    return cost.expected_ns(Load(0, 0, 0, num_tokens, num_tokens * (num_tokens - 1) // 2, 1))


def refusal(forecast: Forecast, first_ns: int | None, end_ns: int | None) -> DeadlineRefused | None:
    """Return the error of a request that will very probably miss a deadline, in nanoseconds from its receipt.

    If its end is not forecast, it misses that deadline if its first token does.
    """
    first_token = ("begin", forecast.first_token_after, forecast.first_token_interval_ns)
    end = ("end", forecast.end_after, forecast.end_interval_ns) if forecast.has_end else first_token
    for limit_ns, (what, after, times_ns) in ((first_ns, first_token), (end_ns, end)):
        if limit_ns is not None and (after(limit_ns) or 0.0) >= VERY_PROBABLY:
            low, median, high = (f"{time_ns / 1e6:,.0f}" for time_ns in times_ns)
            message = (
                f"The answer would very probably not {what} within {limit_ns / 1e6:,.0f} ms, as the request asks for: "
                f"half of such requests {what} within {median} ms, and nine in ten after {low} to {high} ms. "
                "Please try again later, or allow more time."
            )
            shown = {"first_token_ms": forecast.first_token_interval_ns}
            if forecast.has_end:
                shown["end_ms"] = forecast.end_interval_ns
            wait_seconds = math.ceil((times_ns[1] - limit_ns) / 1e9)
            return DeadlineRefused(
                message,
                retry_after_seconds=max(1, min(MOST_RETRY_SECONDS, wait_seconds)),
                forecast={name: [time_ns / 1e6 for time_ns in three] for name, three in shown.items()},
            )
    return None
