"""The addresses of this machine, and the error for an address that cannot be bound."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from oaiserve.errors import StartupError

_SIOCGIFCONF = 0x8912  # Linux: list the IPv4 addresses of all interfaces
_MOST_INTERFACES = 256
_INTERFACE = struct.Struct("16s4x4s16x")  # an ifreq: the name, and the address as a sockaddr_in in a union of 24 bytes
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def addresses_of_machine() -> list[str]:
    """Return the addresses of this machine, IPv4 first, without link-local ones, which need an interface name."""
    return [str(address) for address in (*_ipv4(), *_ipv6())]


def _ipv4() -> list[IPv4Address]:
    buffer = array.array("B", bytes(_INTERFACE.size * _MOST_INTERFACES))
    place, size = buffer.buffer_info()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer = fcntl.ioctl(sock, _SIOCGIFCONF, struct.pack("iP", size, place))
    except OSError:  # another system, or a sandbox without this call
        return []
    (num_bytes, _) = struct.unpack("iP", answer)
    return [IPv4Address(address) for _, address in _INTERFACE.iter_unpack(buffer.tobytes()[:num_bytes])]


def _ipv6() -> list[IPv6Address]:
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:  # IPv6 is off
        return []
    addresses = [IPv6Address(bytes.fromhex(line.split()[0])) for line in lines]
    return [address for address in addresses if not address.is_link_local]


def cannot_listen(host: str, port: int, error: OSError) -> StartupError:
    """Return the error for a socket that cannot be bound, with advice about its address or its port."""
    is_of_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    advice = allowed_hosts() if is_of_host else "Choose another port with --port, or 0 for any free port."
    return StartupError(f"Cannot listen on {host} port {port}: {reason}. {advice}")


def allowed_hosts() -> str:
    """Return a sentence with the addresses on which a server of this machine can listen."""
    here = addresses_of_machine()
    which = f", which has {', '.join(here)}" if here else ""
    return f"Choose an address of this machine with --host{which}, or 0.0.0.0 for all."
