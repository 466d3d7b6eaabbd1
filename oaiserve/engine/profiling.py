"""Profiles of the next steps, on request. Engine thread only; no torch, because the profiler is passed in.

Profilers watch the thread they were started in, so the engine thread starts and stops them. The caller writes the
recording, because that takes longer than a step.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oaiserve.engine.accounts.host_time import HostTime, Ranges
from oaiserve.errors import APIError, Conflict, InternalError, NotFound
from oaiserve.facts.record import Profile

if TYPE_CHECKING:
    from oaiserve.engine.model.profiler import TorchProfiler

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartProfile:
    """The command to make a profile of the next `num_steps` steps. The future gets the profile.

    It has fewer steps if the time is over before, or if it is ended early.
    """

    num_steps: int
    timeout_ns: int
    future: Future[Profile] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class EndProfile:
    """The command to end a profile early. It does nothing if the profile has ended or never began."""

    future: Future[Profile]


@dataclass(slots=True)
class _ActiveProfile:
    asked: StartProfile
    began_ns: int
    ranges_before: Ranges | None  # where parts were shown before
    num_launched: int = 0


class Profiling:
    """Makes at most one profile at a time. If the profiler fails, only the profile is lost."""

    def __init__(self, profiler: TorchProfiler | None, host: HostTime) -> None:
        self._profiler = profiler
        self._host = host
        self._active: _ActiveProfile | None = None

    @property
    def deadline_ns(self) -> int | None:
        """Return the time at which the active profile ends in any case."""
        if self._active is None:
            return None
        return self._active.began_ns + self._active.asked.timeout_ns

    @property
    def is_complete(self) -> bool:
        return self._active is not None and self._active.num_launched == self._active.asked.num_steps

    def start(self, asked: StartProfile, now_ns: int) -> None:
        if not asked.future.set_running_or_notify_cancel():  # from here on it cannot be cancelled
            return
        if self._profiler is None:
            asked.future.set_exception(NotFound("This engine has no profiler."))
        elif self._active is not None:
            asked.future.set_exception(Conflict("A profile is being made already; try again when it is over."))
        else:
            try:
                ranges_before = self._host.show(self._profiler.start())
            except Exception:
                log.exception("The profiler does not start")
                asked.future.set_exception(InternalError("The profiler does not start. The server's log says why."))
            else:
                self._active = _ActiveProfile(asked, now_ns, ranges_before)
                log.info("A profile of %d steps begins", asked.num_steps)

    def launched(self) -> None:
        if self._active is not None:
            self._active.num_launched += 1

    def end(self, asked: EndProfile, now_ns: int) -> None:
        if self._active is not None and self._active.asked.future is asked.future:
            self.finish(now_ns)

    def finish(self, now_ns: int, error: APIError | None = None) -> None:
        """End the active profile, if there is one, with its recording or with the error."""
        active, self._active = self._active, None
        if active is None or self._profiler is None:
            return
        future = active.asked.future
        try:
            self._host.show(active.ranges_before)
            recording = self._profiler.stop()
        except Exception:
            log.exception("The profiler does not stop")
            error = error or InternalError("The profiler has failed. The server's log says why.")
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(Profile(recording, active.num_launched, now_ns - active.began_ns))
