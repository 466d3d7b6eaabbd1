"""Starts the process of a front end, and ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass


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


def start_child() -> Child:
    """Start a process, which imports its modules, and then waits for the settings and the model's data."""
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
    connections.setblocking(False)
    return Child(process, messages, connections)
