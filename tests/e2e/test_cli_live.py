"""Tests the command as a process: a failed start is one sentence and exit code 2, and SIGTERM lets a stream finish."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import torch
from safetensors.torch import save_file

from oaiserve.facts.times import PHASES
from tests.e2e.conftest import STOP_SECONDS, clean_environment, serve_process
from tests.models.decoders import byte_tokenizer
from tests.telemetry.collector import running_collector

# -- starts that fail -------------------------------------------------------------------------------------------------


def refusal(*argv: str) -> str:
    """Run `oaiserve serve` and return the sentence with which it fails. Only the line about loading may precede it."""
    command = [sys.executable, "-m", "oaiserve", "serve", *argv]
    result = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=300)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    *before, sentence = result.stderr.splitlines()
    assert sentence.startswith("oaiserve: ")
    assert [line for line in before if "Loading" not in line] == []
    return sentence


def test_a_busy_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert f"Cannot listen on 127.0.0.1 port {port}: Address already in use." in refusal("demo", "--port", port)


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    sentence = refusal(str(tmp_path), "--port", "0")
    assert f"'{tmp_path}' cannot be served: it is an encoder-decoder model" in sentence


# -- shutdown ---------------------------------------------------------------------------------------------------------

TRACE_ID, PARENT_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
NUM_TOKENS = 3000  # so many that a signal finds the stream under way


def test_sigterm_lets_a_stream_finish_with_all_its_spans(small_model: Path, tmp_path: Path) -> None:
    body = {"prompt": "Hi", "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    traceparent = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"
    with running_collector() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "NO_PROXY": "127.0.0.1"}
        env["OMP_NUM_THREADS"] = "1"  # a second thread makes so small a model slower when the cores are busy
        with (
            serve_process(str(small_model), tmp_path / "log", "--kv-blocks", "1024", env=env) as server,
            httpx.Client(base_url=server.url, headers={"traceparent": traceparent}, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            first = next(lines)
            server.process.terminate()
            *chunks, last, done = [line.removeprefix("data: ") for line in (first, *lines) if line]
            assert server.process.wait(STOP_SECONDS) == 0
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert not any("error" in json.loads(chunk) for chunk in chunks)
    log = server.log()
    messages = [line["message"] for line in log]
    (end,) = (line for line in log if line["logger"] == "oaiserve.request")
    assert (end["outcome"], end["completion_tokens"]) == ("finished", NUM_TOKENS)
    assert messages.index("Shutting down. Requests running: 1, given 30 s") < log.index(end)
    assert "Shutting down. Requests finished: 1, cut off: 0" in messages
    assert [line for line in log if line["level"] != "INFO"] == []
    spans = {span.name: span for span in collector.spans}
    assert spans.keys() >= set(PHASES)
    assert {span.trace_id for span in collector.spans} == {TRACE_ID.to_bytes(16)}
    assert spans["POST /v1/completions"].parent_span_id == PARENT_ID.to_bytes(8)
