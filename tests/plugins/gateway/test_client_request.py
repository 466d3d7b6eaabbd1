"""The form in which replicas get a client's request."""

import asyncio

import pytest

from oaiserve.http.shared_limit import SharedLimit
from oaiserve.plugins.gateway.client_request import ClientRequest, client_request_of
from oaiserve.plugins.gateway.sent_pieces import SentPieces
from oaiserve.runtime import THREADS
from oaiserve.wire.routing_decision import FORWARDED_HEADER


def request_for(path: str, *headers: tuple[bytes, bytes], body: bytes = b"") -> ClientRequest:
    state = {"request_id": "r", "unique_id": "u", "trace": None, "client": "127.0.0.1"}
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "scheme": "http", "state": state}
    sent = SentPieces(SharedLimit(1), "127.0.0.1")
    made = client_request_of({**scope, "headers": [*headers]}, bytearray(body), sent, 0, THREADS, has_ids=False)
    return asyncio.run(made)


def headers_for(path: str, *headers: tuple[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in request_for(path, *headers).headers}


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b--\r\n', "whisper"),
        (b"--b\r\nbroken", ""),
    ],
)
def test_a_form_of_speech_names_its_model(body: bytes, model: str) -> None:
    made = request_for("/v1/audio/transcriptions", (b"content-type", b"multipart/form-data; boundary=b"), body=body)
    assert made.prompt.model == model


@pytest.mark.parametrize("name", [b"forwarded", b"x-forwarded-for", b"x-real-ip"])
def test_a_replica_learns_that_a_proxy_asks_for_what_only_its_owner_may_see(name: bytes) -> None:
    inside = headers_for("/debug/requests/r/tokens", (name, b"192.0.2.1"))
    assert inside[FORWARDED_HEADER] == "1"
    assert inside["x-forwarded-for"] == "127.0.0.1"
    assert FORWARDED_HEADER not in headers_for("/debug/requests/r/tokens")
    assert FORWARDED_HEADER not in headers_for("/v1/models", (name, b"192.0.2.1"))
    assert FORWARDED_HEADER not in headers_for("/debug/requests/r/tokens", (FORWARDED_HEADER.encode(), b"0"))
