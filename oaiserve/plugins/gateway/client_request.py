"""`ClientRequest` is a client's request in the form that replicas get. `client_request_of` makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import getrandbits
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers
from starlette.types import Scope

from oaiserve.errors import MODELS_PATH
from oaiserve.facts.trace import Attempt, TraceContext
from oaiserve.plugins.gateway.sent_pieces import SentPieces
from oaiserve.plugins.shared.forms import model_in_form
from oaiserve.routes.models import name_in
from oaiserve.runtime import Runtime
from oaiserve.wire.continuation import IDS_HEADER, StreamIds
from oaiserve.wire.prefix_keys import Prompt, prompt_of_body
from oaiserve.wire.routing_decision import BACKGROUND_HEADER, FORWARDED_HEADER, HOPS_HEADER

LARGE_BYTES = 64 * 1024  # Larger bodies are parsed in a worker thread.
SESSION_HEADER = "x-session-id"
TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
DEADLINES = (b"x-ttft-deadline-ms", b"x-deadline-ms")
# These headers belong to one connection, and are not passed on.
OF_CONNECTION = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
    *(b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
}
# The gateway writes these itself. It leaves out the origin, which has been checked against a name of the gateway.
_NOT_ASKED = OF_CONNECTION | {b"content-length", b"host", b"origin", b"x-request-id", b"forwarded", b"x-real-ip"}
_NOT_A_CLIENTS = (b"x-forwarded-", b"x-oaiserve-")  # Only the gateway sets these.
_OF_PROXIES = (b"forwarded", b"x-forwarded-for", b"x-real-ip")
# Paths of objects that one replica stores, unless all share a store. Replicas are asked until one has the object.
_KEPT_BY_ONE = (
    *(b"/v1/responses/resp_", b"/v1/conversations", b"/v1/files/", b"/v1/batches", b"/v1/messages/batches"),
    b"/debug/requests/",
)
# A replica may have stored something before it failed.
_NOT_REPEATED = (b"/v1/conversations", b"/v1/files", b"/v1/batches", b"/v1/messages/batches")
# These paths concern one replica, and the answer of another one would mislead.
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
INSIDE = ("/admin", "/debug", "/dashboard")
OF_ONE_REPLICA = (*INSIDE, *ADAPTER_PATHS)
_OF_ONE_MODEL = "/tokenizer_info"
FORM_PATHS = ("/v1/audio/",)  # Their bodies are forms, which name the model.


@dataclass(slots=True)
class ClientRequest:
    """A request in the form that replicas get, and the pieces of its answer that the client has."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytearray
    prompt: Prompt
    session: str | None
    began_ns: int
    trace: TraceContext
    sent: SentPieces
    attempts: list[Attempt] = field(default_factory=list)
    status: int | None = None  # status of the answer that the client has
    deadlines_ms: tuple[int | None, int | None] = (None, None)  # limits for its first token and its end, since it began

    def deadline_headers(self, now_ns: int) -> list[tuple[bytes, bytes]]:
        """Return the headers with the time left until each deadline. A stream that continues has had its first
        token."""
        first_ms, end_ms = self.deadlines_ms
        gone_ms = (now_ns - self.began_ns) / 1e6
        if self.sent.number:
            first_ms = None
        limits = zip(DEADLINES, (first_ms, end_ms), strict=True)
        return [(name, b"%d" % max(1, int(limit_ms - gone_ms))) for name, limit_ms in limits if limit_ms is not None]

    @property
    def looks_for_one(self) -> bool:
        """Return whether it concerns an object that maybe only one replica has."""
        return self.target.startswith(_KEPT_BY_ONE)

    @property
    def may_be_repeated(self) -> bool:
        return self.method == "GET" or not self.target.startswith(_NOT_REPEATED)


def num_hops_of(scope: Scope) -> int:
    """Return how many gateways a request has passed. A client that forges this only gets its own request refused."""
    text = Headers(scope=scope).get(HOPS_HEADER, "")
    return int(text) if text.isdecimal() and len(text) == 1 else 0


