"""A server with two front processes: one port, one set of accounts, and ends of processes."""

import json
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

import httpx
import psutil

from loadtest.metrics_page import values_of
from tests.e2e.live import LiveServer, serve_process
from tests.waiting import wait_until

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
        assert server.process.wait(60) == 0
