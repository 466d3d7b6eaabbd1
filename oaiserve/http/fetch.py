"""Fetches images and sounds that requests name by URL, from hosts that the operator allows.

Clients must not use the server to reach hosts that they could not reach themselves. So a URL is parsed only once, a
name is looked up once, the connection goes to the address that was checked (TLS still checks the name), and each
redirect is checked like the first URL. The server sends no cookies and none of the client's headers.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import cache, partial
from ipaddress import ip_address, ip_network
from socket import SOCK_STREAM, getaddrinfo
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin

import httpcore2

from oaiserve.errors import NotFetched
from oaiserve.hosts import Authority, parse_authority

MOST_SECONDS = 10.0  # time limit for one file, including redirects
MOST_REDIRECTS = 3
MOST_URL_CHARACTERS = 4096
MOST_OVERHEAD_BYTES = 128 * 2**10  # bytes that a host may send besides the file: headers, 1xx answers, chunk sizes
READ_BYTES = 2**13  # maximum bytes of one read; parsing it blocks the event loop
# The IPv6 addresses of the internet, and those among them that contain an IPv4 address.
_IPV6 = ip_network("2000::/3")
_HIDING_IPV4 = (ip_network("2001::/32"), ip_network("2002::/16"))
_URL = re.compile(r"([Hh][Tt]{2}[Pp][Ss]?)://([A-Za-z0-9._:\[\]-]+)(?:([/?][^\s\\#]*))?(?:#\S*)?")
_LABEL = re.compile(r"[^.]{1,63}")  # the only labels that a resolver accepts
_ASCII = "".join(map(chr, range(0x21, 0x7F)))
_PORTS = {"http": 80, "https": 443}
_ANY_DATA = ("application/octet-stream", "binary/octet-stream")  # Object stores send these.

# The event loop's own threads are not used, because a resolver may hang for longer than a request waits.
_LOOK_UPS = ThreadPoolExecutor(16, "look-up")

LookUp = Callable[[str, int], Awaitable[Sequence[str]]]


class _Url(NamedTuple):
    scheme: str
    host: str  # lower-case name, or an address in its shortest form
    port: int
    target: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.target}"


class Fetcher:
    """Fetches files from allowed hosts."""

    def __init__(
        self,
        allowed: Iterable[str],
        *,
        look_up: LookUp | None = None,
        network: httpcore2.AsyncNetworkBackend | None = None,
        seconds: float = MOST_SECONDS,
    ) -> None:
        """`allowed` is as in --allow-media-from. The other arguments are for tests."""
        parsed = [(name.startswith("*."), parse_authority(name.removeprefix("*."))) for name in allowed]
        self._allowed = [(is_any, host) for is_any, host in parsed if host is not None]
        self._named = {host.name for _, host in self._allowed}
        self.look_up = look_up or _look_up
        self.network = network or httpcore2.AnyIOBackend()
        self._seconds = seconds

    async def fetch(self, url: str, kind: str, max_bytes: int, take: Callable[[int], None]) -> bytes:
        """Return the file of this kind ('image' or 'audio') at a URL. `take` is called with the number of bytes as they
        arrive, and may raise. Raises NotFetched."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._fetched(url, kind, max_bytes, take)
        except TimeoutError:
            raise NotFetched(f"it did not come within {self._seconds:g} seconds") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
            cause = error.args[0] if error.args else None  # httpcore2 wraps TLS errors.
            if isinstance(cause, ssl.SSLCertVerificationError):
                reason = cause.verify_message.rstrip(".")
                raise NotFetched(f"the certificate of its host is not accepted: {reason}") from error
            raise NotFetched(f"its host cannot be reached, or speaks no HTTP ({type(error).__name__})") from error

    async def _fetched(self, text: str, kind: str, max_bytes: int, take: Callable[[int], None]) -> bytes:
        tls = await asyncio.to_thread(tls_context)  # The first call reads a file.
        for _ in range(1 + MOST_REDIRECTS):
            url = self.checked(text)
            headers: dict[bytes | str, bytes | str] = {
                "accept": f"{kind}/*",
                "accept-encoding": "identity",
                "user-agent": "oaiserve",
            }
            traffic = _Traffic()
            own = httpcore2.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
            async with (
                AsyncExitStack() as streams,
                httpcore2.AsyncConnectionPool(tls, network_backend=_CheckedNetwork(self, streams, traffic)) as pool,
                pool.stream("GET", own, headers=headers) as response,
            ):
                found = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
                if response.status not in (301, 302, 303, 307, 308):

                    def count_and_take(num_bytes: int, traffic: _Traffic = traffic) -> None:
                        traffic.num_content_bytes += num_bytes
                        take(num_bytes)

                    return await _content(response, found, kind, max_bytes, count_and_take)
            text = _redirect(str(url), found.get("location", ""))
        raise NotFetched(f"it is redirected more than {MOST_REDIRECTS} times")

    def checked(self, text: str) -> _Url:
        """Parse a URL, and check that its host is allowed. Raises NotFetched."""
        match = _URL.fullmatch(text) if len(text) <= MOST_URL_CHARACTERS else None
        host = parse_authority(match[2]) if match is not None else None
        if match is None or host is None or host.port == 0 or not all(map(_LABEL.fullmatch, host.name.split("."))):
            raise NotFetched("it is no URL of the form http[s]://HOST[:PORT][/PATH]")
        scheme = match[1].lower()
        target = match[3] or "/"
        target = quote(target if target.startswith("/") else f"/{target}", safe=_ASCII, errors="replace")
        url = _Url(scheme, host.name, host.port or _PORTS[scheme], target)
        if not any(_is_allowed(url, is_any, allowed) for is_any, allowed in self._allowed):
            raise NotFetched(f"--allow-media-from does not name its host, {url.host}:{url.port}")
        return url

    def may_reach(self, address: str) -> bool:
        """Return whether an address is on the internet, or is allowed itself."""
        try:
            ip = ip_address(address)
        except ValueError:  # It has a zone, so it is in the local network.
            return False
        if ip.version == 6 and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        if str(ip) in self._named or (ip.is_loopback and "localhost" in self._named):
            return True
        is_hidden = ip.version == 6 and (ip not in _IPV6 or any(ip in network for network in _HIDING_IPV4))
        return ip.is_global and not ip.is_multicast and not ip.is_reserved and not is_hidden


