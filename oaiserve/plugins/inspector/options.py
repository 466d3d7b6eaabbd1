"""The settings of the inspector."""

from __future__ import annotations

from dataclasses import dataclass

from oaiserve.config import check

MOST_REQUESTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectorOptions:
    """Settings of the inspector."""

    inspect: int = 0
    """Keep the prompts and answers of this many last requests, as tokens, in memory, and show them on the pages of
    these requests, only on this machine or to the key of the server's owner. 0: keep none."""

    def __post_init__(self) -> None:
        check(0 <= self.inspect <= MOST_REQUESTS, "--inspect", self.inspect, f"between 0 and {MOST_REQUESTS}")
