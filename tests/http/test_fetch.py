"""Files are fetched from allowed hosts alone, at addresses that were checked, and within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock

import httpcore2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.errors import NotFetched
from oaiserve.http.fetch import Fetcher

PUBLIC = "93.184.215.14"
PNG = b"content-type: image/png\r\n"


class Stream(httpcore2.AsyncNetworkStream):
    """A connection that answers each request with the next of some bytes, and then with nothing for ever."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked = b""
        self._answer: bytes | None = None
        self._is_closed = False

    async def write(self, buffer: bytes, *_: Any, **__: Any) -> None:
        self._asked += buffer

    async def read(self, max_bytes: int, *_: Any, **__: Any) -> bytes:
        if self._answer is None:
            self._world.requests.append(self._asked.decode())
            if not self._world.answers:
                await asyncio.Event().wait()
            self._answer = self._world.answers.pop(0)
        part = self._answer[:max_bytes]
        self._answer = self._answer[max_bytes:]
        return part

    async def aclose(self) -> None:
        self._world.num_closed += not self._is_closed
        self._is_closed = True

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, **_: Any
    ) -> httpcore2.AsyncNetworkStream:
        assert ssl_context.check_hostname
        self._world.names.append(server_hostname)
        return self


class World(httpcore2.AsyncNetworkBackend):
    """A network in which each name has the addresses of its next look-up, and all servers give the same answers."""

    def __init__(self, *answers: bytes, **addresses: Sequence[str]) -> None:
        self.answers = list(answers)
        self.addresses = {name.replace("_", "."): list(found) for name, found in addresses.items()}
        self.looked_up: list[str] = []
        self.reached: list[tuple[str, int]] = []
        self.requests: list[str] = []
        self.names: list[str | None] = []
        self.down: set[str] = set()
        self.num_closed = 0

    async def look_up(self, host: str, port: int) -> Sequence[str]:
        self.looked_up.append(host)
        if host in self.addresses:
            found = self.addresses[host]
            return [found.pop(0)] if len(found) > 1 and host == "rebinds.test" else found
        return [host] if host[0].isdigit() or ":" in host else [PUBLIC]

    async def connect_tcp(self, host: str, port: int, *_: Any, **__: Any) -> httpcore2.AsyncNetworkStream:
        self.reached.append((host, port))
        if host in self.down:
            raise httpcore2.ConnectError
        return Stream(self)

    def fetch(self, url: str, *allowed: str, most: int = 100, kind: str = "image", seconds: float = 60) -> bytes:
        fetcher = Fetcher(allowed or ("a.test",), look_up=self.look_up, network=self, seconds=seconds)
        self.taken: list[int] = []
        return asyncio.run(fetcher.fetch(url, kind, most, self.taken.append))

    def refusal(self, url: str, *allowed: str, **more: Any) -> str:
        with pytest.raises(NotFetched) as caught:
            self.fetch(url, *allowed, **more)
        return str(caught.value)


def answer(content: bytes = b"PNG", headers: bytes = PNG, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(content), content)


def redirect(to: str, status: bytes = b"302 Found") -> bytes:
    return answer(b"", b"location: %b\r\nset-cookie: a=b\r\n" % to.encode(), status)


def test_a_file_comes_from_the_very_address_that_was_checked_and_tls_checks_the_name() -> None:
    world = World(answer(), a_test=[PUBLIC])
    assert world.fetch("HTTPS://A.test/x%20y?q=1#part") == b"PNG"
    assert (world.looked_up, world.reached, world.names) == (["a.test"], [(PUBLIC, 443)], ["a.test"])
    assert world.taken == [3]
    assert world.num_closed == 1
    head, *lines = world.requests[0].strip().lower().split("\r\n")
    assert head == "get /x%20y?q=1 http/1.1"
    assert sorted(lines) == ["accept-encoding: identity", "accept: image/*", "host: a.test", "user-agent: oaiserve"]


