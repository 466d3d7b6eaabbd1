"""Tests the names of hosts, as headers and settings have them."""

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.hosts import Authority, host_name, is_address, is_same_origin, parse_authority


@given(st.text())
def test_any_text_is_an_authority_or_none(text: str) -> None:
    authority = parse_authority(text)
    assert authority is None or authority.name == authority.name.lower()
    assert not is_same_origin(text, "http", Authority("localhost", 8000))


@given(st.ip_addresses(), st.none() | st.integers(0, 65535))
def test_an_address_is_the_same_in_every_spelling(address: IPv4Address | IPv6Address, port: int | None) -> None:
    spellings = [str(address)]
    if isinstance(address, IPv6Address):
        spellings = [f"[{address}]", f"[{address.exploded}]", f"[{address.exploded.upper()}]"]
    for spelling in spellings:
        assert parse_authority(spelling if port is None else f"{spelling}:{port}") == Authority(str(address), port)
        assert host_name(spelling) == host_name(str(address)) == str(address)
    assert is_address(str(address))


@pytest.mark.parametrize("text", ["a:80", "a:", "[::1]:80", "[::1]:", "http://a", "a/b", "", "*.a", "a b"])
def test_a_name_in_the_settings_has_no_port(text: str) -> None:
    assert host_name(text) is None


def test_a_page_that_came_over_http_is_not_from_a_server_that_speaks_https() -> None:
    host = Authority("llm.example.com", None)
    assert is_same_origin("https://llm.example.com", "https", host)
    assert not is_same_origin("http://llm.example.com", "https", host)
