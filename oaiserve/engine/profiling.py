"""A profile of the next steps, for whoever asks for one. Engine thread only; no torch: the profiler is given.

Profilers watch the thread that starts them, so the engine thread starts and stops them itself. What they have recorded
is written by whoever asked: that takes longer than a step.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from oaiserve.engine.host_time import HostTime, Ranges
from oaiserve.errors import APIError, Conflict, InternalError, NotFound
from oaiserve.record import Profile, Recording

log = logging.getLogger(__name__)


class Profiler(Protocol):
    def start(self) -> Ranges:
        """Records from now on. Ranges are shown among what is recorded."""

    def stop(self) -> Recording:
        """Of what happened since `start`. Waits for the device, so that all is in it that was launched."""


@dataclass(frozen=True, slots=True)
class StartProfile:
    """Of the next `num_steps` steps, as far as they come in time and nobody ends it. The future gets it."""

    num_steps: int
    timeout_ns: int
    future: Future[Profile] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class EndProfile:
    """With the steps that it has. Does nothing where it has ended, or never began."""

    future: Future[Profile]


@dataclass(slots=True)
class _UnderWay:
    asked: StartProfile
    began_ns: int
    others: Ranges | None  # where parts were shown before
    num_launched: int = 0


class Profiling:
    """At most one profile at a time. A profiler that fails costs the profile, and no request."""

    def __init__(self, profiler: Profiler | None, host: HostTime) -> None:
        self._profiler = profiler
        self._host = host
        self._under_way: _UnderWay | None = None

    @property
    def deadline_ns(self) -> int | None:
        """When the one under way is over in any case."""
        if self._under_way is None:
            return None
        return self._under_way.began_ns + self._under_way.asked.timeout_ns

    @property
    def is_complete(self) -> bool:
        """Its last step has been launched."""
        return self._under_way is not None and self._under_way.num_launched == self._under_way.asked.num_steps

    def start(self, asked: StartProfile, now_ns: int) -> None:
        if not asked.future.set_running_or_notify_cancel():  # from here on it cannot be cancelled
            return
        if self._profiler is None:
            asked.future.set_exception(NotFound("This engine has no profiler."))
        elif self._under_way is not None:
            asked.future.set_exception(Conflict("A profile is being made already; try again when it is over."))
        else:
            try:
                others = self._host.show(self._profiler.start())
            except Exception:
                log.exception("The profiler does not start")
                asked.future.set_exception(InternalError("The profiler does not start. The server's log says why."))
            else:
                self._under_way = _UnderWay(asked, now_ns, others)
                log.info("A profile of %d steps begins", asked.num_steps)

    def launched(self) -> None:
        """A step."""
        if self._under_way is not None:
            self._under_way.num_launched += 1

    def end(self, asked: EndProfile, now_ns: int) -> None:
        if self._under_way is not None and self._under_way.asked.future is asked.future:
            self.finish(now_ns)

    def finish(self, now_ns: int, error: APIError | None = None) -> None:
        """Hands over what there is, or the error. Does nothing where no profile is under way."""
        under_way, self._under_way = self._under_way, None
        if under_way is None or self._profiler is None:
            return
        future = under_way.asked.future
        try:
            self._host.show(under_way.others)
            recording = self._profiler.stop()
        except Exception:
            log.exception("The profiler does not stop")
            error = error or InternalError("The profiler has failed. The server's log says why.")
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(Profile(recording, under_way.num_launched, now_ns - under_way.began_ns))