@pytest.mark.parametrize(
    ("allowed", "url", "is_allowed"),
    [
        ("a.test", "http://a.test", True),
        ("A.Test", "http://a.test./x", True),
        ("a.test", "http://b.a.test/", False),
        ("a.test", "http://a.test:8080/", False),
        ("a.test:8080", "http://a.test:8080/", True),
        ("a.test:8080", "http://a.test/", False),
        ("*.a.test", "http://b.a.test/", True),
        ("*.a.test", "http://c.b.a.test/", True),
        ("*.a.test", "http://a.test/", False),
        ("*.a.test", "http://ba.test/", False),
        ("a.test", "http://a.test@b.test/", False),
        ("a.test", "http://b.test\\@a.test/", False),
        ("a.test", "http://b.test#@a.test/", False),
        ("a.test", "http://b.test?@a.test/", False),
        ("a.test", "http://a.test\\.b.test/", False),
        ("a.test", "http://a.test /", False),
        ("a.test", "//a.test/", False),
        ("a.test", "ftp://a.test/", False),
        ("a.test", "file:///a.test", False),
        ("a.test", "gopher://a.test:80/", False),
        ("a.test", "http://a.test/" + 5000 * "x", False),
        ("a.test", "http\u017f://a.test/", False),  # equals https if case is ignored
        ("*.a.test", "http://\u212a.a.test/", False),
        ("*.a.test", "http://.a.test/", False),
        ("*.a.test", "http://b..a.test/", False),
        ("*.a.test", f"http://{64 * 'b'}.a.test/", False),
        ("*.a.test", f"http://{63 * 'b'}.a.test/", True),
        ("a.test", "http://a.test../", False),
        ("a.test", "http://a.test:/", True),
        ("a.test", "http://a.test:0/", False),
        ("a.test", "http://a.test:99999/", False),
        ("a.test", "http://a.test:abc/", False),
        ("a.test", "http://[fe80::1%25eth0]/", False),
        ("a.test", "http://a.test/\ud800?\u3042", True),
    ],
)
def test_only_urls_of_allowed_hosts_and_ports_are_looked_up(allowed: str, url: str, is_allowed: bool) -> None:
    world = World(answer())
    if is_allowed:
        assert world.fetch(url, allowed) == b"PNG"
    else:
        assert world.refusal(url, allowed).startswith(("it is no URL of", "--allow-media-from does not name its host"))
        assert world.looked_up == []


