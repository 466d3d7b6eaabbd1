"""The process of a front end: `python -m oaiserve.scale.front_ends.process FD FD`, which the engine process starts.

The first descriptor is that of a socket for messages, the second one of a socket for connections. Neither torch nor
transformers is imported here. The process ends when the engine process says so, or is gone.
"""

from __future__ import annotations

import gc
import logging
import pickle
import signal
import socket
import sys
from typing import Any, cast

from oaiserve.scale.front_ends.messages import LENGTH, Begin, Model


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the engine process handles these
        signal.signal(number, signal.SIG_IGN)
    messages, channel = (socket.socket(fileno=int(descriptor)) for descriptor in sys.argv[1:3])
    gc.disable()  # all that is imported stays
    begin = cast(Begin, received(messages))
    sys.setswitchinterval(begin.switch_seconds)
    options = begin.config.server

    from oaiserve import __version__
    from oaiserve.engine.system_memory import keep_freed
    from oaiserve.http.connections import allowed_connections
    from oaiserve.scale.front_ends.serve import serve
    from oaiserve.telemetry import logs, sampling

    log_limit = logs.configure(options.log_level, options.log_format)
    for name in ("uvicorn.error", "oaiserve.http.server"):  # each start and end is the engine process's to log
        logging.getLogger(name).setLevel(logging.WARNING)
    allowed_connections(options)  # which raises the limit of open files

    def before() -> None:
        gc.freeze()
        gc.enable()
        keep_freed()

    is_sampled, model = sampling(__version__), cast(Model, received(messages))
    sys.exit(serve(begin.config, model, messages, channel, is_sampled=is_sampled, log_limit=log_limit, before=before))


def received(messages: socket.socket) -> Any:
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


if __name__ == "__main__":
    main()
