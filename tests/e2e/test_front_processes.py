"""A server with two front processes: one port, one set of accounts, and ends of processes."""

import json
import os
import signal
import ssl
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event

import httpx
import psutil
import pytest
from openai import OpenAI

from loadtest.metrics_page import values_of
from oaiserve.plugins.keys.key_table import KeyTable
from tests import forking
from tests.batching import answers, begin, ended, line
from tests.e2e.live import LiveServer, clean_environment, serve_process
from tests.models.adapters import write_adapter
from tests.waiting import wait_until
from tools.server_process import free_port, running_group

BODY = {"prompt": "Once upon", "max_tokens": 800, "seed": 7, "temperature": 1, "ignore_eos": True, "stream": True}


def processes(server: LiveServer, name: str) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.process.pid).children() if name in child.cmdline()]


def streamed(server: LiveServer, number: int, begun: Event | None = None) -> str | None:
    """Return the text of a stream, or None if its connection was lost."""
    texts = []
    with suppress(httpx.RemoteProtocolError, httpx.ReadError):
        headers = {"x-request-id": f"stream-{number}"}
        with server.http() as http, http.stream("POST", "/v1/completions", json=BODY, headers=headers) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if begun is not None and len(texts) == 20:
                    begun.set()
                if line == "data: [DONE]":
                    return "".join(texts)
    return None


def with_streams(server: LiveServer, process: psutil.Process, number: signal.Signals) -> Sequence[str | None]:
    """End a process in the middle of five streams, and return what came of them."""
    begun = [Event() for _ in range(5)]
    with ThreadPoolExecutor(len(begun)) as pool:
        reading = [pool.submit(streamed, server, each, event) for each, event in enumerate(begun)]
        assert all(event.wait(60) for event in begun)
        process.send_signal(number)
        return [each.result() for each in reading]


def test_two_front_processes_serve_as_one_and_lose_only_their_connections(small_model: Path, tmp_path: Path) -> None:
    flags = ("--front-processes", "2", "--max-running", "16", "--response-store", str(tmp_path / "store"))
    with serve_process(str(small_model), tmp_path / "log", *flags) as server:
        expected = streamed(server, 100)
        first, second = (processes(server, f"front {number}")[0] for number in range(2))
        first.send_signal(signal.SIGTERM)  # A service manager sends this to all processes: the main one decides.
        assert with_streams(server, processes(server, "engine-process")[0], signal.SIGKILL) == [expected] * 5
        answers = with_streams(server, first, signal.SIGSEGV)
        assert {*answers} <= {expected, None}
        num_lost = answers.count(None)
        with server.http() as http:
            chat = {"input": "Hello", "max_output_tokens": 5}
            stored = http.post("/v1/responses", json=chat).json()  # The main process answers this, and what follows.
            assert http.get(f"/v1/responses/{stored['id']}").json()["status"] == stored["status"]
            assert http.post("/v1/chat/completions", json={"messages": 5}).status_code == 400
            assert http.get("/v1/nothing").status_code == 404
            # The record of a request comes from its front process, soon after the answer.
            num_ended = 13 - num_lost
            wait_until(lambda: sum(values_of(http.get("/metrics").text, "oaiserve_requests_total")) == num_ended)
            rows = http.get("/debug/requests?limit=100").json()["requests"]
            streams = [row for row in rows if row["request_id"].startswith("stream-")]
            assert len(streams) == 11 - num_lost
            for row in streams:
                assert sum(phase["duration_ns"] for phase in row["phases"]) == row["duration_ns"]
            assert "oaiserve_engine_restarts_total 1.0" in http.get("/metrics").text
        third = processes(server, "front 0")[0]
        assert third.pid != first.pid
        assert second.is_running()
        assert server.terminate() == 0
    assert not any(each.is_running() for each in (second, third))
    log = server.log_file.read_text()
    assert "The process front 0 has ended by SIGSEGV, with its connections. Another one is started" in log


def test_a_shutdown_lets_streams_of_front_processes_end(small_model: Path, tmp_path: Path) -> None:
    with serve_process(str(small_model), tmp_path / "log", "--front-processes", "2") as server:
        begun = Event()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(streamed, server, 1, begun)
            assert begun.wait(60)
            os.kill(server.process.pid, signal.SIGTERM)
            assert reading.result() is not None
        assert server.process.wait() == 0


