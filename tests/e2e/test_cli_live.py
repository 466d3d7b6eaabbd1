"""A server as a process: SIGTERM lets a stream finish with all its spans."""

import json
from pathlib import Path

import httpx

from oaiserve.commands.servers import running
from oaiserve.facts.times import TEXT_PHASES
from tests.e2e.live import STOP_SECONDS, serve_process
from tests.telemetry.collector import running_collector

TRACE_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736
PARENT_ID = 0x00F067AA0BA902B7
NUM_TOKENS = 3000  # so many that a signal finds the stream under way


def test_sigterm_lets_a_stream_finish_with_all_its_spans(small_model: Path, tmp_path: Path) -> None:
    body = {"prompt": "Hi", "stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    traceparent = f"00-{TRACE_ID:032x}-{PARENT_ID:016x}-01"
    flags = ("--kv-cache-memory", "12MiB", "--drain-timeout-seconds", "3600")  # however busy the machine is
    with running_collector() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "NO_PROXY": "127.0.0.1"}
        with (
            serve_process(str(small_model), tmp_path / "log", *flags, env=env) as server,
            httpx.Client(base_url=server.url, headers={"traceparent": traceparent}, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            lines = answer.iter_lines()
            assert server.url in [listed.url for listed in running()]
            first = next(lines)
            server.process.terminate()
            *chunks, last, done = [line.removeprefix("data: ") for line in (first, *lines) if line]
            assert server.process.wait(STOP_SECONDS) == 0
    assert server.url not in [listed.url for listed in running()]
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert not any("error" in json.loads(chunk) for chunk in chunks)
    log = server.log()
    messages = [line["message"] for line in log]
    (end,) = (line for line in log if line["logger"] == "oaiserve.request")
    assert (end["outcome"], end["completion_tokens"]) == ("finished", NUM_TOKENS)
    assert messages.index("Shutting down. Running requests: 1, with up to 3600 s to finish") < log.index(end)
    assert "Shut down. Requests finished: 1, cut off: 0" in messages
    assert [line for line in log if line["level"] != "INFO"] == []
    spans = {span.name: span for span in collector.spans}
    assert spans.keys() >= set(TEXT_PHASES)
    assert {span.trace_id for span in collector.spans} == {TRACE_ID.to_bytes(16)}
    assert spans["POST /v1/completions"].parent_span_id == PARENT_ID.to_bytes(8)
