"""Explains why an address cannot be reached, if a proxy may be the reason. Stdlib only."""

from __future__ import annotations

import os
import socket
import urllib.request
from typing import NamedTuple
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 2.0
_DEFAULT_PORTS = {"http": 80, "https": 443, "socks4": 1080, "socks5": 1080, "socks5h": 1080}


class Proxy(NamedTuple):
    """The proxy for an address, as set in the environment."""

    variable: str
    shown: str  # the proxy's address without a password
    host: str
    port: int

    def trouble(self) -> str | None:
        """Return why no connection to the proxy can be opened, or None if one can."""
        try:
            socket.create_connection((self.host, self.port), TIMEOUT_SECONDS).close()
        except TimeoutError:
            return f"no answer in {TIMEOUT_SECONDS:g} s"
        except (OSError, UnicodeError) as error:
            return getattr(error, "strerror", None) or str(error)
        return None


def proxy_for(url: str) -> Proxy | None:
    """Return the proxy that requests to this address go through, or None if they go directly."""
    parts = urlsplit(url)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    for name in (f"{parts.scheme}_proxy", "all_proxy"):
        # Python prefers the variable in lower case.
        variable = next((each for each in (name, name.upper()) if os.environ.get(each)), None)
        if variable is not None:
            return _proxy(variable, os.environ[variable])
    return None


def _proxy(variable: str, address: str) -> Proxy:
    address = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(address)
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 80)
    except ValueError:  # an invalid port
        return Proxy(variable, "its value", "", 0)
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    return Proxy(variable, f"{parts.scheme}://{shown}:{port}", host, port)


def advice_on_proxy(url: str) -> str:
    """Return advice about the proxy of an address that does not answer: a sentence without its full stop."""
    proxy = proxy_for(url)
    if proxy is None:
        return "Behind a proxy, set HTTPS_PROXY"
    trouble = proxy.trouble()
    if trouble is None:
        return f"Requests to it go through {proxy.shown}, the proxy that {proxy.variable} names"
    return (
        f"The proxy that {proxy.variable} names, {proxy.shown}, does not answer ({trouble}): correct {proxy.variable}, "
        "or unset it"
    )