def checked_path(scope: Scope) -> str:
    """Return the path that was checked. A replica might read the original differently."""
    return quote(scope["path"], safe="/:@!$&'()*+,;=~")


def passed_headers(scope: Scope, num_hops: int) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request without those of its connection, and with its id."""
    passed = (header for header in scope["headers"] if header[0] not in _NOT_ASKED)
    headers = [header for header in passed if not header[0].startswith(_NOT_A_CLIENTS)]
    headers.append((b"x-request-id", scope["state"]["request_id"].encode()))
    headers.append((HOPS_HEADER.encode(), b"%d" % (num_hops + 1)))
    return headers


def without_trace(headers: Sequence[tuple[bytes, bytes]], trace: TraceContext) -> list[tuple[bytes, bytes]]:
    """Return the headers without those of a trace that spans of the gateway replace. The state of a trace that could
    not be continued says nothing about the new one."""
    replaced = (TRACEPARENT, TRACESTATE) if trace.tracestate is None else (TRACEPARENT,)
    return [header for header in headers if header[0] not in replaced]


async def client_request_of(
    scope: Scope, body: bytearray, sent: SentPieces, num_hops: int, runtime: Runtime, *, has_ids: bool
) -> ClientRequest:
    began_ns = runtime.clock_ns()
    prompt = await asyncio.to_thread(prompt_of_body, body) if len(body) > LARGE_BYTES else prompt_of_body(body)
    path = checked_path(scope)
    if path.startswith(f"{MODELS_PATH}/"):
        prompt = prompt._replace(model=name_in(scope))
        path = f"{MODELS_PATH}/{quote(prompt.model, safe='')}"  # The name may be a path that begins with a slash.
    if path.startswith(FORM_PATHS):
        content_type = Headers(scope=scope).get("content-type", "")
        prompt = prompt._replace(model=await asyncio.to_thread(model_in_form, content_type, body))
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    query = scope["query_string"]
    state = scope["state"]
    is_of_one_replica = scope["path"].startswith(OF_ONE_REPLICA)
    if is_of_one_replica or scope["path"] == _OF_ONE_MODEL:  # With several models, the query may name one.
        fields = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        prompt = prompt._replace(model=dict(fields).get("model", ""))
        if is_of_one_replica:
            query = urlencode([(name, value) for name, value in fields if name != "model"]).encode()
    target = path.encode() + (b"?" + query if query else b"")
    headers = [header for header in passed_headers(scope, num_hops) if header[0] != b"content-encoding"]
    headers.append((b"x-forwarded-proto", scope["scheme"].encode()))
    if client := state["client"]:
        headers.append((b"x-forwarded-for", client.encode()))
    if state.get("is_background"):
        headers.append((BACKGROUND_HEADER.encode(), b"1"))
    if method == "POST" and has_ids:
        ids = StreamIds(state["unique_id"], runtime.unix_ns() // 10**9, getrandbits(63))
        headers.append((IDS_HEADER.encode(), ids.as_text.encode()))
    if scope["path"].startswith(INSIDE) and any(name in _OF_PROXIES for name, _ in scope["headers"]):
        headers.append((FORWARDED_HEADER.encode(), b"1"))
    session = Headers(scope=scope).get(SESSION_HEADER)
    request = ClientRequest(method, target, headers, body, prompt, session, began_ns, state["trace"], sent)
    # A replica counts from when it gets the request, so it gets the time that is left: the shorter of header and body.
    deadlines = {
        name: int(value) for name, value in headers if name in DEADLINES and value.isdigit() and len(value) < 10
    }
    deadlines = {name: milliseconds for name, milliseconds in deadlines.items() if milliseconds}
    both = [(deadlines.get(name), own) for name, own in zip(DEADLINES, prompt.deadlines_ms, strict=True)]
    first, end = (min((one for one in two if one is not None), default=None) for two in both)
    request.deadlines_ms = first, end
    request.headers = [header for header in headers if header[0] not in deadlines]
    return request
