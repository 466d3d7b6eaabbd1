"""The parts of uvicorn that its documentation doesn't promise, and that `Connection` and `Server` use nevertheless.

They may change with any new version, so a test compares USED with the installed uvicorn and with our code.
"""

from __future__ import annotations

from uvicorn.config import STARTUP_FAILURE, Config
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

__all__ = ["STARTUP_FAILURE", "STATUS_LINE", "USED", "HttpToolsProtocol", "RequestResponseCycle"]

# Attributes and methods that we read, set, call or replace.
USED: dict[type, frozenset[str]] = {
    HttpToolsProtocol: frozenset(
        (
            *("_start_asgi_task", "client", "connection_lost", "connection_made", "cycle", "data_received", "flow"),
            *("headers", "loop", "on_body", "on_header", "on_headers_complete", "on_message_begin"),
            *("on_message_complete", "on_response_complete", "on_url", "parser", "pause_writing", "pipeline"),
            *("resume_writing", "scope", "server_state", "shutdown", "transport", "url"),
        )
    ),
    RequestResponseCycle: frozenset(
        (
            *("chunked_encoding", "disconnected", "expected_content_length", "message_event", "response_complete"),
            *("response_started", "scope", "send", "transport", "waiting_for_100_continue"),
        )
    ),
    FlowControl: frozenset(("drain", "pause_reading", "resume_reading", "write_paused")),
    Server: frozenset(
        (
            *("config", "force_exit", "handle_exit", "lifespan", "on_tick", "server_state", "should_exit"),
            *("shutdown", "started", "startup"),
        )
    ),
    ServerState: frozenset(("connections", "default_headers", "tasks", "total_requests")),
    LifespanOn: frozenset(("should_exit", "shutdown", "startup", "state")),
    Config: frozenset(("ssl",)),
}
