"""Tests that a server process whose model fails ends all requests with an error, logs the reason, and exits with 1."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import httpx

from tests.e2e.conftest import STOP_SECONDS, serve_process

FAILING_SEED = 13
# The command with a model that fails on the fourth token of a request with that seed.
FAILING_SERVER = f"""
import sys

from oaiserve.cli import main
from oaiserve.engine.model.runner import ModelRunner

launch = ModelRunner.launch


def fail_or_launch(self, step):
    sequences = [chunk.sequence for chunk in step.chunks]
    if any(sequence.params.seed == {FAILING_SEED} and sequence.num_generated == 3 for sequence in sequences):
        raise RuntimeError("the device is gone")
    return launch(self, step)


ModelRunner.launch = fail_or_launch
sys.exit(main())
"""
MESSAGE = "The engine has stopped after an internal error; the server must be restarted."


def test_a_server_whose_model_fails_answers_all_requests_and_exits_with_1(small_model: Path, tmp_path: Path) -> None:
    body = {"prompt": "Hi", "max_tokens": 15_000, "ignore_eos": True}
    flags, env = ("--kv-blocks", "2000"), {"OMP_NUM_THREADS": "1"}
    with (
        serve_process(str(small_model), tmp_path / "log", *flags, env=env, program=("-c", FAILING_SERVER)) as server,
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
    assert (whole.status_code, whole.json()["error"]["message"]) == (500, MESSAGE)
    assert (json.loads(error)["error"]["message"], done) == (MESSAGE, "[DONE]")
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
    errors = [line for line in server.log() if line["level"] == "ERROR"]
    assert [line["message"] for line in errors] == [
        "The engine has stopped",
        "The engine has stopped (RuntimeError: the device is gone), so the server ends",
    ]
    assert "fail_or_launch" in errors[0]["exception"]  # the traceback
