"""`Connections` counts the open connections, and refuses more than a limit, in total and per address.

The total limit follows from the number of files that the process may open. This file knows neither sockets nor HTTP.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Any

from oaiserve.config import ServerOptions
from oaiserve.errors import StartupError
from oaiserve.http.refusals import Refusals

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 8192  # the default; an idle connection takes 11 KiB, one with an incomplete head up to 75 KiB
SPARE_FILES = 64  # files that the server may open while it serves, for example for collectors
FEWEST_CONNECTIONS = 8
# ASGI extensions that give routes access to a request's connection. The first is a mapping of functions: `cut()` closes
# the connection and drops unsent data; `awaits_body()` returns whether a part of the current request's body has not
# arrived yet; `charge` is `Refusals.charge`. Once a chunked answer has begun, `part_writer()` returns a function that
# writes a part of it without `send`; for other answers, it returns None. The function returns False and writes nothing
# while the client isn't reading, or once it has left. An empty part only checks that. The second extension is present
# once the server has cut the connection because of an unread answer.
CONNECTION = "oaiserve.http.connection"
WRITE_TIMED_OUT = "oaiserve.write_timed_out"
# Present if the request asks for another protocol: a mapping with the `protocol`, in lower case, and functions. Before
# a route answers with status 101, it calls `take(to, on_drain)`: `to` then receives the client's further data, and
# `on_drain` is called when the server shuts down. `write`, `drain`, `pause` and `resume` act on the connection, which
# ends with the empty body of the answer. If the functions are missing, the connection cannot switch.
UPGRADE = "oaiserve.http.upgrade"


class Refusal(StrEnum):
    """The reason why the server has closed a connection against the client's will."""

    ALL = "all"  # --max-connections were open
    ADDRESS = "address"  # --max-connections-per-address of its address were open
    HEADER_TIMEOUT = "header_timeout"  # no complete head within --header-timeout-seconds
    HANDSHAKE = "handshake"  # TLS: a failed handshake, or none within --header-timeout-seconds
    INVALID = "invalid"  # broken HTTP, headers without end, CONNECT


class Connections:
    """The number of open connections, in total and per address. A `most_per_address` of 0 means no limit per address.

    An IPv6 client usually has a network of 2**64 addresses, so these count as one address. Only the event loop calls
    the methods; any thread may read `num_open` and `refused`.
    """

    def __init__(self, most: int, most_per_address: int, clock_ns: Callable[[], int]) -> None:
        self.num_open = 0
        self.clock_ns = clock_ns
        self.refusals = Refusals(clock_ns)  # refused requests
        # All reasons are present from the start, so the size never changes.
        self.refused: dict[str, int] = dict.fromkeys(Refusal, 0)
        self.most = most
        self.most_per_address = most_per_address
        self._by_client: dict[bytes, int] = {}

    def admit(self, address: str) -> Refusal | None:
        """Count a connection from the address as open and return None, or refuse it and return why."""
        client = client_of(address)
        of_client = self._by_client.get(client, 0)
        if self.num_open >= self.most:
            log.warning("Refused a connection: all %d of --max-connections are open", self.most)
            self.count(Refusal.ALL)
            return Refusal.ALL
        if self.most_per_address and of_client >= self.most_per_address:
            text = "Refused a connection: %s has the %d of --max-connections-per-address open"
            log.warning(text, address, self.most_per_address)
            self.count(Refusal.ADDRESS)
            return Refusal.ADDRESS
        self.num_open += 1
        self._by_client[client] = of_client + 1
        return None

    def release(self, address: str) -> None:
        client = client_of(address)
        self.num_open -= 1
        self._by_client[client] -= 1
        if not self._by_client[client]:
            del self._by_client[client]

    def count(self, refusal: Refusal) -> None:
        self.refused[refusal] += 1


def client_of(address: str) -> bytes:
    """Return the key under which an address is counted: an IPv4 address, or the first 64 bits of an IPv6 address.

    For an IPv4-mapped IPv6 address, the key is the four bytes of the IPv4 address."""
    if ":" not in address:
        return address.encode()
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return packed[12:] if packed.startswith(b"\0" * 10 + b"\xff\xff") else packed[:8]


def part_writer(scope: Mapping[str, Any]) -> Callable[[bytes], bool] | None:
    """Return a function that writes a part of the current answer straight to the client's connection, or None if the
    connection has none or if `send` has been replaced."""
    state = scope["state"]
    if state["send"] is not state.get("client_send"):
        return None
    make = scope.get("extensions", {}).get(CONNECTION, {}).get("part_writer")
    return None if make is None else make()


def allowed_connections(options: ServerOptions, clock_ns: Callable[[], int], files_each: int = 1) -> Connections:
    """Raise the limit of open files, and return `Connections` whose limits follow from the options and the files left.

    Call it once the model is loaded: files that are open by then are subtracted. Each connection needs `files_each`
    files: 2 in a gateway, which also connects to a replica. Raises StartupError if too few are left.
    """
    num_open_files = len(os.listdir("/dev/fd"))
    reserve = num_open_files + SPARE_FILES
    requested = options.max_connections
    limit = _raise_open_files(reserve + files_each * (requested or MOST_CONNECTIONS))
    available = (limit - reserve) // files_each
    if available < (requested or FEWEST_CONNECTIONS):
        if requested:
            what = f"--max-connections is {requested}"
        else:
            what = f"at least {FEWEST_CONNECTIONS} connections must be possible"
        raise StartupError(
            f"This process may have {limit} files open and needs {reserve} itself, which leaves room for "
            f"{max(0, available)} connections, but {what}. Raise the limit with 'ulimit -n', LimitNOFILE or "
            "--ulimit nofile."
        )
    most = requested or min(available, MOST_CONNECTIONS)
    per_address = options.max_connections_per_address
    return Connections(most, max(1, most // 2) if per_address is None else per_address, clock_ns)


def _raise_open_files(wanted: int) -> int:
    """Raise the soft limit of open files to `wanted`, as far as the hard limit permits, and return the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with suppress(ValueError, OSError):  # A system may allow less than the hard limit says.
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return target if soft == resource.RLIM_INFINITY else soft
