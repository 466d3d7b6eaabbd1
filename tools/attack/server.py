"""The kinds of servers that are attacked. Each runs as a process with a limit on its memory, so that an attack that
succeeds takes the server, and not the machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tools.attack.attack import ATTACKER_KEY, HI, NEIGHBOUR_KEY
from tools.bench.process_usage import cpu_seconds, peak_rss_mib, reset_peak_rss, rss_mib
from tools.server_process import ServerProcess, free_port, running_process

MEMORY_LIMIT_BYTES = 10 * 2**30  # of address space
ALIVE_SECONDS = 10.0
PROGRAM = ("-m", "oaiserve")
START_SECONDS = 600.0  # on a busy machine
FEW_FILES = 256
# The memory of the KV cache is the system's until its blocks are used for the first time. A small cache is all in use
# after the warm-up, so that what grows later is something else.
KV_CACHE = ("--kv-cache-memory", "400MiB")
LENGTH = ("--max-model-len", "4096")
KEYS = ("--api-key", ATTACKER_KEY, "--api-key", NEIGHBOUR_KEY)


@dataclass(frozen=True)
class Kind:
    """How a server is started: its flags, how many files it may open, and whether it serves TLS."""

    flags: tuple[str, ...]
    num_files: int | None = None
    tls: bool = False


KINDS = {
    "keys": Kind((*KEYS, *LENGTH)),
    "open": Kind(LENGTH),  # no keys, on loopback: the one that pages of a browser may try to reach
    "few files": Kind((*KEYS, *LENGTH), num_files=FEW_FILES),
    "TLS": Kind((*KEYS, *LENGTH), tls=True),
}


@dataclass
class Server:
    """A running server, and what its process costs."""

    kind: str
    process: ServerProcess

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def pid(self) -> int:
        return self.process.process.pid

    @property
    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid)

    @property
    def rss_mib(self) -> float:
        return rss_mib(self.pid)

    @property
    def peak_rss_mib(self) -> float:
        return peak_rss_mib(self.pid)

    def reset_peak(self) -> None:
        reset_peak_rss(self.pid)

    def state(self) -> str:
        """Return `alive`, or in which way the server is not."""
        exit_code = self.process.process.poll()
        if exit_code is not None:
            return f"ended ({exit_code})"
        headers = {"authorization": f"Bearer {NEIGHBOUR_KEY}"}
        body = {"messages": HI, "max_tokens": 1}
        try:
            with httpx.Client(
                base_url=self.url, timeout=ALIVE_SECONDS, trust_env=False, verify=False, headers=headers
            ) as http:
                health = http.get("/health").status_code
                answer = http.post("/v1/chat/completions", json=body).status_code
        except httpx.HTTPError as error:
            exit_code = self.process.process.poll()
            return f"hangs ({type(error).__name__})" if exit_code is None else f"ended ({exit_code})"
        return "alive" if (health, answer) == (200, 200) else f"sick (/health {health}, chat {answer})"


@contextmanager
def oaiserve(kind_name: str, model: str, flags: Sequence[str]) -> Iterator[Server]:
    """Run a server of this kind with these flags. Raises StartFailed."""
    kind, port = KINDS[kind_name], free_port()
    with TemporaryDirectory() as folder:
        command = ["prlimit", f"--as={MEMORY_LIMIT_BYTES}"]
        if kind.num_files is not None:
            command.append(f"--nofile={kind.num_files}")
        command += [sys.executable, *PROGRAM, "serve", model, "--port", str(port), "--log-format", "json", *KV_CACHE]
        if kind.tls:
            command += _certificate(Path(folder))
        log_file = Path(folder) / "log"
        with running_process(
            [*command, *flags],
            port,
            log_file=log_file,
            tls=kind.tls,
            start_limit_seconds=START_SECONDS,
            stop_limit_seconds=5.0,
        ) as process:
            yield Server(kind_name, process)


def missing_programs() -> list[str]:
    return [program for program in ("prlimit", "openssl") if shutil.which(program) is None]


def _certificate(folder: Path) -> list[str]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    return ["--tls-certificate", str(certificate), "--tls-key", str(key)]
