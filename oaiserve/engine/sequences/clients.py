"""The clients of waiting and running sequences, and their requests: what `waiting.py` orders. Engine thread only."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary


@dataclass(slots=True, eq=False, weakref_slot=True)
class RequestTurn:
    """The sequences of one request among those of its client. Written by WaitingQueue."""

    due: float = 0.0  # when its last prompt would end on the client's clock: see EqualShares
    waiting: list[tuple[tuple[float, ...], Any]] = field(default_factory=list)  # a heap of sequences by key
    num_waiting: int = 0
    num_running: int = 0
    listed: tuple[object, ...] | None = None  # its lowest place in the client's order of requests

    @property
    def place(self) -> tuple[object, ...]:
        """Return the place in the order of requests, of one that waits: first those with nothing running."""
        return (self.num_running > 0, self.waiting[0][0])


@dataclass(slots=True, eq=False)
class Client:
    """A client with waiting or running sequences, and its service. Written by WaitingQueue."""

    name: str
    shares: EqualShares
    share: float = 1.0  # relative to other clients; from its last request
    service: float = 0.0  # prompt tokens and generated tokens, weighted, and divided by the share
    requests: WeakValueDictionary[str, RequestTurn] = field(default_factory=WeakValueDictionary)
    turns: list[tuple[tuple[object, ...], int, RequestTurn]] = field(default_factory=list)  # a heap of those that wait
    num_waiting: int = 0
    has_turn: bool = False  # whether it is in the order of clients
    num_running: int = 0
    num_spare: int = 0  # running sequences beyond the first one of each request

    @property
    def is_present(self) -> bool:
        return self.num_waiting + self.num_running > 0


class EqualShares:
    """A client's clock: the tokens that each prompt would have got if all of them were computed side by side.

    A prompt that arrives is due when it would end in that way (Friedman and Henderson, "Fairness and efficiency in web
    server protocols", SIGMETRICS 2003). In the order of these moments, each ends no later than side by side, and short
    ones pass long ones. The prompts of a request count as one, one after the other.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._ends: list[tuple[float, int, RequestTurn]] = []  # a heap of the requests that would not have ended
        self._numbers = count()

    def arrive(self, turn: RequestTurn, num_tokens: int) -> float:
        """Return when a prompt of a request is due."""
        if turn.due <= self.now:
            turn.due = self.now
            heappush(self._ends, (turn.due + num_tokens, next(self._numbers), turn))
        turn.due += num_tokens
        return turn.due

    def serve(self, num_tokens: float) -> None:
        """Advance the clock by tokens that were computed, or are no longer needed."""
        ends = self._ends
        while ends:
            end, number, turn = ends[0]
            if end < turn.due:  # another prompt of it has arrived since
                heapreplace(ends, (turn.due, number, turn))
                continue
            needed = (end - self.now) * len(ends)
            if needed > num_tokens:
                self.now += num_tokens / len(ends)
                return
            num_tokens -= needed
            self.now = end
            heappop(ends)
