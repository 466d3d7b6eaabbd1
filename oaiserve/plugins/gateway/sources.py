"""Sources of replicas, from which a gateway gets the addresses of its servers.

A URL names one server, all servers that its name resolves to, or a list of servers.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Annotated, Protocol
from urllib.parse import urlsplit

import msgspec

from oaiserve.hosts import parse_authority
from oaiserve.plugins.gateway.address import Address
from oaiserve.plugins.gateway.upstream import Headers, NoAnswer, Upstream

log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[Iterable[Address]]]

MOST_LISTED = 1024  # servers in one list
LIST_SECONDS = 5.0  # time limit for a list

UNREADABLE = (
    msgspec.MsgspecError,
    UnicodeDecodeError,
    RecursionError,
)  # all errors that msgspec raises for bad content


class Source(Protocol):
    """A source of replicas."""

    @property
    def name(self) -> str: ...

    async def addresses(self) -> Sequence[Address]:
        """Return the addresses of its current replicas. Raises OSError."""


class _Group(msgspec.Struct):
    """A group of targets, as in Prometheus' http_sd."""

    targets: Annotated[list[str], msgspec.Meta(max_length=MOST_LISTED)]


_Groups = Annotated[list[_Group], msgspec.Meta(max_length=MOST_LISTED)]


class Url:
    """The servers of a URL. With a path, it is a list of servers in the format of Prometheus' `http_sd`."""

    def __init__(self, url: str, headers: Headers, resolve: Resolve) -> None:
        """Lists are requested with `headers`."""
        self.name = url
        self._headers = headers
        self._resolve = resolve

    async def addresses(self) -> Sequence[Address]:
        resolved = [*await self._resolve(self.name)]
        path = urlsplit(self.name).path.rstrip("/")
        return await self._listed(resolved[0], path) if path else resolved

    async def _listed(self, address: Address, path: str) -> list[Address]:
        """Return the addresses in a list. An empty one raises OSError, too: Ray's is empty while it starts."""
        upstream = Upstream(address, 0)
        try:
            status, content = await upstream.get(path.encode(), self._headers, seconds=LIST_SECONDS)
            groups = msgspec.json.decode(content, type=_Groups) if status == 200 else []
        except (NoAnswer, *UNREADABLE) as error:
            raise OSError(f"the list of servers cannot be read ({error})") from None
        finally:
            upstream.close()
        targets = [target for group in groups for target in group.targets]
        places = [(target, parse_authority(target)) for target in targets[:MOST_LISTED]]
        listed = [Address(at.name, at.port, target) for target, at in places if at is not None and at.port]
        if len(listed) < len(targets):
            text = "%s lists %d servers that are left out: not host:port, or more than %d"
            log.warning(text, path, len(targets) - len(listed), MOST_LISTED)
        if not listed:
            raise OSError(f"{path} lists no servers ({status})")
        return listed


async def addresses_of(url: str) -> list[Address]:
    """Return a URL's IPv4 addresses, or its IPv6 addresses if it has none, so that a machine with both counts once.
    Raises OSError."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    tls_name = parts.hostname if parts.scheme == "https" else None
    port = parts.port or (80 if tls_name is None else 443)
    resolved = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    families = {family for family, *_ in resolved}
    kept = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    ips = {str(place[0]) for family, _, _, _, place in resolved if family == kept}
    return [Address(ip, port, parts.netloc, tls_name) for ip in sorted(ips)]
