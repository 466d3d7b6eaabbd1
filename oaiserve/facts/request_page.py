"""The address of a request's page, /requests/ID, as headers and log lines have it."""

from __future__ import annotations

from oaiserve.facts.record import RequestRecord

PATH = "/requests"


def link_header(raw_path: bytes, request_id: str) -> tuple[bytes, bytes]:
    """Return the header `link` of an answer. Its address is relative to that of the request, which a proxy may have
    changed."""
    up = "../" * (raw_path.count(b"/") - 1)
    return b"link", f'<{up}{PATH[1:]}/{request_id}>; rel="describedby"; type="text/html"'.encode()


def url(record: RequestRecord, scheme: str) -> str | None:
    """Return the address on the server itself, or None where that has none, as on a Unix socket."""
    host, port = record.server_address, record.server_port
    if host is None or port is None:
        return None
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{PATH}/{record.request_id}"
