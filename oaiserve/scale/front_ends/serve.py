"""Serves HTTP in the process of a front end: the same app as that of a server without front ends, with remote parts."""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
from collections.abc import Callable
from typing import cast

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.facts.trace import TraceContext
from oaiserve.http.server import Server
from oaiserve.scale.front_ends.calls import EngineProcess
from oaiserve.scale.front_ends.link import HandedOver, Link
from oaiserve.scale.front_ends.messages import Model
from oaiserve.scale.front_ends.remote_engine import RemoteEngine
from oaiserve.scale.front_ends.remote_parts import RemoteConnections, RemoteStore, RemoteTelemetry
from oaiserve.telemetry.log_limit import LogLimit

LAST_WORDS_SECONDS = 0.05  # for streams to write their errors, before they are cut off


def serve(
    config: Config,
    model: Model,
    messages: socket.socket,
    channel: socket.socket,
    *,
    is_sampled: Callable[[TraceContext], bool] = lambda trace: False,
    log_limit: LogLimit | None = None,
    before: Callable[[], None] = lambda: None,
) -> int:
    """Serve the connections of the channel, until the engine process ends it. Return the exit code.

    `is_sampled` returns whether the spans of a trace will be exported, and `before` is called when all is ready.
    """
    process = EngineProcess(Link(messages))

    def shut_down() -> None:
        server.handle_exit(signal.SIGTERM, None)

    def cut_off() -> None:
        for _ in range(2):  # as by a second signal
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, shut_down)

    engine = RemoteEngine(
        process,
        Tokenizer(pickle.loads(model.tokenizer)),
        model,
        num_workers=config.engine.tokenize_workers,
        on_shutdown=shut_down,
        on_lost=cut_off,
    )
    telemetry = RemoteTelemetry(
        process,
        is_sampled=is_sampled,
        log_limit=log_limit,
        boundaries_seconds=model.live_boundaries_seconds,
    )
    connections = RemoteConnections(process)
    app = create_app(config, engine, telemetry, RemoteStore(process), model.started_unix_seconds)
    server = Server(app, config.server, connections, on_drain=engine.drain, takes_signals=False)
    before()
    server.run(sockets=[cast(socket.socket, HandedOver(channel, connections.release))])
    return 1 if process.link.is_lost else 0