PRIVATE = [
    *("127.0.0.1", "127.1.2.3", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
    *("224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0"),
    *("fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::10.0.0.1", "not.one"),
    *("::ffff:7f00:1", "::ffff:0:127.0.0.1", "::127.0.0.1", "0:0:0:0:0:ffff:7f00:0001"),
    *("64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:a9fe:a9fe::", "2001:0:a9fe:a9fe::1", "2001:db8::1", "fec0::1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_reached_though_the_name_is_allowed(address: str) -> None:
    for found in ([address], [PUBLIC, address]):
        world = World(answer(), a_test=found)
        assert "or a private one" in world.refusal("http://a.test/")
        assert world.reached == []


def test_a_private_address_is_reached_if_it_is_named_itself() -> None:
    assert World(answer(), a_test=["10.0.0.5"]).fetch("http://a.test/", "a.test", "10.0.0.5") == b"PNG"
    assert World(answer()).fetch("http://10.0.0.5/", "10.0.0.5") == b"PNG"
    assert World(answer()).fetch("http://[FD00:0::5]/", "[fd00::5]") == b"PNG"
    assert World(answer(), localhost=["127.0.0.1"]).fetch("http://localhost:99/", "localhost:99") == b"PNG"
    assert "private one" in World(answer(), a_test=["10.0.0.6"]).refusal("http://a.test/", "a.test", "10.0.0.5")


def test_a_name_is_looked_up_once_so_a_second_answer_changes_nothing() -> None:
    world = World(answer(), rebinds_test=[PUBLIC, "127.0.0.1"])
    assert world.fetch("http://rebinds.test/", "rebinds.test") == b"PNG"
    assert (world.looked_up, world.reached) == (["rebinds.test"], [(PUBLIC, 80)])


def test_a_name_is_looked_up_again_and_checked_again_for_each_redirect() -> None:
    world = World(redirect("/next"), answer(), rebinds_test=[PUBLIC, "127.0.0.1"])
    assert "private one" in world.refusal("http://rebinds.test/", "rebinds.test")
    assert (world.looked_up, world.reached) == (["rebinds.test"] * 2, [(PUBLIC, 80)])


def test_an_ipv4_address_within_an_ipv6_address_is_checked_as_the_former() -> None:
    mapped = f"::ffff:{PUBLIC}"
    assert World(answer(), a_test=[mapped]).fetch("http://a.test/") == b"PNG"
    assert World(answer(), a_test=["::ffff:10.0.0.5"]).fetch("http://a.test/", "a.test", "10.0.0.5") == b"PNG"
    for url in ("http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/", "http://[::127.0.0.1]/"):
        world = World(answer())
        assert "does not name its host" in world.refusal(url, "a.test", "127.0.0.1")
        assert "does not name its host" in World(redirect(url)).refusal("http://a.test/", "a.test", "127.0.0.1")
        assert world.reached == []


def test_of_several_addresses_the_next_is_tried_where_one_is_down() -> None:
    world = World(answer(), a_test=["2606:2800::1", PUBLIC])
    world.down = {"2606:2800::1"}
    assert world.fetch("http://a.test/") == b"PNG"
    world.down = {"2606:2800::1", PUBLIC}
    assert world.refusal("http://a.test/") == "its host cannot be reached, or speaks no HTTP (ConnectError)"


def test_redirects_are_followed_three_times_and_each_is_checked_like_a_url() -> None:
    world = World(redirect("/b"), redirect("//a.test/c", b"307 T"), redirect("https://a.test/d", b"308 P"), answer())
    assert world.fetch("http://a.test/a") == b"PNG"
    assert [text.split()[1] for text in world.requests] == ["/a", "/b", "/c", "/d"]
    assert not any("cookie" in text.lower() for text in world.requests)
    assert "more than 3 times" in World(*[redirect("/")] * 4, answer()).refusal("http://a.test/")
    assert "does not name its host, b.test:80" in World(redirect("http://b.test/")).refusal("http://a.test/")
    world = World(redirect("http://b.a.test/"), a_test=[PUBLIC], b_a_test=["169.254.169.254"])
    assert "private one" in world.refusal("http://a.test/", "a.test", "*.a.test")
    assert world.reached == [(PUBLIC, 80)]
    assert "no URL of" in World(redirect("file:///etc/passwd")).refusal("http://a.test/")


@pytest.mark.parametrize(
    ("location", "target"),
    [
        ("?q", "/x/y?q"),
        ("z", "/x/z"),
        ("../../z", "/z"),
        ("#part", "/x/y"),
        ("/a b\tc", "/a%20b%09c"),
        ("/\u00e4", "/%C3%A4"),  # the bytes as they came
        ("//a.test\\@b.test/", None),
        ("http://a@a.test/", None),
        ("http://[", None),
        ("http://[v1.x]/", None),
        ("http://a.test:abc/", None),
        ("\\\\b.test/", None),
    ],
)
def test_a_redirect_leads_to_a_checked_url_or_is_refused(location: str, target: str | None) -> None:
    world = World(redirect(location), answer())
    if target is None:
        assert "no URL" in world.refusal("http://a.test/x/y")
    else:
        assert world.fetch("http://a.test/x/y") == b"PNG"
        assert world.requests[1].split()[1] == target


def test_a_redirect_without_a_location_is_not_followed() -> None:
    world = World(answer(b"", b"", b"302 Found"), answer())
    assert world.refusal("http://a.test/") == "it is redirected without a 'location'"


_AUTHORITIES = st.sampled_from(
    [
        *(
            "a.test",
            "b.a.test",
            ".a.test",
            "a.test.",
            "a.test:0",
            "a.test:99999",
            "a.test:x",
            "u:p@a.test",
            "[",
            "[::1",
        ),
        *(
            "[::1]",
            "[fe80::1%25eth0]",
            "xn--a.a.test",
            "xn--",
            "127.1",
            "0x7f.1",
            "a\u3002test",
            "\uff41.test",
            "%61.test",
        ),
    ]
)
_URLS = st.text() | st.builds(
    "{}{}{}{}{}".format,
    st.sampled_from(["http", "https", "HTTP", "http\u017f", "ftp", "", "data", "javascript"]),
    st.sampled_from(["://", ":", "//", ":/", ":\\\\", "\t://"]),
    st.text(max_size=3) | _AUTHORITIES | st.builds("{}.a.test".format, st.text(max_size=70)),
    _AUTHORITIES,
    st.text(st.characters(), max_size=9) | st.sampled_from(["", "/", "/x?y#z", "\\x", "/\t", "?", "#", ":80"]),
)
_LOCATIONS = _URLS | st.binary(max_size=40).map(lambda some: some.decode("latin-1"))


@given(_URLS | st.just("http://a.test/"), st.lists(_LOCATIONS, max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_url_and_any_redirects_are_fetched_or_refused(url: str, locations: list[str]) -> None:
    heads = [re.sub("[\0\r\n]", "", each).encode(errors="replace") for each in locations]
    world = World(*(answer(b"", b"location: %b\r\n" % head, b"302 Found") for head in heads), answer())
    with contextlib.suppress(NotFetched):
        assert world.fetch(url, "a.test", "*.a.test") == b"PNG"
    assert all(host == PUBLIC for host, _ in world.reached)
    assert all(name.endswith("a.test") for name in world.looked_up)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (answer(bytes(101)), "it has more than 100 bytes"),
        (b"HTTP/1.1 200 OK\r\n" + PNG + b"\r\n" + bytes(101), "it has more than 100 bytes"),
        (b"HTTP/1.1 200 OK\r\n" + PNG + b"content-length: 1\r\n\r\n" + bytes(9), None),
        (answer(headers=b"content-type: text/html\r\n"), "its content type must be image/*, got 'text/html'"),
        (answer(headers=b""), "its content type must be image/*, got ''"),
        (answer(headers=b"content-type: audio/wav\r\n"), "its content type must be image/*, got 'audio/wav'"),
        (answer(headers=PNG + b"content-encoding: gzip\r\n"), "its host compresses it, although it was asked not to"),
        (answer(status=b"404 Not Found"), "its host answers with the status 404"),
        (answer(status=b"304 Not Modified"), "its host answers with the status 304"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "its host cannot be reached, or speaks no HTTP (RemoteProtocolError)"),
        (b"HTTP/1.1 200 OK\r\n" + PNG + b"content-length: 9\r\n\r\nab", "speaks no HTTP (RemoteProtocolError)"),
    ],
)
def test_what_is_too_large_or_of_another_type_is_refused(given: bytes, reason: str | None) -> None:
    if reason is None:
        assert World(given).fetch("http://a.test/") == b"\0"
    else:
        assert reason in World(given).refusal("http://a.test/")


CHUNKED = b"HTTP/1.1 200 OK\r\n" + PNG + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "given",
    [b"HTTP/1.1 103 Early\r\n\r\n" * 10_000, CHUNKED + b"1\r\nx\r\n" * 30_000],
    ids=["informational answers", "tiny chunks"],
)
def test_a_host_that_sends_much_besides_the_file_is_given_up(given: bytes) -> None:
    assert len(given) > 150_000
    world = World(given)
    reason = "its host sends more than 131072 bytes that are not part of it"
    assert world.refusal("http://a.test/", most=10**6) == reason
    assert world.num_closed == 1


def test_a_file_may_have_some_informational_answers_before_it_and_come_in_chunks() -> None:
    parts = b"1000\r\n" + bytes(4096) + b"\r\n"
    world = World(b"HTTP/1.1 103 Early\r\n\r\n" * 3 + CHUNKED + parts * 50 + b"0\r\n\r\n")
    assert world.fetch("http://a.test/", most=10**6) == bytes(50 * 4096)


def test_sounds_and_files_of_any_type_are_fetched_up_to_the_limit() -> None:
    assert World(answer(bytes(100))).fetch("http://a.test/") == bytes(100)
    assert World(answer(headers=b"content-type: Audio/WAV; x\r\n")).fetch("http://a.test/", kind="audio") == b"PNG"
    assert World(answer(headers=b"content-type: application/octet-stream\r\n")).fetch("http://a.test/") == b"PNG"


def test_a_file_that_does_not_come_is_given_up() -> None:
    world = World()
    assert world.refusal("http://a.test/", seconds=0.01) == "it did not come within 0.01 seconds"
    assert world.num_closed == len(world.reached)


def test_a_name_that_is_not_found_is_an_error_for_the_client() -> None:
    world = World()
    world.look_up = AsyncMock(side_effect=OSError("no such name"))
    assert "its host cannot be reached" in world.refusal("http://a.test/")
