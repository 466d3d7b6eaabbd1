"""Tests that a server process whose model fails ends all requests with an error, logs the reason, and exits with 1."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import httpx

from tests.e2e.conftest import FAILED, FAILING_LAUNCH, FAILING_SEED, STOP_SECONDS, program_that_launches, serve_process


def test_a_server_whose_model_fails_answers_all_requests_and_exits_with_1(small_model: Path, tmp_path: Path) -> None:
    body = {"prompt": "Hi", "max_tokens": 15_000, "ignore_eos": True}
    program = program_that_launches(FAILING_LAUNCH)
    flags, env = ("--kv-blocks", "2000"), {"OMP_NUM_THREADS": "1"}
    with (
        serve_process(str(small_model), tmp_path / "log", *flags, env=env, program=program) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream,
    ):
        lines = stream.iter_lines()
        first = next(lines)
        whole = http.post("/v1/completions", json=body | {"seed": FAILING_SEED})
        for late in ({"method": "GET", "url": "/ready"}, {"method": "POST", "url": "/v1/completions", "json": body}):
            with suppress(httpx.TransportError):  # the server may have stopped listening already
                assert http.request(**late).status_code == 503
        *chunks, error, done = [line.removeprefix("data: ") for line in (first, *lines) if line]
        exit_code = server.process.wait(STOP_SECONDS)
    assert exit_code == 1
    assert (whole.status_code, whole.json()["error"]["message"]) == (500, FAILED)
    assert (json.loads(error)["error"]["message"], done) == (FAILED, "[DONE]")
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
    errors = [line for line in server.log() if line["level"] == "ERROR"]
    assert [line["message"] for line in errors] == [
        "The engine has stopped",
        "The engine has stopped (RuntimeError: the device is gone), so the server ends",
    ]
    assert "changed_launch" in errors[0]["exception"]  # the traceback
