"""A server as a process: its start, timed to its first answer; what its tree of processes takes; its end. For Linux."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.bench.servers import Server
from tools.figures import free_port

START_LIMIT_SECONDS = 1200
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 8,
    "temperature": 0,
}
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class StartFailed(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    pid: int
    started: float  # on the monotonic clock, like all times here; seconds
    start_seconds: float  # from the process to its first whole answer
    log: Path

    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    def peak_rss_mib(self) -> float:
        """The most that each process had at any time, added up; of those that live."""
        return sum(_status_kib(pid, "VmHWM") for pid in tree(self.pid)) / 1024

    def cpu_seconds(self) -> float:
        return sum(_cpu_seconds(pid) for pid in tree(self.pid))

    def wait_for_log(self, pattern: str) -> None:
        """Until a line says so. Raises StartFailed where it takes too long."""
        give_up = time.monotonic() + START_LIMIT_SECONDS
        while not re.search(pattern, self.log.read_text(errors="replace")):
            if time.monotonic() > give_up:
                raise StartFailed(f"its log does not say '{pattern}' within {START_LIMIT_SECONDS} s")
            time.sleep(0.05)


def exit_on_sigterm() -> None:
    """As on Ctrl-C: `running` then ends what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def running(server: Server, log: Path) -> Iterator[Running]:
    """Starts it on a free port, in a process group of its own. Raises StartFailed with the end of its log."""
    port = free_port()
    command = server.command(port)
    environment = {**os.environ, **server.environment}
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=server.working_folder,
            env=environment,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_for_answer(url, server.model_name, process)
        except StartFailed as error:
            raise StartFailed(f"{error}: {log.read_text(errors='replace')[-300:].strip()}") from None
        yield Running(url, process.pid, started, time.monotonic() - started, log)
    finally:
        _stop(process)


def _wait_for_answer(url: str, model: str, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_LIMIT_SECONDS
    body = json.dumps({"model": model, **QUESTION}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    reason = "no answer"
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise StartFailed(f"it ended with exit code {process.returncode}")
        try:
            with opener.open(request, timeout=START_LIMIT_SECONDS) as response:
                response.read()
            return
        except OSError as error:  # it does not listen yet, or says that it is loading
            reason = str(error)
            time.sleep(0.02)
    raise StartFailed(f"{reason} within {START_LIMIT_SECONDS} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The whole group: some servers leave workers behind."""
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def tree(pid: int) -> list[int]:
    """The process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def machine_cpu_seconds() -> float:
    """What all processes together used so far."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_SECOND


def _cpu_seconds(pid: int) -> float:
    """With that of children that have ended and were waited for."""
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) / _TICKS_PER_SECOND if fields else 0.0


def _stat(pid: int) -> list[str]:
    """The fields after the name, the state first; empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _status_kib(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)
