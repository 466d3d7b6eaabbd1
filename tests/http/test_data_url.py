"""Data URLs and base64 are read as the Fetch standard says, and somewhat more leniently, in bounded time and memory."""

import re
import tracemalloc
from base64 import b64encode, urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.http import data_url
from oaiserve.http.data_url import base64_decoded, is_bare_image, percent_decoded, read_data_url


def read(url: str) -> bytes:
    result = read_data_url(url)
    assert result is not None
    return b"".join((base64_decoded if result.is_base64 else percent_decoded)(result.data))


@pytest.mark.parametrize(
    ("url", "kind", "content"),
    [
        ("data:image/png;base64,aGVsbG8=", "image/png", b"hello"),
        ("data:image/png;base64,aGVsbG8", "image/png", b"hello"),
        ("data:image/png;base64,aGVs\r\nbG8=\n", "image/png", b"hello"),
        ("data:image/png;base64, aGVs bG8 =", "image/png", b"hello"),
        ("data:image/png;base64,aGVsbG8%3D%0A", "image/png", b"hello"),
        ("data:image/png;base64,%2b%2F-_", "image/png", b"\xfb\xff\xbf"),
        ("data:;base64,aGVsbG8=", "", b"hello"),
        ("DATA:IMAGE/PNG;BASE64,aGVsbG8=", "image/png", b"hello"),
        ("data:image/png;charset=utf-8;base64,aGVsbG8=", "image/png", b"hello"),
        ("data:image/svg+xml; charset=utf-8; base64 ,aGVsbG8=", "image/svg+xml", b"hello"),
        ("data:application/octet-stream;base64,aGVsbG8=", "application/octet-stream", b"hello"),
        (" \ndata:image/png;\nbase64,aGVsbG8=", "image/png", b"hello"),
        ("data:image/png;base64,aGVsbG8=#fragment", "image/png", b"hello"),
        ("data:image/png;base64,", "image/png", b""),
        ("data:image/png,%89PNG%0d%0A%zz%", "image/png", b"\x89PNG\r\n%zz%"),
        ("data:image/png;base64=1,a,b", "image/png", b"a,b"),
        ("data:,a%20b", "", b"a b"),
        ("data:base64,YQ", "base64", b"YQ"),
    ],
)
def test_a_data_url_is_read_as_browsers_do(url: str, kind: str, content: bytes) -> None:
    result = read_data_url(url)
    assert result is not None
    assert (result.type, read(url)) == (kind, content)


@pytest.mark.parametrize("text", ["", "data:", "data:image/png;base64", "https://a.test/data:,x", "data:" + "x" * 2000])
def test_what_is_no_data_url_is_none(text: str) -> None:
    assert read_data_url(text) is None


@pytest.mark.parametrize("text", ["a", "ab=c", "=", "====", "aGVsbG8=aGVs", "b\u00e4", "aGVsb!G8", "aGV%zz"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        b"".join(base64_decoded(text))


@pytest.fixture(params=[1, 2, 3, 7, 2**18])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_url, "PIECE_BYTES", request.param)


@pytest.mark.usefixtures("pieces")
def test_pieces_of_any_length_give_the_same_bytes() -> None:
    @given(st.binary(max_size=40), st.sampled_from(["", "\n", "%0A", " "]), st.booleans(), st.booleans())
    def check(content: bytes, between: str, is_padded: bool, is_for_urls: bool) -> None:
        text = (urlsafe_b64encode if is_for_urls else b64encode)(content).decode()
        text = text if is_padded else text.rstrip("=")
        text = re.sub("(.....)", rf"\1{between}", text)
        assert b"".join(base64_decoded(text)) == content
        escaped = "".join(f"%{byte:02X}" for byte in content)
        assert b"".join(percent_decoded(escaped)) == content

    check()


def test_a_long_text_takes_little_more_memory_than_a_piece() -> None:
    text = "%41" * 2**19
    tracemalloc.start()
    assert sum(map(len, base64_decoded(text))) == 3 * 2**19 // 4
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 48 * data_url.PIECE_BYTES


def test_the_base64_of_an_image_is_known_by_its_start() -> None:
    starts = (
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"GIF89a",
        b"RIFF\0\0\0\0WEBP",
        b"II*\0\0",
        b"MM\0*\0",
        b"BM\0\0",
    )
    assert all(is_bare_image(b64encode(start + b"rest").decode()) for start in starts)
    assert not any(map(is_bare_image, ("/etc/passwd", "https://a.test/", "iVBORw0", "", "QkX", "data:image/png,x")))
