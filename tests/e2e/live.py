"""Fixtures that start the server as users do, as a process with the demo model or a small one."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from oaiserve.checkpoints import demo
from tests import forking
from tests.engine.text.tokenizers_for_tests import CHATML
from tests.models.decoders import FAMILIES, byte_tokenizer, random_model
from tests.published import checked, checking
from tools.server_process import ServerProcess, Start, running_oaiserve

API_KEY = "a-key-of-the-tests"
START_SECONDS = 300  # time for a server to become ready, on a busy machine
STOP_SECONDS = 120


class LiveServer(ServerProcess):
    """A server process, with clients for it."""

    def log(self) -> list[dict[str, Any]]:
        """Return the lines of the log. Fail if anything but log lines was printed."""
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def sdk(self) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0)
        checked(client._client)  # A client that is given to it would have to be closed.
        return client

    def get(self, path: str) -> httpx.Response:
        with self.http() as http:
            return http.get(path)

    def post(self, path: str, **body: object) -> httpx.Response:
        with self.http() as http:
            return http.post(path, json=body)

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {API_KEY}"}, timeout=60)


@pytest.fixture(scope="module", autouse=True)  # not longer: other tests run in the same process
def answers_are_as_published() -> Iterator[None]:
    """Hold every answer that these tests read with httpx against the published schema."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx.Client, "send", checking(httpx.Client.send))
        yield


@contextmanager
def serve_process(
    model: str,
    log_file: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "oaiserve"),
    start: Start = forking.start,
) -> Iterator[LiveServer]:
    """Run `oaiserve serve MODEL`, wait until it is ready, and kill it at the end of the block if it still runs.

    Another `program` gets the same arguments.
    """
    with running_oaiserve(
        "--log-format",
        "json",
        *flags,
        model=model,
        program=program,
        env=clean_environment() | dict(env or {}),
        log_file=log_file,
        start_limit_seconds=START_SECONDS,
        stop_limit_seconds=0,
        start=start,
    ) as server:
        yield LiveServer(**vars(server))


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables that configure the server, except the folder of the demo model, and
    which parts of servers have processes of their own."""
    prefixes = ("OAISERVE_", "OTEL_")
    kept = ("OAISERVE_CACHE", "OAISERVE_ENGINE_PROCESS", "OAISERVE_FRONT_PROCESSES")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes) or k in kept}


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Serve the demo model. After the last test, check its exit code and that its log has no warnings."""
    demo.fetched()  # a first download may take longer than a start
    log_file = tmp_path_factory.mktemp("live") / "log"
    flags = ("--api-key", API_KEY, "--kv-cache-memory", "512MiB")
    with serve_process("demo", log_file, *flags) as server:
        yield server
        assert server.terminate() == 0
        unusual = [line for line in server.log() if line["level"] != "INFO"]
        expected = ("Clients sent an unknown parameter", "Refused a request with")  # an unknown key, or none
        messages = [line["message"].partition(" left out: ")[2] or line["message"] for line in unusual]
        assert [message for message in messages if not message.startswith(expected)] == []


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small model with random weights and one token per byte, for tests that need many tokens.

    It has a native step, which later starts have without transformers. An answer that must outlast what a test does
    has to be long: 10,000 tokens take some seconds.
    """
    folder = tmp_path_factory.mktemp("small_model")
    tokenizer = byte_tokenizer()
    config = FAMILIES["llama"].to_dict()
    tokenizer.chat_template = CHATML
    config |= {"vocab_size": len(tokenizer), "max_position_embeddings": 16_384, "head_dim": 16}
    random_model(type(FAMILIES["llama"])(**config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
