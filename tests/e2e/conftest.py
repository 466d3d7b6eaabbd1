"""The server as users start it: a process of its own, here with the demo model, asked over its socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from oaiserve import demo
from tests.engine.tokenizers_for_tests import CHATML
from tools.random_models import FAMILIES, byte_tokenizer, random_model

API_KEY = "a-key-of-the-tests"
START_SECONDS = 90  # until a process that nothing is wrong with must be ready
STOP_SECONDS = 30


@dataclass
class LiveServer:
    url: str
    process: subprocess.Popen[bytes]
    log_file: Path

    def log(self) -> list[dict[str, Any]]:
        """Fails where anything but log lines was printed."""
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def sdk(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {API_KEY}"}, timeout=60)

    def terminate(self) -> int:
        """SIGTERM, and the exit code it ends with."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


@contextmanager
def serve_process(
    model: str,
    log_file: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "oaiserve"),
) -> Iterator[LiveServer]:
    """`oaiserve serve MODEL` on a free port, ready for requests. Killed in the end, if nobody has ended it. Another
    `program` gets the same arguments."""
    port = free_port()
    command = [sys.executable, *program, "serve", model, "--port", str(port), "--log-format", "json", *flags]
    with (
        log_file.open("wb") as log,
        subprocess.Popen(command, env=clean_environment() | dict(env or {}), stdout=log, stderr=log) as process,
    ):
        server = LiveServer(f"http://127.0.0.1:{port}", process, log_file)
        try:
            wait_until_ready(server)
            yield server
        finally:
            process.kill()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def clean_environment() -> dict[str, str]:
    """This process's, without what would configure the server: only where the demo model is kept."""
    prefixes = ("OAISERVE_", "OTEL_")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes) or k == "OAISERVE_CACHE"}


def wait_until_ready(server: LiveServer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert server.process.poll() is None, f"the server has ended:\n{server.log_file.read_text()}"
        assert time.monotonic() < deadline, f"the server is not ready:\n{server.log_file.read_text()}"
        try:
            if httpx.get(f"{server.url}/ready").status_code == 200:
                return
        except httpx.ConnectError:
            time.sleep(0.05)  # it loads; nothing tells another process when it listens


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The demo model in float32. When the last test is over it must go quietly, with nothing unusual in its log."""
    demo.resolve()  # a first download may take longer than a start
    log_file = tmp_path_factory.mktemp("live") / "log"
    flags = ("--dtype", "float32", "--api-key", API_KEY, "--kv-cache-memory", "512MiB")
    with serve_process("demo", log_file, *flags) as server:
        yield server
        assert server.terminate() == 0
        unusual = [line for line in server.log() if line["level"] != "INFO"]
        assert [line for line in unusual if "sent the unknown parameter" not in line["message"]] == []


@pytest.fixture
def sdk(live: LiveServer) -> Iterator[openai.OpenAI]:
    with live.sdk() as client:
        yield client


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that knows nothing, one token per byte, and is fast: for what needs many tokens."""
    folder = tmp_path_factory.mktemp("small_model")
    tokenizer, config = byte_tokenizer(), FAMILIES["llama"].to_dict()
    tokenizer.chat_template = CHATML
    config |= {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    random_model(type(FAMILIES["llama"])(**config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
