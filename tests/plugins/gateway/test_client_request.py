"""The form in which replicas get a client's request."""

import asyncio

import pytest

from oaiserve.http.shared_limit import SharedLimit
from oaiserve.plugins.gateway.client_request import client_request_of
from oaiserve.plugins.gateway.sent_pieces import SentPieces
from oaiserve.runtime import THREADS
from oaiserve.wire.routing_decision import FORWARDED_HEADER


def headers_for(path: str, *headers: tuple[bytes, bytes]) -> dict[str, str]:
    state = {"request_id": "r", "unique_id": "u", "trace": None, "client": "127.0.0.1"}
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "scheme": "http", "state": state}
    sent = SentPieces(SharedLimit(1), "127.0.0.1")
    made = client_request_of({**scope, "headers": [*headers]}, bytearray(), sent, 0, THREADS, has_ids=False)
    return {name.decode(): value.decode() for name, value in asyncio.run(made).headers}


@pytest.mark.parametrize("name", [b"forwarded", b"x-forwarded-for", b"x-real-ip"])
def test_a_replica_learns_that_a_proxy_asks_for_what_only_its_owner_may_see(name: bytes) -> None:
    inside = headers_for("/debug/requests/r/tokens", (name, b"192.0.2.1"))
    assert inside[FORWARDED_HEADER] == "1"
    assert inside["x-forwarded-for"] == "127.0.0.1"
    assert FORWARDED_HEADER not in headers_for("/debug/requests/r/tokens")
    assert FORWARDED_HEADER not in headers_for("/v1/models", (name, b"192.0.2.1"))
    assert FORWARDED_HEADER not in headers_for("/debug/requests/r/tokens", (FORWARDED_HEADER.encode(), b"0"))
