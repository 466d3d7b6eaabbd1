"""The process of a front end: `python -m oaiserve.scale.front_ends.process FD FD`, which the engine process starts.

The first descriptor is that of a socket for messages, the second one of a socket for connections. It serves the same
app as a server without front ends, with remote parts. Neither torch nor transformers is imported here. The process ends
when the engine process says so, or is gone.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, cast

from oaiserve import __version__
from oaiserve.app import create_app
from oaiserve.engine.system_memory import keep_freed
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.facts.trace import TraceContext
from oaiserve.http.connections import allowed_connections
from oaiserve.http.server import Server
from oaiserve.scale.front_ends.calls import EngineProcess
from oaiserve.scale.front_ends.link import HandedOver, Link
from oaiserve.scale.front_ends.messages import LENGTH, Model
from oaiserve.scale.front_ends.remote_engine import RemoteEngine
from oaiserve.scale.front_ends.remote_parts import RemoteConnections, RemoteStore, RemoteTelemetry
from oaiserve.telemetry import logs, sampling
from oaiserve.telemetry.log_limit import LogLimit

LAST_WORDS_SECONDS = 0.05  # for streams to write their errors, before they are cut off


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the engine process handles these
        signal.signal(number, signal.SIG_IGN)
    messages, channel = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3])
    model = received(messages)
    sys.setswitchinterval(model.switch_seconds)
    options = model.config.server
    log_limit = logs.configure(options.log_level, options.log_format)
    for name in ("uvicorn.error", "oaiserve.http.server"):  # each start and end is the engine process's to log
        logging.getLogger(name).setLevel(logging.WARNING)
    allowed_connections(options)  # which raises the limit of open files

    def before() -> None:
        gc.freeze()  # all that is imported stays
        keep_freed()

    is_sampled = sampling(__version__)
    sys.exit(serve(model, messages, channel, is_sampled=is_sampled, log_limit=log_limit, before=before))


def serve(
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
    process, config = EngineProcess(Link(messages)), model.config

    def shut_down() -> None:
        server.handle_exit(signal.SIGTERM, None)

    def cut_off() -> None:
        for _ in range(2):  # as by a second signal
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, shut_down)

    engine = RemoteEngine(
        process,
        Tokenizer(model.tokenizer),
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
    parts: tuple[Any, Any, Any] = engine, telemetry, RemoteStore(process)  # with the faces of the engine process's
    app = create_app(config, *parts, model.started_unix_seconds)
    server = Server(app, config.server, connections, on_drain=engine.drain, takes_signals=False)
    before()
    server.run(sockets=[HandedOver(channel, connections.release)])
    return 1 if process.link.is_lost else 0


def received(messages: socket.socket) -> Model:
    """Wait for the first message. If the engine process is gone, end this one."""

    def read(number: int) -> bytes:
        data = messages.recv(number, socket.MSG_WAITALL)
        if len(data) < number:
            sys.exit(0)
        return data

    (length,) = LENGTH.unpack(read(LENGTH.size))
    return cast(Model, pickle.loads(read(length)))


if __name__ == "__main__":
    main()
