"""Starts the process of a front end, reads its CPU time, memory and open files from Linux, and ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from oaiserve.config import Config
from oaiserve.scale.front_ends.messages import Begin, pickled

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The fields of /proc/PID/stat behind the name, which may have spaces: utime, stime and rss are the 14th, 15th and 24th.
_USER, _SYSTEM, _RESIDENT = 11, 12, 21


@dataclass(frozen=True, slots=True)
class Child:
    """The process of a front end, with this side's ends of its two pairs of sockets."""

    process: subprocess.Popen[bytes]
    messages: socket.socket
    connections: socket.socket

    def end(self, limit_seconds: float) -> str:
        """Wait until the process has ended, kill it after the limit, and return how it has ended. This blocks."""
        try:
            code = self.process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.connections.close()
        self.messages.close()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def start_child(config: Config, switch_seconds: float) -> Child:
    """Start a process, which makes itself ready, and then waits for the data of the model."""
    messages, its_messages = socket.socketpair()
    connections, its_connections = socket.socketpair()
    with its_messages, its_connections:
        descriptors = (its_messages.fileno(), its_connections.fileno())
        process = subprocess.Popen(
            [sys.executable, "-m", "oaiserve.scale.front_ends.process", *map(str, descriptors)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches the engine process only
        )
    messages.sendall(pickled(Begin(config, switch_seconds)))  # small enough to wait in the socket
    connections.setblocking(False)
    return Child(process, messages, connections)


class ProcessNumbers(NamedTuple):
    """The numbers of a process at one moment."""

    cpu_seconds: float
    resident_bytes: int
    open_files: int


def numbers_of(pid: int) -> ProcessNumbers | None:
    """Return the numbers of a process, or None if it is gone, or where there is no /proc."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        open_files = len(os.listdir(folder / "fd"))
    except OSError:
        return None
    cpu_ticks = int(fields[_USER]) + int(fields[_SYSTEM])
    return ProcessNumbers(cpu_ticks / _TICKS, int(fields[_RESIDENT]) * _PAGE_BYTES, open_files)
