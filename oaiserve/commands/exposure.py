"""Says at the start who can use a server without a key: everyone in its network, unless it listens on loopback."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from oaiserve.commands.banner import url_of
from oaiserve.config import Config
from oaiserve.hosts import is_loopback

logger = logging.getLogger(__name__)

A_KEY_CLOSES = "Set OAISERVE_API_KEY (--api-key) to require a key, or --host 127.0.0.1 to answer this machine only."
# Addresses reserved for documentation. Connecting a UDP socket to one sends no packet, but shows which of its own
# addresses this machine would send from.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def warn_if_open(
    config: Config, sock: socket.socket, closed_by: str, own_address: Callable[[int], str | None] | None = None
) -> None:
    """Log a warning with the address that others can reach, if the server needs no key and isn't bound to loopback.

    `own_address` maps an address family to this machine's address in its network, or to None.
    """
    if config.is_private:
        return
    bound, port = sock.getsockname()[:2]
    if is_loopback(bound):  # The name in --host means this machine.
        return
    if bound in ("0.0.0.0", "::"):
        families = [socket.AF_INET, *([socket.AF_INET6] if bound == "::" else [])]
        found = map(own_address or address_in_network, families)
        bound = next(filter(None, found), bound)
    url = url_of(config.server, bound, port)
    logger.warning("Open: everyone who can reach %s can use this server without a key. %s", url, closed_by)


def address_in_network(family: int) -> str | None:
    """Return this machine's address on the route to other networks, or None without such a route. Sends nothing."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((_ELSEWHERE[socket.AddressFamily(family)], 9))
            address = str(sock.getsockname()[0])
    except OSError:
        return None
    return None if is_loopback(address) else address