def _redirect(url: str, location: str) -> str:
    """Return the URL to which a host redirects, unchecked. In `location`, bytes outside ASCII are Latin-1. Raises
    NotFetched."""
    if not location:
        raise NotFetched("it is redirected without a 'location'")
    try:
        return urljoin(url, quote(location, safe=_ASCII, encoding="latin-1"))
    except ValueError:
        raise NotFetched(f"it is redirected to what is no URL: {location[:60]!r}") from None


def _is_allowed(url: _Url, is_any: bool, allowed: Authority) -> bool:
    is_port = url.port == (allowed.port or _PORTS[url.scheme])
    return is_port and (url.host.endswith(f".{allowed.name}") if is_any else url.host == allowed.name)


class _Traffic:
    """The bytes that a host has sent: content of the file, and overhead."""

    def __init__(self) -> None:
        self.num_content_bytes = 0
        self._num_bytes = 0

    def count(self, num_bytes: int) -> None:
        """Count the bytes that were read. Raises NotFetched if most of them aren't content, since parsing takes CPU
        time."""
        self._num_bytes += num_bytes
        if self._num_bytes - self.num_content_bytes > MOST_OVERHEAD_BYTES + READ_BYTES:
            raise NotFetched(f"its host sends more than {MOST_OVERHEAD_BYTES} bytes that are not part of it")


class _CountedStream(httpcore2.AsyncNetworkStream):
    """A connection that counts the bytes read from it. Under TLS, decrypted bytes are counted."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, traffic: _Traffic) -> None:
        self._stream = stream
        self._traffic = traffic

    async def read(self, max_bytes: int, *more: Any, **keywords: Any) -> bytes:
        read = await self._stream.read(min(max_bytes, READ_BYTES), *more, **keywords)
        self._traffic.count(len(read))
        return read

    async def write(self, *arguments: Any, **keywords: Any) -> None:
        await self._stream.write(*arguments, **keywords)

    async def aclose(self) -> None:
        await self._stream.aclose()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    async def start_tls(self, *arguments: Any, **keywords: Any) -> httpcore2.AsyncNetworkStream:
        return _CountedStream(await self._stream.start_tls(*arguments, **keywords), self._traffic)


class _CheckedNetwork(httpcore2.AsyncNetworkBackend):
    """Looks up each name once, and connects only if all of its addresses are allowed.

    Its connections are closed with `streams`, since httpcore2 leaves a connection open if its TLS handshake is
    cancelled.
    """

    def __init__(self, fetcher: Fetcher, streams: AsyncExitStack, traffic: _Traffic) -> None:
        self._fetcher = fetcher
        self._streams = streams
        self._traffic = traffic

    async def connect_tcp(self, host: str, port: int, *more: Any, **keywords: Any) -> httpcore2.AsyncNetworkStream:
        addresses = await self._fetcher.look_up(host, port)
        if not addresses or not all(map(self._fetcher.may_reach, addresses)):
            raise NotFetched(
                f"its host, {host}, has no address, or a private one that --allow-media-from does not name"
            )
        for address in addresses[:-1]:
            with suppress(httpcore2.ConnectError):
                return await self._connected(address, port, *more, **keywords)
        return await self._connected(addresses[-1], port, *more, **keywords)

    async def _connected(self, address: str, *more: Any, **keywords: Any) -> httpcore2.AsyncNetworkStream:
        stream = await self._fetcher.network.connect_tcp(address, *more, **keywords)
        self._streams.push_async_callback(stream.aclose)
        return _CountedStream(stream, self._traffic)


async def _look_up(host: str, port: int) -> list[str]:
    look_up = partial(getaddrinfo, host, port, type=SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_LOOK_UPS, look_up)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


@cache
def tls_context() -> ssl.SSLContext:
    """Return a context that trusts the same certificates as huggingface_hub: those in SSL_CERT_FILE, or else the
    system's."""
    return httpcore2.default_ssl_context()


async def _content(
    response: httpcore2.Response, headers: dict[str, str], kind: str, max_bytes: int, take: Callable[[int], None]
) -> bytes:
    if response.status != 200:
        raise NotFetched(f"its host answers with the status {response.status}")
    found = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not found.startswith(f"{kind}/") and found not in _ANY_DATA:
        raise NotFetched(f"its content type must be {kind}/*, got {found[:60]!r}")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise NotFetched("its host compresses it, although it was asked not to")
    too_large = NotFetched(f"it has more than {max_bytes} bytes")
    length = headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 15 or int(length) > max_bytes):
        raise too_large
    content = bytearray()
    async for part in response.aiter_stream():
        if len(content) + len(part) > max_bytes:
            raise too_large
        take(len(part))
        content += part
    return bytes(content)