class Clients:
    """Clients of a server with a certificate. Each has connections of its own, which any front process may get."""

    def __init__(self, port: int, certificate: Path) -> None:
        self._url = f"https://localhost:{port}"
        self._context = ssl.create_default_context(cafile=certificate)

    def http(self, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self._url, verify=self._context, headers=headers, timeout=60, trust_env=False)

    @contextmanager
    def openai(self, key: str) -> Iterator[OpenAI]:
        with self.http(key) as http:
            yield OpenAI(base_url=f"{self._url}/v1", api_key=key, http_client=http, max_retries=0)

    def is_ready(self) -> bool:
        with suppress(httpx.TransportError), self.http("none") as http:
            return http.get("/ready").is_success
        return False

    def complete(self, key: str, model: str) -> httpx.Response:
        body = {"model": model, "prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        with self.http(key) as http:
            return http.post("/v1/completions", json=body)

    def texts(self, key: str, model: str) -> set[str]:
        """Return the texts of one answer over several connections."""
        return {self.complete(key, model).json()["choices"][0]["text"] for _ in range(6)}


@pytest.mark.openssl
def test_keys_adapters_batches_and_other_routes_are_those_of_one_server(
    small_model: Path,
    tmp_path: Path,
    certificates: dict[str, Path],
) -> None:
    store = tmp_path / "store"
    with closing(KeyTable(store)) as table:
        key = table.add("any", {"role": "admin"})
        limited = table.add("limited", {"requests_per_day": 3})
    shapes = {f"model.layers.{layer}.self_attn.q_proj": (64, 32) for layer in range(3)}
    first = write_adapter(tmp_path / "adapters" / "first", shapes, size=4.0)
    write_adapter(tmp_path / "adapters" / "second", shapes, size=4.0, lora_alpha=32)
    port = free_port()
    command = (sys.executable, "-m", "oaiserve", "serve", small_model, "--port", str(port), "--front-processes", "2")
    flags = ("--served-model-name", "small", "--lora", f"first={first}", "--lora-dir", tmp_path / "adapters")
    flags += ("--tls-certificate", certificates["sound"], "--tls-key", certificates["sound"], "--stored-keys")
    flags += ("--response-store", store, "--log-format", "json")
    with running_group(
        (*command, *map(str, flags)),
        env=clean_environment(),
        log_file=tmp_path / "log",
        stop_limit_seconds=60,
        start=forking.start,
    ) as (process, _):
        clients = Clients(port, certificates["sound"])
        wait_until(lambda: process.poll() is not None or clients.is_ready())

        # Keys and their limits are those of the server.
        assert clients.complete("wrong", "small").status_code == 401
        statuses = [clients.complete(limited, "small").status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]

        # Adapters are those of the server, also such as are loaded while it runs.
        (plain,) = clients.texts(key, "small")
        (adapted,) = clients.texts(key, "first")
        assert adapted != plain
        with clients.http(key) as http:
            assert http.post("/v1/load_lora_adapter", json={"lora_name": "b", "lora_path": "second"}).is_success
            wait_until(lambda: all(clients.complete(key, "b").is_success for _ in range(6)))
            (other,) = clients.texts(key, "b")
            assert other not in (plain, adapted)
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": "b"}).is_success
            wait_until(lambda: {clients.complete(key, "b").status_code for _ in range(6)} == {404})

        # The main process answers other routes.
        with clients.openai(key) as sdk:
            batch = ended(sdk, begin(sdk, *(line(number, model="small") for number in range(3))))
            assert [one["custom_id"] for one in answers(sdk, batch.output_file_id)] == ["line-0", "line-1", "line-2"]
            events = [*sdk.responses.create(model="small", input="Hello", max_output_tokens=5, stream=True)]
            assert events[-1].response.usage.output_tokens
            assert sdk.responses.retrieve(events[-1].response.id).id == events[-1].response.id
        with clients.http(key) as http:
            asked = {"model": "small", "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}
            answer = http.post("/v1/messages", json=asked | {"stream": True})
            assert answer.text.rstrip().rpartition("data: ")[2] == '{"type":"message_stop"}'
            upgrade = {"connection": "upgrade", "upgrade": "websocket"}
            refused = http.get("/v1/responses", headers=upgrade)
            assert refused.status_code == 405
            assert "--front-processes" in refused.json()["error"]["message"]
