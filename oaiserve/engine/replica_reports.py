"""`Reports` builds a replica's reports for routers from the engine's numbers and the computed prompts.

The engine thread does none of this work. It leaves the prefix keys of each prompt in a queue, and its numbers in
snapshots; the thread that requests a report does the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from threading import Lock

from oaiserve.engine.sequences.blocks import BlockHash
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.wire.report import HeldPrefixes, ReplicaReport

# For this long, all routers get the same report, so its averages cover at least this much time.
LEAST_NS = 500_000_000
MOST_PROMPTS_KEPT = 4096  # prompts whose prefix keys wait for a report

ComputedPrompt = list[tuple[int, BlockHash]]  # (prefix key, block in which the prefix ends) pairs


class Reports:
    """Makes the reports of one engine. Any thread may request one.

    Routes compute the prefix keys of prompts only after the first report: a server without a router does not need them.
    """

    def __init__(
        self,
        snapshot: Callable[[], EngineNumbers],
        prompts: deque[ComputedPrompt],
        is_cached: Callable[[BlockHash], bool],
        clock_ns: Callable[[], int],
        incarnation: str,
    ) -> None:
        """`prompts` gets the prompts computed by the engine thread. `is_cached` may be called on any thread.
        `incarnation` is a random name of this engine."""
        self._snapshot = snapshot
        self._prompts = prompts
        self._is_cached = is_cached
        self._clock_ns = clock_ns
        self._lock = Lock()
        self._held: HeldPrefixes[BlockHash] = HeldPrefixes()
        self._incarnation = incarnation
        self._before = snapshot()  # the numbers at the previous report
        self._load = self._before.load
        self._last: ReplicaReport | None = None

    @property
    def is_asked(self) -> bool:
        return self._last is not None

    def report(self, replica: str) -> ReplicaReport:
        """Return a report that is at most half a second old. `replica` is the name under which the router knows this
        engine."""
        with self._lock:
            now_ns = self._clock_ns()
            if self._last is not None and now_ns - self._load.at_ns < LEAST_NS:
                return replace(self._last, replica=replica)
            while self._prompts:
                self._held.note(self._prompts.popleft())
            now = self._snapshot()
            load = now.load.after(max(now_ns, now.load.at_ns), now.load.num_open, now.load.uncomputed_tokens)
            num_open, waiting_tokens = load.mean_since(self._load)
            num_steps = now.num_steps - self._before.num_steps
            step_seconds = (now.model_ns - self._before.model_ns) / max(1, num_steps) / 1e9
            self._load = load
            self._before = now
            self._last = ReplicaReport(
                replica=replica,
                incarnation=self._incarnation,
                number=0 if self._last is None else self._last.number + 1,
                num_open=num_open,
                waiting_tokens=waiting_tokens,
                keys=self._held.keys(self._is_cached),
                num_running=now.num_running,
                num_waiting=now.num_waiting + now.num_tokenizing,
                kv_use=now.kv_usage,
                step_seconds=step_seconds,
            )
            return self._last
