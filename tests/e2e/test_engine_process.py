"""A server whose engine has a process of its own, which ends in the middle of answers."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import psutil

from tests.e2e.live import LiveServer, serve_process

STREAMED = {"prompt": "Once upon", "max_tokens": 3000, "seed": 7, "temperature": 1, "ignore_eos": True, "stream": True}
WHOLE = {"prompt": "The end", "max_tokens": 1500, "seed": 3, "n": 2, "logprobs": 1, "ignore_eos": True}


def engine_process(server: LiveServer) -> psutil.Process:
    (child,) = psutil.Process(server.process.pid).children()
    return child


def streamed(server: LiveServer, begun: Event | None = None) -> str:
    """Return the text of a stream."""
    with server.http() as http, http.stream("POST", "/v1/completions", json=STREAMED) as answer:
        texts = []
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
            if begun is not None and len(texts) == 20:
                begun.set()
        return "".join(texts)


def whole(server: LiveServer) -> Any:
    with server.http() as http:
        answer = http.post("/v1/completions", json=WHOLE).json()
    return answer["choices"], answer["usage"]


def test_answers_go_on_with_the_same_bytes_when_the_engine_process_ends(small_model: Path, tmp_path: Path) -> None:
    with serve_process(str(small_model), tmp_path / "log", "--engine-process", "on") as server:
        expected = streamed(server), whole(server)
        for number in (signal.SIGKILL, signal.SIGSEGV):
            process = engine_process(server)
            os.kill(process.pid, signal.SIGTERM)  # A service manager sends this to all processes: the front decides.
            begun = Event()
            with ThreadPoolExecutor(2) as pool:
                both = pool.submit(streamed, server, begun), pool.submit(whole, server)
                assert begun.wait(60)
                os.kill(process.pid, number)
                assert tuple(each.result() for each in both) == expected
        last = engine_process(server)
        with server.http() as http:
            assert http.get("/health").text == ""
            assert "oaiserve_engine_restarts_total 2.0" in http.get("/metrics").text
        assert server.terminate() == 0
    assert not last.is_running()
    log = server.log_file.read_text()
    assert "The engine process has ended by SIGKILL. Another one" in log
    assert "The engine process has ended by SIGSEGV. Another one" in log
