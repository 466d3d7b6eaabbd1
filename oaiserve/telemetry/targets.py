"""`Targets` judges the times of ended requests: the time to first token (ttft) and per output token (tpot).

A target is the operator's own, or a multiple of the time that the request would have taken alone on this machine. No
fixed time suits both a GPU and the two cores of a laptop, or prompts of ten and of ten thousand tokens. The time alone
is estimated from undisturbed steps, so a server on a machine that other programs keep busy misses its targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from oaiserve.facts.record import POOLING_OPERATIONS, Cause, Outcome, RequestRecord
from oaiserve.wire import slos

TIMES_ALONE = 6  # a server has several users: with four of them, each may have to wait for three others
# Lower limits of the targets: people don't notice a shorter wait, and hardly read more than five tokens a second.
LEAST_NS: Mapping[str, int] = {"ttft": 1_000_000_000, "tpot": 200_000_000}


class Judged(NamedTuple):
    """A measured time of a request, and its target."""

    slo: str  # ttft or tpot
    took_ns: float
    target_ns: int

    @property
    def is_met(self) -> bool:
        return self.took_ns <= self.target_ns


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a server. The operator has set those in `own_ns`."""

    own_ns: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Targets:
        """Parse targets from a text such as ttft:2s,tpot:100ms. Raises ValueError."""
        return cls({name: round(seconds * 1e9) for name, seconds in slos.parse(text).items()})

    def judge(self, record: RequestRecord) -> Iterator[Judged]:
        """Yield the times of a finished request that have a target. Background requests have no targets, nor do
        requests that ended before the server could estimate how long they would take alone."""
        if record.outcome is not Outcome.FINISHED or record.background or record.operation in POOLING_OPERATIONS:
            return
        times = record.times
        account = record.account
        tokens = record.tokens_per_choice
        ttft_ns = None
        if times.first_token is not None and times.submitted is not None:
            # The phase `receive` is left out, because it depends on how fast the client sends its body, or on the
            # model's load.
            ttft_ns = times.first_token - times.submitted
        tpot_ns = times.time_per_output_token_ns(tokens) if tokens > 1 else None
        for slo, took_ns, causes_ns, steps in (
            ("ttft", ttft_ns, account.prefill_causes_ns, 1),
            ("tpot", tpot_ns, account.decode_causes_ns, max(1, tokens - 1)),
        ):
            alone_ns = causes_ns.get(Cause.ALONE, 0) / steps
            target_ns = self.own_ns.get(slo) or (
                max(LEAST_NS[slo], round(TIMES_ALONE * alone_ns)) if alone_ns else None
            )
            if took_ns is not None and target_ns is not None:
                yield Judged(slo, took_ns, target_ns)
