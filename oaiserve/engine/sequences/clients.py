"""The clients of waiting and running sequences, and their requests, which `waiting.py` sorts. Engine thread only."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary


@dataclass(slots=True, eq=False, weakref_slot=True)
class RequestTurn:
    """The sequences of one request, among its client's. Written by WaitingQueue."""

    due: float = 0.0  # time on the client's clock at which its last prompt is due: see EqualShares
    waiting: list[tuple[tuple[float, ...], Any]] = field(default_factory=list)  # a heap of sequences by key
    num_waiting: int = 0
    num_running: int = 0
    listed: tuple[object, ...] | None = None  # its earliest position in the client's order of requests

    @property
    def place(self) -> tuple[object, ...]:
        """Return the sort key of a waiting request: requests with nothing running come first."""
        return (self.num_running > 0, self.waiting[0][0])


@dataclass(slots=True, eq=False)
class Client:
    """A client with waiting or running sequences, and its service. Written by WaitingQueue."""

    name: str
    shares: EqualShares
    share: float = 1.0  # relative to other clients; from its last request
    service: float = 0.0  # prompt tokens and generated tokens, weighted, and divided by the share
    requests: WeakValueDictionary[str, RequestTurn] = field(default_factory=WeakValueDictionary)
    turns: list[tuple[tuple[object, ...], int, RequestTurn]] = field(default_factory=list)  # a heap of waiting requests
    num_waiting: int = 0
    has_turn: bool = False  # whether it is in the order of clients
    num_running: int = 0
    num_spare: int = 0  # running sequences, not counting the first one of each request

    @property
    def is_present(self) -> bool:
        return self.num_waiting + self.num_running > 0


class EqualShares:
    """A client's clock: the tokens that each prompt would have received if all were computed at the same time.

    A prompt is due when it would end on this clock (Friedman and Henderson, "Fairness and efficiency in web server
    protocols", SIGMETRICS 2003). Computed in this order, each prompt ends no later than it would with equal shares, and
    short ones overtake long ones. The prompts of a request count as one, one after the other.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._ends: list[tuple[float, int, RequestTurn]] = []  # a heap of the requests that this clock still computes
        self._numbers = count()

    def arrive(self, turn: RequestTurn, num_tokens: int) -> float:
        """Return when a prompt of a request is due."""
        if turn.due <= self.now:
            turn.due = self.now
            heappush(self._ends, (turn.due + num_tokens, next(self._numbers), turn))
        turn.due += num_tokens
        return turn.due

    def serve(self, num_tokens: float) -> None:
        """Advance the clock by tokens that were computed or no longer need to be."""
        ends = self._ends
        while ends:
            end, number, turn = ends[0]
            if end < turn.due:  # Another prompt of the request has arrived meanwhile.
                heapreplace(ends, (turn.due, number, turn))
                continue
            needed = (end - self.now) * len(ends)
            if needed > num_tokens:
                self.now += num_tokens / len(ends)
                return
            num_tokens -= needed
            self.now = end
            heappop(ends)
