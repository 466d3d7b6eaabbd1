"""Keeps the router informed of the present replicas and their reports.

A replica belongs to the router from its first report until its address is gone. A silent one is not chosen, unless all
are.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from array import array
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from oaiserve.facts.report import ReplicaReport
from oaiserve.facts.times import monotonic_ns
from oaiserve.scale.gateway.upstream import Address, BadAnswer, CutOff, Unreachable, Upstream
from oaiserve.scale.router import Router

log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[Iterable[Address]]]


class Pace(NamedTuple):
    """The pace says how often, and for how long, replicas are looked at."""

    report_seconds: float = 1.0  # between two reports of a replica
    answer_seconds: float = 5.0  # in which a report must come
    resolve_seconds: float = 5.0  # between two looks at the addresses of names


USUAL = Pace()


class Reported(msgspec.Struct):
    """The report of a replica, as it comes over HTTP."""

    incarnation: str
    number: int
    num_open: float
    waiting_tokens: float
    keys: bytes
    is_ready: bool


class Watch:
    """The replicas behind some URLs. A name may have several addresses, each of which is a replica."""

    def __init__(self, router: Router, urls: Iterable[str], key: str | None, resolve: Resolve, pace: Pace) -> None:
        """`key` is an API key of the replicas: those that have keys report to whoever has one."""
        self._router = router
        self._found: dict[str, list[Address]] = {url: [] for url in urls}
        self._headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        self._resolve = resolve
        self._pace = pace
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._mute: set[str] = set()  # replicas that serve, and give no reports
        self.upstreams: dict[str, Upstream] = {}  # by name: all that there are
        self.joined: set[str] = set()  # those that the router knows
        self.silent: set[str] = set()  # those that did not answer when they were last asked

    @property
    def num_ready(self) -> int:
        """Return the number of replicas that answer and take requests."""
        return len(self.joined - self.silent)

    async def run(self) -> None:
        """Watch until it is cancelled. Then only connections of answers under way are left."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(self._pace.resolve_seconds)
        finally:
            for poll in self._polls.values():
                poll.cancel()
            await asyncio.gather(*self._polls.values(), return_exceptions=True)
            for upstream in self.upstreams.values():
                upstream.close()
            await asyncio.sleep(0)  # for the event loop to close them

    async def look(self) -> None:
        """Look up the present replicas, and begin to ask new ones for reports."""
        for url in self._found:
            try:
                self._found[url] = [*await self._resolve(url)]
            except OSError as error:  # the addresses that it had may still be right
                log.warning("The name in %s has no address now: %s", url, error.strerror or error)
        found = {address.name: address for addresses in self._found.values() for address in addresses}
        for name in self.upstreams.keys() - found.keys():
            log.info("The replica %s is gone", name)
            self._polls.pop(name).cancel()
            self.upstreams.pop(name).close()
            for names in (self.joined, self.silent, self._mute):
                names.discard(name)
        self._router.update_replicas(self.joined, monotonic_ns())
        for name in found.keys() - self.upstreams.keys():
            self.upstreams[name] = upstream = Upstream(found[name])
            self._polls[name] = asyncio.create_task(self._poll(upstream))

    def exclude(self, name: str, why: str) -> None:
        """Have a replica chosen no more until it reports again: a request could not be delivered to it."""
        if name not in self.upstreams:
            return  # it is gone
        self._router.exclude(name, monotonic_ns())
        if name not in self.silent:
            self._mute.discard(name)  # it may be another one when it is back
            self.silent.add(name)
            log.warning("The replica %s gets no requests until it answers again: %s", name, why)

    async def _poll(self, upstream: Upstream) -> None:
        number, seconds = 0, self._pace.answer_seconds
        while True:
            number += 1
            try:
                async with asyncio.timeout(seconds):
                    report = await self._ask(upstream, number)
            except TimeoutError:
                self.exclude(upstream.name, f"no report within {seconds:g} seconds")
                upstream.abandon()
            except (Unreachable, BadAnswer, CutOff, NotReady) as error:
                self.exclude(upstream.name, str(error))
            except Exception:  # the others, and the next report, must not be lost with it
                log.exception("The report of the replica %s cannot be read", upstream.name)
            else:
                self._learn(report)
            await asyncio.sleep(self._pace.report_seconds)

    def _learn(self, report: ReplicaReport) -> None:
        name, now_ns = report.replica, monotonic_ns()
        if name not in self.joined:
            log.info("The replica %s takes requests", name)
            self.joined.add(name)
            self._router.update_replicas(self.joined, now_ns)
        elif name in self.silent:
            log.info("The replica %s answers again", name)
        self.silent.discard(name)
        self._router.learn(report, now_ns)

    async def _ask(self, upstream: Upstream, number: int) -> ReplicaReport:
        """Return the report of a replica, or a substitute without one. Raises NotReady, and as `Upstream.get` does."""
        name = upstream.name
        if name not in self._mute:
            status, content = await upstream.get(b"/debug/report", self._headers)
            if status == 200:
                return _report(name, content)
            if status in (401, 403, 404):
                self._mute.add(name)
                text = "The replica %s gives no reports (%d), so that its load and its cache are guessed. %s"
                log.warning(text, name, status, _message(content))
        status, _ = await upstream.get(b"/ready", self._headers)
        if status != 200:
            raise NotReady(f"it is not ready ({status})")
        return ReplicaReport(name, "", number, upstream.num_open, 0.0, array("Q"))


class NotReady(Exception):
    """A replica answers, and takes no requests."""


def _report(name: str, content: bytes) -> ReplicaReport:
    reported = msgspec.json.decode(content, type=Reported)
    if not reported.is_ready:
        raise NotReady("it is not ready")
    keys = array("Q", reported.keys)
    if sys.byteorder == "big":
        keys.byteswap()
    return ReplicaReport(name, reported.incarnation, reported.number, reported.num_open, reported.waiting_tokens, keys)


def _message(content: bytes) -> str:
    """Return the message of an error of ours, or else ""."""
    try:
        message: str = msgspec.json.decode(content)["error"]["message"]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return ""
    return message


async def addresses_of(url: str) -> list[Address]:
    """Return the addresses of a URL's name: those of IPv4, or those of IPv6 if there are none. Raises OSError.

    A machine with both would otherwise count as two.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    tls_name = parts.hostname if parts.scheme == "https" else None
    port = parts.port or (80 if tls_name is None else 443)
    found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    families = {family for family, *_ in found}
    kept = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    ips = {str(place[0]) for family, _, _, _, place in found if family == kept}
    return [Address(ip, port, parts.netloc, tls_name) for ip in sorted(ips)]
