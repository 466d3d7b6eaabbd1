"""The worker process, which holds a part of the model: `python -m oaiserve.engine.start.worker FD`.

`Workers` starts it with the file descriptor of a socket. It computes the batches that the server sends, and ends when
the server closes the connection or ends for any reason.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch
import transformers

from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.parallel.group import Member, environment, join
from oaiserve.engine.model.parallel.messages import Arrived, Assignment, Logged, Ready, Report, Work, WorkerFailed
from oaiserve.engine.start.load import load_with
from oaiserve.engine.start.ways.gpu import start_member
from oaiserve.errors import StartupError

Send = Callable[[Report], None]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server handles these, and then ends its workers
        signal.signal(number, signal.SIG_IGN)
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        assignment: Assignment = connection.recv()
    except EOFError:  # the server has ended already
        return
    lock = Lock()

    def send(report: Report) -> None:
        with lock:
            connection.send(report)

    inbox: SimpleQueue[Work] = SimpleQueue()
    Thread(target=_read, args=(connection, inbox, assignment.folder), name="read", daemon=True).start()
    logging.basicConfig(level=logging.WARNING, handlers=[_ToServer(send)])
    logging.captureWarnings(True)
    try:
        _work(assignment, inbox, send)
    except BaseException as error:
        is_known = isinstance(error, StartupError)
        reason = str(error) if is_known else f"{type(error).__name__}: {error}"
        send(WorkerFailed(reason, None if is_known else traceback.format_exc()))
    os._exit(1)  # without waiting for the other members


@torch.inference_mode()
def _work(assignment: Assignment, inbox: SimpleQueue[Work], send: Send) -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # the server logs the same
    options, size = assignment.options, assignment.options.tensor_parallel

    def meet(device: torch.device) -> None:
        send(Arrived())
        join(assignment.rank, size, device, assignment.folder, options.cpu_threads or default_threads())

    with environment(assignment.rank), torch.inference_mode(False):  # weights are ordinary tensors, as in the server
        loaded = load_with(options, assignment.model, Member(assignment.rank, size, meet))
        part = start_member(loaded, options)
    send(Ready())
    while True:
        part.do(inbox.get())


def _read(connection: Connection[Any, Any], inbox: SimpleQueue[Work], folder: Path) -> None:
    """Read messages into the inbox, and end the process when the server is gone.

    This runs in a thread of its own, so that the end of the server is noticed during a collective too.
    """
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)  # the server may have had no time to do it
        os._exit(0)


class _ToServer(logging.Handler):
    """Sends log records to the server, which logs them in its own form."""

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Logged(record.levelno, self.format(record)))


if __name__ == "__main__":
    main()
