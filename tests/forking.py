"""Starts `oaiserve` from a process that has imported what a server imports, for tests whose subject is not the start.

Imports take most of a start's CPU time, so a fork server (this file as a program) makes them once for each process of
tests. It forks for each connection to its socket, which sends the command line, environment, folder and standard
streams of the child, and receives the child's id and, when it ends, its exit code and CPU seconds.

Another program, or one with other values of variables that modules may read, gets a new interpreter.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[1]
SERVER = (sys.executable, "-m", "oaiserve")
# What a server with native code imports.
PRELOADED = (
    *(f"oaiserve.{name}" for name in ("cli", "app", "engine.engine", "engine.start.ways.described", "http.server")),
    *sorted(f"oaiserve.plugins.{path.parent.name}.routes" for path in ROOT.glob("oaiserve/plugins/*/routes*")),
    *("uvicorn.loops.uvloop", "uvicorn.protocols.http.httptools_impl"),
    # what loads a tokenizer
    *("transformers.models.auto.tokenization_auto", "transformers.models.llama.configuration_llama"),
)
# Beginnings of variables that no module reads while it is imported.
OF_STARTS = ("OAISERVE_", "PATH", "PYTEST_CURRENT_TEST")
# The variables that `prepare_process` sets before it imports torch.
BEFORE_TORCH = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_WAIT_POLICY": "passive"}
CAN_FORK = sys.platform == "linux"
MAX_MESSAGE_BYTES = 1 << 20

cpu_seconds = 0.0  # CPU time of the forked children that have ended


class ForkedProcess:
    """A child of the fork server, with what tests use of `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], connection: socket.socket) -> None:
        self.args = args
        self.returncode: int | None = None
        self._connection = connection
        self.pid = int(self._received())

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its exit code. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        global cpu_seconds
        self.returncode, seconds = json.loads(self._received())
        self._connection.close()
        cpu_seconds += seconds

    def _received(self) -> bytes:
        message = self._connection.recv(MAX_MESSAGE_BYTES)
        assert message, "the fork server has ended"
        return message


def start(
    command: Sequence[str | Path],
    *,
    stdin: int,
    stdout: IO[bytes],
    stderr: IO[bytes],
    env: Mapping[str, str] | None,
    cwd: Path,
    process_group: int,
    server: ForkServer | None = None,
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a command with the options of `subprocess.Popen`, as a fork if that makes no difference."""
    words = [str(word) for word in command]
    environment = dict(os.environ if env is None else env)
    can_fork = CAN_FORK and tuple(words[: len(SERVER)]) == SERVER
    if can_fork and server is None:
        server = fork_server()
    if server is None or not can_fork or of_imports(environment) != server.environment:
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd, process_group=process_group
        )
    assert stdin == subprocess.DEVNULL
    assert process_group == 0
    with open(os.devnull) as nothing:
        streams = [nothing.fileno(), stdout.fileno(), stderr.fileno()]
        return ForkedProcess(words, connect(server.address, words, environment, cwd, streams, has_group=True))


def of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that modules may read while they are imported."""
    return {name: value for name, value in environment.items() if not name.startswith(OF_STARTS)}


def connect(
    address: Path, words: Sequence[str], env: Mapping[str, str], cwd: Path, streams: Sequence[int], has_group: bool
) -> socket.socket:
    """Order a child, and return the connection that gets its id and its end."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(address))
    order = {"words": [*words], "env": dict(env), "cwd": str(cwd), "has_group": has_group}
    socket.send_fds(connection, [json.dumps(order).encode()], [*streams])
    return connection


class ForkServer:
    """A fork server whose modules are imported in an environment. It ends with this process."""

    def __init__(self, environment: Mapping[str, str], preloaded: Sequence[str] = PRELOADED) -> None:
        self.environment = of_imports(environment)
        self.address = Path(tempfile.mkdtemp(prefix="oaiserve-forks-")) / "socket"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forking", self.address, *preloaded],
            cwd=ROOT,
            env=self.environment | BEFORE_TORCH,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the tests.
        )
        atexit.register(self._process.communicate)
        assert self._process.stdout is not None
        assert self._process.stdout.read(1) == b"\n", "the fork server did not start"


@cache
def fork_server() -> ForkServer:
    """Return the fork server of this process."""
    return ForkServer({name: value for name, value in os.environ.items() if not name.startswith("OTEL_")})


class _Children:
    """The fork server's loop. Returns in a child, with its order."""

    def __init__(self, address: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, self._fork)
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._end)
        self._connections: dict[int, socket.socket] = {}  # by the descriptor of the child

    def next_order(self) -> tuple[dict[str, Any], list[int]]:
        """Fork for each connection until there is an order for this process, which is a child then."""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._connections:
                    self._ended(key.fd, key.data)
                elif (order := key.data()) is not None:
                    return order

    def _end(self) -> NoReturn:
        """End with the process that started this one, which may not be able to clean up."""
        socket_file = Path(self._listener.getsockname())
        socket_file.unlink()
        socket_file.parent.rmdir()
        sys.exit(0)

    def _fork(self) -> tuple[dict[str, Any], list[int]] | None:
        connection, _ = self._listener.accept()
        message, streams, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 3)
        order: dict[str, Any] = json.loads(message)
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose a thread"
        pid = os.fork()
        if pid == 0:
            connection.close()
            self._close()
            if order["has_group"]:
                os.setpgid(0, 0)
            return order, streams
        for stream in streams:
            os.close(stream)
        if order["has_group"]:
            os.setpgid(pid, pid)  # here, too: the group must exist before anybody gets the id
        descriptor = os.pidfd_open(pid)
        self._connections[descriptor] = connection
        self._selector.register(descriptor, selectors.EVENT_READ, pid)
        connection.send(str(pid).encode())
        return None

    def _ended(self, descriptor: int, pid: int) -> None:
        _, status, usage = os.wait4(pid, 0)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        end = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        with self._connections.pop(descriptor) as connection, suppress(ConnectionError):  # A client may end first.
            connection.send(json.dumps(end).encode())

    def _close(self) -> None:
        self._selector.close()
        self._listener.close()
        for descriptor, connection in self._connections.items():
            os.close(descriptor)
            connection.close()


def main(address: str, *preloaded: str) -> None:
    for module in preloaded:
        importlib.import_module(module)
    children = _Children(address)
    os.write(1, b"\n")
    gc.freeze()  # A collection would copy the memory that children share.
    order, streams = children.next_order()
    gc.unfreeze()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ |= order["env"]
    os.chdir(order["cwd"])
    run(order["words"])


def run(words: list[str]) -> None:
    """Run the program of a command as a new interpreter would: `python -m MODULE ...` or `python FILE ...`."""
    sys.orig_argv = words
    if words[1] == "-m":
        sys.argv = words[2:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words[1:]
        sys.path[0] = str(Path(words[1]).parent)
        runpy.run_path(words[1], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
