"""`KeptRuns`: the turns of the latest runs, within limits. The telemetry thread adds turns, and any thread may read."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from threading import Lock
from typing import NamedTuple

from oaiserve.facts.record import RequestRecord
from oaiserve.facts.times import EpochOffset
from oaiserve.plugins.runs.turns import MAX_TURNS, SILENCE_SECONDS, KeptTurn

MAX_RUNS = 200
MAX_ALL_TURNS = 10_000  # maximum turns of all runs together
MAX_SINGLE = 1000  # requests that name no run, and that no other has continued yet
MAX_DIGESTS = 32  # turns of a run that a turn on another replica may continue


class Turns(NamedTuple):
    """The turns of a run that are kept."""

    run_id: str
    turns: Sequence[KeptTurn]
    num_dropped: int  # earlier ones
    digests: Sequence[str]
    before: Sequence[str]


class _Kept:
    def __init__(self, run_id: str, before: Sequence[str]) -> None:
        self.run_id = run_id
        self.turns: deque[KeptTurn] = deque(maxlen=MAX_TURNS)
        self.digests: deque[str] = deque(maxlen=MAX_DIGESTS)
        self.before = before
        self.num_all = 0
        self.num_counted = 0  # turns that are in the histograms
        self.ended_unix_ns = 0

    def add(self, turn: KeptTurn, digest: str) -> None:
        self.turns.append(turn)
        self.digests.append(digest)
        self.num_all += 1
        self.ended_unix_ns = max(self.ended_unix_ns, turn.ended_unix_ns)

    def shown(self) -> Turns:
        return Turns(self.run_id, list(self.turns), self.num_all - len(self.turns), list(self.digests), self.before)


class KeptRuns:
    """The latest runs: those that a client names, and the others from their second turn on."""

    def __init__(self, now_unix_ns: Callable[[], int], epoch_offset_ns: EpochOffset) -> None:
        self.now_unix_ns = now_unix_ns
        self._epoch_offset_ns = epoch_offset_ns
        self._lock = Lock()
        self._runs: OrderedDict[str, _Kept] = OrderedDict()  # ordered by last turn, the run with the oldest one first
        self._single: OrderedDict[str, _Kept] = OrderedDict()
        self._num_turns = 0  # turns of all `_runs`

    def add(self, record: RequestRecord) -> None:
        """Add an ended request, if it belongs to a run."""
        if (place := record.turn) is None:
            return
        prompt = place.prompt()
        turn = KeptTurn.of(record, place, prompt, self._epoch_offset_ns())
        with self._lock:
            if (run := self._runs.pop(place.run, None)) is None:
                run = self._single.pop(place.run, None) or _Kept(place.run, prompt.before)
            else:
                self._num_turns -= len(run.turns)
            run.add(turn, prompt.digest)
            if run.num_all == 1 and not place.is_named:
                self._single[place.run] = run
                if len(self._single) > MAX_SINGLE:
                    self._single.popitem(last=False)
                return
            self._runs[place.run] = run
            self._num_turns += len(run.turns)
            while len(self._runs) > MAX_RUNS or self._num_turns > MAX_ALL_TURNS:
                _, dropped = self._runs.popitem(last=False)
                self._num_turns -= len(dropped.turns)

    def newest_first(self) -> list[Turns]:
        with self._lock:
            return [run.shown() for run in reversed(self._runs.values())]

    def single(self, number: int) -> list[Turns]:
        """Return the newest requests that no other has continued here, each as a run of its own."""
        with self._lock:
            return [run.shown() for run in islice(reversed(self._single.values()), number)]

    def get(self, run_id: str) -> Turns | None:
        with self._lock:
            run = self._runs.get(run_id) or self._single.get(run_id)
            return None if run is None else run.shown()

    def take_ended(self) -> list[list[KeptTurn]]:
        """Return the turns of each run that has ended since the last call. If such a run continues, its later turns
        count as another one."""
        since_ns = self.now_unix_ns() - SILENCE_SECONDS * 1_000_000_000
        ended = []
        with self._lock:
            for run in self._runs.values():
                num_new = min(run.num_all - run.num_counted, len(run.turns))
                if num_new and run.ended_unix_ns <= since_ns:
                    ended.append(list(run.turns)[-num_new:])
                    run.num_counted = run.num_all
        return ended
