"""Parses the names of hosts, as in a Host header, an Origin header or a setting. Stdlib only, and without name
resolution."""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple

_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]{1,254}))(?::([0-9]{0,5}))?")
_WEB_ORIGIN = re.compile(r"(https?)://([^/\s]+)")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Authority(NamedTuple):
    """A host and its port. The name is in lower case; an IP address is in its shortest form, without brackets."""

    name: str
    port: int | None


def parse_authority(text: str) -> Authority | None:
    """Return the host and the port of `name`, `name:port` or `[address]:port`, or None for any other text."""
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        return None
    in_brackets, name, port = match.groups()
    if port and int(port) > 65535:
        return None
    if in_brackets is not None:
        address = _address(in_brackets)
        if not isinstance(address, IPv6Address):
            return None
        name = str(address)
    return Authority(name.lower().removesuffix("."), int(port) if port else None)


def host_name(text: str) -> str | None:
    """Return the name of a host in the form of `Authority.name`, or None if the text has a port or isn't a host."""
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"
    authority = parse_authority(text)
    if authority is None or authority.port is not None or text.endswith(":"):
        return None
    return authority.name


def is_address(name: str) -> bool:
    """Return whether the name is an IP address, which needs no resolution."""
    return _address(name) is not None


def is_network(text: str) -> bool:
    """Return whether the text is an IP address, or a network of them such as 10.0.0.0/8."""
    try:
        ip_network(text)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Return whether the name always means this machine: localhost, a subdomain of it, or a loopback address."""
    address = _address(name)
    if address is None:
        return name == "localhost" or name.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def is_same_origin(origin: str, scheme: str, host: Authority) -> bool:
    """Return whether a page of this origin came from the server named by a request's `scheme` and `host`.

    Behind a proxy that terminates TLS, the server sees HTTP although the page has HTTPS, so that difference is allowed.
    """
    match = _WEB_ORIGIN.fullmatch(origin)
    page = parse_authority(match[2]) if match else None
    if match is None or page is None or (scheme == "https" and match[1] != "https"):
        return False
    default = _DEFAULT_PORTS[match[1]]
    return (page.name, page.port or default) == (host.name, host.port or default)


@lru_cache(maxsize=256)  # Requests use the same few hosts.
def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
