"""Answers with a JSON document, which is indented for browsers."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from oaiserve.http.codings import qualities


def prefers_html(accept: str) -> bool:
    """Return whether an Accept header prefers HTML to JSON, by the most specific ranges that cover them."""
    found = qualities(accept)
    html, json = (
        next((found[each] for each in ranges if each in found), 0.0)
        for ranges in (("text/html", "text/*", "*/*"), ("application/json", "application/*", "*/*"))
    )
    return html > json


def document_response(document: bytes, accept: str) -> Response:
    if prefers_html(accept):
        shown = msgspec.json.format(document, indent=2)
    else:
        shown = document
    return Response(shown, media_type="application/json", headers={"vary": "accept"})
