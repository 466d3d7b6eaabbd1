"""The process of a front end: `python -m oaiserve.front_ends.process FD FD`, which the engine process starts.

The first descriptor is that of a socket for messages, the second one of a socket for connections. Neither torch nor
transformers is imported here. It ends when the engine process says so, or is gone.
"""

from __future__ import annotations

import gc
import logging
import pickle
import signal
import socket
import sys
from typing import Any, cast

from oaiserve.front_ends.messages import LENGTH, Begin, Model


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the engine process handles these
        signal.signal(number, signal.SIG_IGN)
    messages, channel = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3])
    gc.disable()  # as in the engine process: all that is imported stays
    begin = cast(Begin, _received(messages))
    sys.exit(_serve(begin, messages, channel))


def _received(messages: socket.socket) -> Any:
    """Wait for one of the first messages. If the engine process is gone, end this one."""

    def read(number: int) -> bytes:
        data = bytearray()
        while len(data) < number:
            part = messages.recv(min(number - len(data), 2**20))
            if not part:
                sys.exit(0)
            data += part
        return bytes(data)

    (length,) = LENGTH.unpack(read(LENGTH.size))
    return pickle.loads(read(length))


def _serve(begin: Begin, messages: socket.socket, channel: socket.socket) -> int:
    """Serve until the engine process ends that, and return the exit code."""
    config = begin.config
    from oaiserve.telemetry import logs

    log_limit = logs.configure(config.server.log_level, config.server.log_format)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # the engine process tells of the start and the end
    sys.setswitchinterval(begin.switch_seconds)

    from oaiserve import __version__
    from oaiserve.app import create_app
    from oaiserve.connections import allowed_connections
    from oaiserve.engine.system_memory import keep_freed
    from oaiserve.engine.tokenizer import Tokenizer
    from oaiserve.front_ends.engine_process import EngineProcess
    from oaiserve.front_ends.handed_over import HandedOver
    from oaiserve.front_ends.link import Link
    from oaiserve.front_ends.remote_engine import RemoteEngine
    from oaiserve.front_ends.remote_parts import RemoteConnections, RemoteStore, RemoteTelemetry
    from oaiserve.server import Server
    from oaiserve.telemetry import sampling

    allowed_connections(config.server)  # raises the limit of open files
    is_sampled = sampling(__version__)
    model = cast(Model, _received(messages))
    process = EngineProcess(Link(messages))

    def shut_down() -> None:
        server.handle_exit(signal.SIGTERM, None)

    def cut_off() -> None:
        server.should_exit = True
        shut_down()  # as a second signal would

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
    app = create_app(config, engine, telemetry, RemoteStore(process))
    connections = RemoteConnections(process)
    server = Server(app, config.server, connections, on_drain=engine.drain, takes_signals=False)
    del model
    gc.freeze()
    gc.enable()
    keep_freed()
    server.run(sockets=[cast(socket.socket, HandedOver(channel, connections.release))])
    return 1 if process.link.is_lost else 0


if __name__ == "__main__":
    main()
