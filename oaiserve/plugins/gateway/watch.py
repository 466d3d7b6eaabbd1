"""Tracks the replicas and their reports, and keeps the router up to date.

The router knows a replica from its first report until its address disappears. It chooses a replica without recent
reports only if no other reports either, and never one that hangs.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec

from oaiserve.plugins.gateway.address import Address
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.plugins.gateway.sources import UNREADABLE, Source
from oaiserve.plugins.gateway.upstream import Headers, NoAnswer, TooLong, Upstream
from oaiserve.wire.report import ROUTER_HEADER, ReplicaReport, Report

log = logging.getLogger(__name__)

# A replica is silent when a report takes SLOW_ANSWERS times as long as its slowest recent reports, or SLOW_STEPS times
# as long as its steps, which may keep it from answering. The memory of slow reports fades to REMEMBERED in each second.
SLOW_ANSWERS = 10
SLOW_STEPS = 20
REMEMBERED = 0.9
MOST_FAILURES = 3  # failed requests in a row, after which a replica gets none for a while
MOST_PAUSE_SECONDS = 60.0
MUTE_SECONDS = 60.0  # time for which a replica without a readable report is not asked for another
# Looks for an answer within its time limit. A pause of this process takes up at most one look, so no replica is blamed
# for it.
LOOKS = 8
MOST_NUMBERS = 4096  # Replicas that are gone get their numbers again when they are back.


class Pace(NamedTuple):
    """The intervals and time limits with which replicas are watched."""

    report_seconds: float = 1.0  # interval between two reports of a replica
    answer_seconds: float = 5.0  # time limit for a report, and for the first one of a replica
    least_answer_seconds: float = 1.5  # least time limit, however fast the replica usually is
    resolve_seconds: float = 5.0  # interval between two look-ups of addresses by name
    pause_seconds: float = 2.0  # first pause of a replica whose requests fail


USUAL = Pace()


def report_headers(key: str | None) -> Headers:
    """Return the headers of requests for reports. `key` is an API key of the replicas, for those that need one."""
    headers = [(ROUTER_HEADER.encode(), b"1")]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    return headers


class Watch:
    """The replicas of some sources. A name may have several addresses, each of which is a replica."""

    def __init__(
        self,
        router: Routers,
        sources: Iterable[Source],
        headers: Headers,
        pace: Pace,
        clock_ns: Callable[[], int],
    ) -> None:
        """Reports are requested with `headers`."""
        self._router = router
        self._sources = [*sources]
        self._found: dict[str, Sequence[Address]] = {}  # by the name of a source
        self.headers = headers
        self._pace = pace
        self._clock_ns = clock_ns
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._numbers: dict[str, int] = {}  # by replica, including some that are gone
        self._next_number = count(1)
        self._free: list[int] = []  # numbers for new replicas, whose counters in the metrics go on
        self.upstreams: dict[str, Upstream] = {}  # all current replicas by name
        self.joined: set[str] = set()  # replicas that the router has
        self.silent: set[str] = set()  # replicas that did not answer the last request for a report
        # Those without a report for the longest time that one may take, or whose engine hangs, until their next report.
        self.hung: set[str] = set()

    async def run(self) -> None:
        """Watch until it is cancelled. Then only connections with unfinished answers are left."""
        try:
            while True:
                try:
                    await self.look()
                except Exception:  # The replicas that it has are still watched, and the next look may go well.
                    log.exception("The current replicas could not be looked up")
                await asyncio.sleep(self._pace.resolve_seconds)
        finally:
            for poll in self._polls.values():
                poll.cancel()
            await asyncio.gather(*self._polls.values(), return_exceptions=True)
            for upstream in self.upstreams.values():
                upstream.close()
            await asyncio.sleep(0)  # The event loop closes them meanwhile.

    async def look(self) -> None:
        """Look up the current replicas, and start requesting reports from new ones."""
        for source in self._sources:
            try:
                self._found[source.name] = await source.addresses()
            except OSError as error:  # The addresses that it had may still be right.
                log.warning("%s names no servers now: %s", source.name, error.strerror or error)
        listed = {address.name: address for addresses in self._found.values() for address in addresses}
        for name in self.upstreams.keys() - listed.keys():
            upstream = self.upstreams.pop(name)
            log.info("Replica %s is gone: its address is no longer listed", upstream.shown)
            self._polls.pop(name).cancel()
            upstream.close()
            for names in (self.joined, self.silent, self.hung):
                names.discard(name)
        self._router.update_replicas(self.joined, self._clock_ns())
        for name in sorted(listed.keys() - self.upstreams.keys()):
            number = self._numbers.pop(name, None) or (self._free.pop() if self._free else next(self._next_number))
            self._numbers[name] = number
            self.upstreams[name] = upstream = Upstream(listed[name], number)
            log.info("Replica %d is %s", number, name)
            self._polls[name] = asyncio.create_task(self._poll(upstream))
        for name in [name for name in self._numbers if name not in self.upstreams][:-MOST_NUMBERS]:
            self._free.append(self._numbers.pop(name))

    def exclude(self, name: str, why: str) -> None:
        """Let the router avoid a replica until it reports again, because a request could not be delivered to it."""
        if name not in self.upstreams:
            return  # The replica is gone.
        self._router.exclude(name, self._clock_ns())
        if name not in self.silent:
            self.upstreams[name].mute_until_ns = 0  # Another process may answer next time.
            self.silent.add(name)
            log.warning("Replica %s gets no requests until it answers: %s", self.upstreams[name].shown, why)

    def failed(self, upstream: Upstream, why: str) -> None:
        """Count a failed request. A replica whose requests keep failing gets none for a while, even if its reports are
        fine. The pause doubles each time, and at most half of the replicas are paused."""
        name = upstream.name
        if name in self.hung:
            return
        now_ns = self._clock_ns()
        upstream.num_failures += 1
        num_out = sum(now_ns < other.out_until_ns for other in self.upstreams.values())
        is_enough = upstream.num_failures >= MOST_FAILURES and now_ns >= upstream.out_until_ns
        if not is_enough or name not in self.upstreams or 2 * (num_out + 1) > len(self.joined):
            return
        seconds = min(MOST_PAUSE_SECONDS, self._pace.pause_seconds * (1 << min(upstream.num_pauses, 10)))
        log.warning("Replica %s gets no requests for %g s, because they keep failing: %s", upstream.shown, seconds, why)
        upstream.num_pauses += 1
        upstream.num_ejections += 1
        upstream.out_until_ns = now_ns + int(seconds * 1e9)
        self.silent.add(name)
        self._router.exclude(name, now_ns)

    async def _poll(self, upstream: Upstream) -> None:
        pace = self._pace
        number = 0
        slow_seconds = pace.answer_seconds
        while True:
            number += 1
            asked_ns = self._clock_ns()
            most_seconds = min(pace.answer_seconds, max(pace.least_answer_seconds, slow_seconds))
            try:
                report = await _within(most_seconds, self._ask(upstream, number))
            except TimeoutError:
                if most_seconds >= pace.answer_seconds:
                    self.hung.add(upstream.name)
                self.exclude(upstream.name, f"no report within {most_seconds:.3g} seconds")
                upstream.abandon()
                slow_seconds = pace.answer_seconds
            except (NoAnswer, NotReady) as error:
                self.exclude(upstream.name, str(error))
                slow_seconds = 0.0  # Another process may answer next time.
                if isinstance(error, Hung):
                    self.hung.add(upstream.name)
                    upstream.abandon()
                elif isinstance(error, NotReady):
                    self.hung.discard(upstream.name)
            except Exception:  # Other replicas, and the next report, must not suffer from this.
                log.exception("The report of the replica %s cannot be read", upstream.shown)
            else:
                self.hung.discard(upstream.name)
                took_seconds = (self._clock_ns() - asked_ns) / 1e9
                now_seconds = max(SLOW_ANSWERS * took_seconds, SLOW_STEPS * report.step_seconds)
                slow_seconds = now_seconds if number == 1 else max(REMEMBERED * slow_seconds, now_seconds)
                if self._clock_ns() >= upstream.out_until_ns:
                    self._learn(report, upstream)
            await asyncio.sleep(self._pace.report_seconds)

    def _learn(self, report: ReplicaReport, upstream: Upstream) -> None:
        name = report.replica
        now_ns = self._clock_ns()
        if name not in self.joined:
            log.info("Replica %s is ready for requests", upstream.shown)
            self.joined.add(name)
            self._router.update_replicas(self.joined, now_ns)
        elif name in self.silent:
            log.info("Replica %s is ready for requests again", upstream.shown)
        self.silent.discard(name)
        self._router.learn(report, now_ns)

    async def _ask(self, upstream: Upstream, number: int) -> ReplicaReport:
        """Return the report of a replica, or a substitute without one. Raises NotReady, and as `Upstream.get` does."""
        name = upstream.name
        if self._clock_ns() >= upstream.mute_until_ns:
            why_mute = None
            try:
                status, content = await upstream.get(b"/debug/report", self.headers)
                if status == 200:
                    upstream.report = report = msgspec.json.decode(content, type=Report)
                    if report.is_hung:
                        raise Hung("its engine hangs")
                    if not report.is_ready:
                        raise NotReady("it is not ready")
                    return report.of_replica(name)
                if status in (401, 403, 404):
                    why_mute = f"{status}; it may need --replica-key"
            except (TooLong, *UNREADABLE) as error:
                why_mute = f"they cannot be read: {error}"
            upstream.report = None
            if why_mute is not None:
                upstream.mute_until_ns = self._clock_ns() + int(MUTE_SECONDS * 1e9)
                if not upstream.has_warned_of_reports:
                    upstream.has_warned_of_reports = True
                    log.warning(
                        "Replica %s gives no reports (%s), so its load and cache are estimated",
                        upstream.shown,
                        why_mute,
                    )
        status, _ = await upstream.get(b"/ready", self.headers)
        if status != 200:
            health, _ = await upstream.get(b"/health")
            raise NotReady(f"it is not ready ({status})") if health == 200 else Hung(f"its health fails ({health})")
        models = self._router.models_of(name)  # still those of its last report
        aliases = self._router.aliases_of(name)
        return ReplicaReport(name, "", number, upstream.num_open, 0.0, array("Q"), models=models, aliases=aliases)


async def _within(most_seconds: float, answer: Coroutine[Any, Any, ReplicaReport]) -> ReplicaReport:
    """Wait for an answer. Raises TimeoutError after `most_seconds`, without those for which this process was paused."""
    answering = asyncio.create_task(answer)
    try:
        for _ in range(LOOKS):
            if (await asyncio.wait({answering}, timeout=most_seconds / LOOKS))[0]:
                return answering.result()
        raise TimeoutError
    finally:
        answering.cancel()


class NotReady(Exception):
    """A replica answers, but accepts no requests."""


class Hung(NotReady):
    """The engine of a replica hangs, according to its watchdog or its health."""
