"""Reports a hang: the engine thread has been in one part of its work for longer than that part can take.

The watchdog runs as a separate worker and counts its own checks instead of reading the time, so a process that was
stopped as a whole does not count as hung.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable

from oaiserve.engine.accounts.host_time import HostTime, describe
from oaiserve.engine.sequences.step_load import load_of
from oaiserve.explain.step_cost import StepCost
from oaiserve.facts.step_record import HostPart
from oaiserve.runtime import ENDED, Runtime, When, Worker

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LOOK_NS = int(LOOK_SECONDS * 1e9)
MULTIPLE = 20  # A step may take this many times its expected time.
UNKNOWN_SECONDS = 300.0  # limit for a step while the cost of steps is unknown, because the first ones may compile code
EXIT_CODE = 70


class Watchdog:
    """Checks once a second whether the engine thread makes progress. `hang` names what blocks it, or is empty.

    A part of its work may take `least_seconds` or, if that is longer, MULTIPLE times the expected time of its step.
    With `exits`, a hang ends the process. `each_second` is called after each check.
    """

    def __init__(
        self,
        host: HostTime,
        cost: Callable[[], StepCost | None],
        least_seconds: float,
        *,
        exits: bool = False,
        each_second: Callable[[], None] = lambda: None,
        runtime: Runtime,
    ) -> None:
        self._host = host
        self._cost = cost
        self._least_seconds = least_seconds
        self._exits = exits
        self._each_second = each_second
        self._seen_ns = 0  # when the phase began that the last check saw
        self._num_seen = 0  # number of consecutive checks that saw this phase
        self._clock_ns = runtime.clock_ns
        self._worker: Worker[None] = runtime.worker("watchdog", self._turn)
        self._is_over = False
        self._next_ns: int | None = None  # when the next check is due
        self.hang = ""
        self.num_hangs = 0
        self.num_looks = 0

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        self._is_over = True
        self._worker.post(None)

    def _turn(self) -> When:
        if self._is_over:
            return ENDED
        now_ns = self._clock_ns()
        if self._next_ns is not None and now_ns >= self._next_ns:
            self.look()
            self._each_second()
        self._next_ns = now_ns + LOOK_NS
        return self._next_ns

    def look(self) -> None:
        """Check once. The first check that finds a hang logs the stacks of all threads."""
        self.num_looks += 1
        part = self._host.part
        step = self._host.step
        since_ns = self._host.since_ns
        if part is HostPart.IDLE or since_ns != self._seen_ns:
            self._seen_ns = since_ns
            self._num_seen = 0
            if self.hang:
                log.warning("The engine goes on: it is no longer in '%s'", self.hang)
                self.hang = ""
            return
        self._num_seen += 1
        cost = self._cost()
        most_seconds = self._least_seconds
        if step is not None:
            if cost is None:
                expected_seconds = UNKNOWN_SECONDS
            else:
                expected_seconds = MULTIPLE * cost.expected_ns(load_of(step)) / 1e9
            most_seconds = max(most_seconds, expected_seconds)
        if self.hang or self._num_seen * LOOK_SECONDS <= most_seconds:
            return
        if step is None:
            self.hang = part
        else:
            self.hang = f"{part}, a step of {describe(step)}"
        self.num_hangs += 1
        seconds = self._num_seen * LOOK_SECONDS
        log.error("The engine hangs: %g s in '%s'. All threads:\n%s", seconds, self.hang, stacks())
        if self._exits:
            logging.shutdown()
            os._exit(EXIT_CODE)


def stacks() -> str:
    """Return the stacks of all threads as text, labelled with the threads' names."""
    named = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = (
        f"{named.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
    return "\n".join(parts)
