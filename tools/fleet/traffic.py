"""Traffic for simulated fleets: talks of several kinds, whose next turns come at times that no policy changes.

Texts are numbers: a *stream* is a text, and token i of stream s is s + i. A prompt begins with the tokens of a common
stream (a system prompt, a document), and goes on with the talk's own stream, which has the earlier answers.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKENS_PER_KEY = 64  # of a router's block: 256 bytes
STREAM_BITS = 20  # a stream has room for so many bits of tokens
# How many texts the talks of a kind begin with. The first ones are the most popular, as 1 / rank.
NUM_SYSTEMS = {"chat": 400, "agent": 60}


@dataclass(slots=True)
class Call:
    """A request. `path` is its prompt: streams, and how many tokens of each."""

    arrival: float
    kind: str
    path: tuple[tuple[int, int], ...]
    num_tokens: int
    answer: int  # tokens
    session: str | None
    keys: list[int] = field(default_factory=list)  # for a router, where one asks for them
    num_brought: int = 0  # tokens of the prompt whose keys and values come along, from a replica that computed them
    hit_tokens: int = 0
    ttft: float = -1.0  # until there is a first token

    def find_keys(self, most: int) -> list[int]:
        """Return the keys of the prompt's blocks. The tokens of a stream imply those before it, and so do its keys."""
        if not self.keys:
            start = 0
            for stream, tokens in self.path:
                end = start + tokens
                first, last = start // TOKENS_PER_KEY, end // TOKENS_PER_KEY
                self.keys.extend(range(stream + first, stream + min(last, most)))
                start = end
        return self.keys


@dataclass(frozen=True)
class Mix:
    """The shares of the kinds among talks that begin."""

    chat: float = 0.55
    agent: float = 0.2
    document: float = 0.05
    single: float = 0.2


@dataclass(slots=True)
class Talk:
    kind: str
    common: tuple[tuple[int, int], ...]
    stream: int
    length: int  # of its own stream
    turns: int
    session: str | None


class Traffic:
    """Requests at a constant rate. Turns of talks that are due come first, and new talks fill the rest."""

    def __init__(self, rate: float, mix: Mix, seed: int = 0, *, share_of_sessions: float = 0.3) -> None:
        self._rng = random.Random(seed)
        self._rate = rate
        self._kinds = ("chat", "agent", "document", "single")
        self._shares = [getattr(mix, kind) for kind in self._kinds]
        self._share_of_sessions = share_of_sessions
        self._due: list[tuple[float, int, Talk]] = []
        self._num_streams = 0
        self._owed = 0.0
        self._systems = {
            "chat": [(self._stream(), self._rng.randint(200, 800)) for _ in range(NUM_SYSTEMS["chat"])],
            "agent": [(self._stream(), self._rng.randint(2500, 6000)) for _ in range(NUM_SYSTEMS["agent"])],
        }
        self._weights = {kind: _popularity(len(systems)) for kind, systems in self._systems.items()}
        self.burst: tuple[float, float, float, tuple[int, int]] | None = None

    def add_burst(self, start: float, end: float, share: float, tokens: int) -> None:
        """Let a share of all new talks ask about the same long text for a while."""
        self.burst = (start, end, share, (self._stream(), tokens))

    def until(self, start: float, end: float) -> Iterator[Call]:
        """Return the requests that arrive between two times, in their order."""
        self._owed += self._rate * (end - start)
        calls = []
        while self._due and self._due[0][0] < end:
            at, _, talk = heapq.heappop(self._due)
            calls.append(self._turn(talk, max(at, start)))
        self._owed -= len(calls)
        while self._owed >= 1:
            self._owed -= 1
            calls.append(self._turn(self._begin(start), start + self._rng.random() * (end - start)))
        self._owed = max(self._owed, -0.1 * self._rate)  # more than 100 ms of turns that came early are not owed
        calls.sort(key=lambda call: call.arrival)
        return iter(calls)

    def _stream(self) -> int:
        self._num_streams += 1
        return self._num_streams << STREAM_BITS

    def _begin(self, now: float) -> Talk:
        rng = self._rng
        kind = rng.choices(self._kinds, self._shares)[0]
        session = None if rng.random() > self._share_of_sessions else f"{self._num_streams}"
        if self.burst is not None and self.burst[0] <= now < self.burst[1] and rng.random() < self.burst[2]:
            return Talk("burst", (self.burst[3],), self._stream(), 0, 1, session)
        common: tuple[tuple[int, int], ...] = ()
        turns = 1
        if kind in self._systems:
            (system,) = rng.choices(self._systems[kind], cum_weights=self._weights[kind])
            common, turns = (system,), 1 + int(rng.expovariate(1 / (4 if kind == "chat" else 7)))
        elif kind == "document":
            common, turns = ((self._stream(), rng.randint(4000, 12000)),), rng.randint(2, 5)
        return Talk(kind, common, self._stream(), 0, turns, session)

    def _turn(self, talk: Talk, at: float) -> Call:
        rng = self._rng
        mean_user, mean_answer, mean_think = _SIZES[talk.kind]
        talk.length += 10 + min(int(rng.expovariate(1 / mean_user)), 10 * mean_user)
        answer = 4 + min(int(rng.expovariate(1 / mean_answer)), 5 * mean_answer)
        path = (*talk.common, (talk.stream, talk.length))
        call = Call(at, talk.kind, path, sum(tokens for _, tokens in path), answer, talk.session)
        talk.length += answer
        talk.turns -= 1
        if talk.turns > 0:
            heapq.heappush(self._due, (at + 1 + rng.expovariate(1 / mean_think), talk.stream, talk))
        return call


# Mean tokens of a user's (or tool's) part and of an answer, and mean seconds from one turn to the next, beyond one.
_SIZES = {
    "chat": (60, 110, 4.0),
    "agent": (150, 60, 1.0),
    "document": (40, 120, 3.0),
    "single": (150, 60, 0.0),
    "burst": (30, 80, 0.0),
}


def _popularity(number: int) -> list[float]:
    total, weights = 0.0, []
    for rank in range(1, number + 1):
        total += 1 / rank
        weights.append(total)
    return weights
