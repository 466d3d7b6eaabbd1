"""Starts a server as a process, waits until it answers, and stops it: oaiserve, a peer, or Prometheus in a test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
CHAT = "/v1/chat/completions"
QUESTION = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 8,
    "temperature": 0,
}
POLL_SECONDS = 0.02
START_LIMIT_SECONDS = 600.0  # On a busy machine, compiling takes minutes. A server that ends is noticed at once.
KILL_LIMIT_SECONDS = 20.0
MOST_LOG_CHARACTERS = 2000  # in an error message
Start = Callable[..., "subprocess.Popen[bytes]"]  # with the parameters of subprocess.Popen


class StartFailed(Exception):
    """The server ended, or it was not ready in time. The message has the end of its log."""


@dataclass
class ServerProcess:
    url: str
    process: subprocess.Popen[bytes]
    log_file: Path
    start_seconds: float = 0.0  # from the start of the process to its first answer

    def terminate(self, limit_seconds: float = 60.0) -> int:
        """Send SIGTERM to the server and return its exit code. Raises subprocess.TimeoutExpired."""
        self.process.terminate()
        return self.process.wait(limit_seconds)

    def wait_for_answer(self, path: str, question: Mapping[str, Any] | None, limit_seconds: float) -> None:
        """Wait until the path answers with success: to a POST of the question, or to a GET. Raises StartFailed."""
        give_up = time.monotonic() + limit_seconds
        last = "no answer"
        with httpx.Client(base_url=self.url, timeout=limit_seconds, trust_env=False) as http:
            while self.process.poll() is None and time.monotonic() < give_up:
                try:
                    response = http.request("POST" if question else "GET", path, json=question)
                    if response.is_success:
                        return
                    last = f"{path} answered with {response.status_code}"
                except httpx.TransportError as error:  # it does not listen yet
                    last = str(error)
                time.sleep(POLL_SECONDS)
        code = self.process.poll()
        what = (
            f"it is not ready within {limit_seconds:.0f} s, {last}"
            if code is None
            else f"it ended with exit code {code}"
        )
        raise StartFailed(f"{what}: {self.log_file.read_text(errors='replace')[-MOST_LOG_CHARACTERS:].strip()}")


@contextmanager
def running_process(
    command: Sequence[str | Path],
    port: int,
    *,
    env: Mapping[str, str] | None = None,  # None: that of this process
    cwd: Path = ROOT,
    log_file: Path | None = None,
    ready_path: str = "/ready",
    question: Mapping[str, Any] | None = None,
    start_limit_seconds: float = START_LIMIT_SECONDS,
    stop_limit_seconds: float = 20.0,
    start: Start = subprocess.Popen,
) -> Iterator[ServerProcess]:
    """Run a server on the port of this machine, from its first answer to the end of the block.

    It is ready when `ready_path` answers with success. It ends as in `running_group`. Raises StartFailed.
    """
    started = time.monotonic()
    with running_group(
        command, env=env, cwd=cwd, log_file=log_file, stop_limit_seconds=stop_limit_seconds, start=start
    ) as (process, log):
        server = ServerProcess(f"http://127.0.0.1:{port}", process, log)
        server.wait_for_answer(ready_path, question, start_limit_seconds)
        server.start_seconds = time.monotonic() - started
        yield server


@contextmanager
def running_group(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    log_file: Path | None = None,
    stop_limit_seconds: float = 20.0,
    start: Start = subprocess.Popen,
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run a command in a process group of its own until the end of the block, with its output in a file.

    In the end the whole group gets SIGTERM, and SIGKILL after `stop_limit_seconds`; with 0 it gets SIGKILL at once.
    Without a `log_file` the output is deleted then.
    """
    with NamedTemporaryFile() if log_file is None else log_file.open("wb") as log:
        process = start(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=cwd, process_group=0)
        try:
            yield process, Path(log.name)
        finally:
            if stop_limit_seconds:
                stop_group(process, signal.SIGTERM, stop_limit_seconds)
            stop_group(process, signal.SIGKILL, KILL_LIMIT_SECONDS)


def running_oaiserve(
    *flags: str, model: str = "demo", program: Sequence[str] = ("-m", "oaiserve"), **options: Any
) -> AbstractContextManager[ServerProcess]:
    """Run `oaiserve serve` on a free port, with the options of `running_process`. Another `program` gets the same
    arguments."""
    port = free_port()
    return running_process([sys.executable, *program, "serve", model, "--port", str(port), *flags], port, **options)


def stop_group(process: subprocess.Popen[bytes], number: signal.Signals, limit_seconds: float) -> None:
    """Send a signal to the process group that the process leads, and wait until the group is gone or the time is up.
    Some servers leave workers behind."""
    give_up = time.monotonic() + limit_seconds
    try:
        os.killpg(process.pid, number)
        while time.monotonic() < give_up:
            process.poll()  # else a zombie is left, which counts as alive
            os.killpg(process.pid, 0)
            time.sleep(POLL_SECONDS)
    except ProcessLookupError:
        process.wait()


def free_port() -> int:
    """Return a port for a server of this user. Until this process ends, no other program gets it as any free port."""
    sock = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # Servers set one of them, and may then share the port.
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind(("127.0.0.1", 0))
    port: int = sock.getsockname()[1]
    sock.detach()  # It stays bound.
    return port


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that a tool that is terminated stops the servers that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
