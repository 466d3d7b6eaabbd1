"""The client with real processes and sockets, against the null server."""

import asyncio
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import monotonic_ns
from typing import Any

import httpx
import pytest

from loadtest.arrivals import Arrivals
from loadtest.ceiling import null_server
from loadtest.cli import main
from loadtest.experiment import HttpExperiment
from loadtest.null_server import NullOptions, NullServer
from loadtest.sse import DONE, EventSplitter
from loadtest.transport import StampedBackend, StampedTransport

FIRST = 0.05
GAP = 0.01


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    flags = ["--first-seconds", str(FIRST), "--gap-seconds", str(GAP), "--tokens-per-event", "3"]
    with null_server(*flags) as url:
        yield url


async def test_a_stamp_is_within_two_milliseconds_of_the_servers_write(url: str) -> None:
    """Client and server read the same clock, so the difference is the time of the network and the client."""
    delays_ns: list[int] = []
    transport = StampedTransport(StampedBackend(monotonic_ns), None)
    async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
        body = {"prompt": "a", "max_tokens": 90, "stream": True}
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            stream = response.extensions["network_stream"]
            splitter = EventSplitter()
            async for part in response.aiter_raw():
                for event in splitter.feed(part):
                    if event != DONE and "sent_ns" in (message := json.loads(event)):
                        delays_ns.append(stream.read_ns - message["sent_ns"])
    assert len(delays_ns) == 30
    assert 0 < min(delays_ns) < 2_000_000  # on a busy machine, most of them wait for a core


def test_the_null_server_answers_other_clients(url: str) -> None:
    content = [{"type": "text", "text": "one two"}, {"type": "text", "text": " three"}]
    messages = [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "user", "content": content}]
    with httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/chat/completions", json={"messages": messages, "max_completion_tokens": 3})
    assert answer.json()["usage"] == {"prompt_tokens": 3, "completion_tokens": 3}


def run_load(tmp_path: Path, url: str, *flags: str) -> Any:
    """Run `loadtest run`, and return its report."""
    path = tmp_path / "report.json"
    assert main(["run", "--url", url, "--json", str(path), *flags]) == 0
    return json.loads(path.read_text())


def test_several_processes_measure_the_delays_of_the_null_server(tmp_path: Path, url: str) -> None:
    html = tmp_path / "report.html"
    samples = tmp_path / "samples.jsonl"
    report = run_load(
        tmp_path, f"{url}/v1/", "--no-calibrate", "--processes", "2", "--concurrency", "4", "--num-requests", "12",
        "--repeats", "2", "--max-new-tokens", "20", "--html", str(html), "--samples", str(samples),
    )  # fmt: skip
    for run in report["points"][0]["runs"]:
        metrics = run["metrics"]
        times = metrics["distributions"]
        assert (metrics["num_ok"], metrics["prompt_tokens"], metrics["completion_tokens"]) == (12, 12 * 128, 12 * 20)
        assert metrics["tokens_per_event"] == pytest.approx(20 / 7)
        # Timers are never early by more than a millisecond. How late they are depends on the load of the machine: the
        # upper bounds are only for wrong units. A late first token is nearer to the last one.
        assert FIRST - 0.001 < times["ttft"]["p50"] < FIRST + 2
        assert 0 <= times["tpot"]["p50"] < 6 * GAP / 17 + 2
        assert FIRST + 6 * GAP - 0.001 < times["latency"]["p50"] < FIRST + 6 * GAP + 4
        assert len(run["client"]["processes"]) == 2
    assert html.read_text().startswith("<!doctype html>")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == 24
    assert len({row["trace_id"] for row in rows}) == 24
    tpots = [request["tpot"] for run in report["points"][0]["runs"] for request in run["requests"]]
    # The first event has three of the 20 tokens.
    spans_ns = [row["event_ns"][-1] - row["event_ns"][0] for row in rows]
    assert tpots == [pytest.approx(span_ns / 17e9) for span_ns in spans_ns]


def test_a_run_whose_samples_find_no_room_is_reported_all_the_same(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    flags = ["--no-calibrate", "--num-requests", "2", "--max-new-tokens", "2", "--repeats", "2", "--json", str(path)]
    assert main(["run", "--url", url, *flags, "--samples", "/dev/full"]) == 2
    assert "--samples is '/dev/full', which cannot be written: No space left on device.\n" in capsys.readouterr().err
    assert len(json.loads(path.read_text())["points"][0]["runs"]) == 2


def test_ctrl_c_reports_the_points_that_ended(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_point = HttpExperiment.run_point

    def interrupted(experiment: HttpExperiment, arrivals: Arrivals, *more: Any) -> dict[str, Any]:
        if arrivals.concurrency == 2:
            raise KeyboardInterrupt
        return run_point(experiment, arrivals, *more)

    monkeypatch.setattr(HttpExperiment, "run_point", interrupted)
    path = tmp_path / "report.json"
    flags = ["run", "--url", url, "--no-calibrate", "--num-requests", "2", "--max-new-tokens", "2", "--json", str(path)]
    assert main([*flags, "--sweep", "1,2"]) == 130
    report = path.read_text()
    assert [point["label"] for point in json.loads(report)["points"]] == ["1 user"]
    assert "Stopped after 1 of 2 points." in capsys.readouterr().err
    assert main([*flags, "--concurrency", "2"]) == 130
    assert path.read_text() == report, "a run without results has replaced an earlier report"


def test_a_server_that_answers_nothing_ends_the_search_with_its_error(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--no-calibrate", "--timeout-seconds", "0.01", "--trial-seconds", "0.1"]
    assert main(["find-max", "--url", url, "--slo", "ttft:1s", "--first-rate", "50", *flags]) == 1
    out = capsys.readouterr().out
    assert "A decision needs at least 73 requests." in out
    assert "Ended early: no request succeeded at 50 requests/s; timeout, before_first_token: " in out
    assert "no rate that was tried" in out


def test_a_rate_that_cannot_hold_any_more_is_dropped_within_its_run(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine this client sends late, which would end the search for another reason.
    healthy = {"verdict": "valid", "reasons": [], "notes": []}
    monkeypatch.setattr("loadtest.experiment.verdict", lambda *_, **__: healthy)
    path = tmp_path / "search.json"
    html = tmp_path / "search.html"
    flags = [
        "--no-calibrate",
        "--first-rate",
        "10",
        "--max-seconds",
        "8",
        "--trial-seconds",
        "1",
        "--json",
        str(path),
        "--html",
        str(html),
    ]
    assert main(["find-max", "--url", url, "--slo", "ttft:1ms", *flags]) == 1
    search = json.loads(path.read_text())
    (step,) = search["steps"]
    assert step["holds"] is False
    assert 5 <= step["num_judged"] == step["missed"]["ttft"] < 73
    out = capsys.readouterr().out
    assert "10 requests/s: misses    0 of " in out
    assert "ttft missed by " in out
    assert search["problem"].startswith("a run at 5 requests/s takes 14.6 s, and ")
    assert "No rate holds" in html.read_text()


def test_a_search_needs_enough_requests(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"prompt": "q"}\n' * 20)
    flags = ["find-max", "--url", url, "--slo", "ttft:1s", "--no-calibrate"]
    for options, few in (
        (["--num-requests", "16"], "--num-requests is 16, but must be at least 73"),
        (["--requests", str(file)], f"--requests: '{file}' has 20 requests, but must have at least 73"),
    ):
        assert main([*flags, *options]) == 2
        assert few in capsys.readouterr().err


@contextmanager
def tls_server(certificate: Path) -> Iterator[str]:
    """Run a null server with this certificate in a thread, and yield its URL."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    server = NullServer(NullOptions())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(server.start(tls=context))
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"https://localhost:{server.port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(server.close())
        loop.close()


@pytest.mark.openssl
def test_a_certificate_is_trusted_by_a_flag_or_by_a_variable(
    tmp_path: Path,
    certificates: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    certificate = certificates["sound"]
    flags = ("--no-calibrate", "--num-requests", "2", "--max-new-tokens", "2")
    with tls_server(certificate) as url:
        assert main(["run", "--url", url, *flags]) == 2
        refused = capsys.readouterr().err
        by_flag = run_load(tmp_path, url, *flags, "--ca-certificate", str(certificate))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        by_variable = run_load(tmp_path, url, *flags)
    assert "whose certificate is not trusted: " in refused
    assert "--ca-certificate or SSL_CERT_FILE." in refused
    for report in (by_flag, by_variable):
        assert report["points"][0]["runs"][0]["metrics"]["num_ok"] == 2


def test_a_second_run_has_other_prompts(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--no-calibrate", "--num-requests", "1", "--max-new-tokens", "1")
    first, second, third = (
        run_load(tmp_path, url, *flags, *more)["workload"]["seed"] for more in ((), (), ("--seed", "7"))
    )
    assert first != second
    assert third == 7
    out = capsys.readouterr().out
    assert all(f"--seed {seed}\n" in out for seed in (first, second, third))


def test_messages_need_the_chat_endpoint(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "q"}]}\n')
    assert main(["run", "--url", url, "--no-calibrate", "--requests", str(file)]) == 2
    assert "which need --endpoint chat" in capsys.readouterr().err


def test_an_open_loop_reaches_its_rate_and_the_ceiling_is_measured(tmp_path: Path, url: str) -> None:
    flags = ["--arrival", "constant", "--rate", "50", "--num-requests", "25", "--endpoint", "chat"]
    run = run_load(tmp_path, url, *flags)["points"][0]["runs"][0]
    client = run["client"]
    assert client["offered_requests_per_second"] == pytest.approx(50)
    # The schedule has 24 gaps of 20 ms. On a busy machine the first and the last request may leave late.
    lag_seconds = run["metrics"]["distributions"]["send_lag"]["max"]
    gaps_seconds = 24 / client["achieved_requests_per_second"]
    assert 0.48 - lag_seconds - 0.001 < gaps_seconds < 0.48 + lag_seconds + 0.001
    assert 0 < client["ceiling"]["event_cpu_seconds"] < client["ceiling"]["request_cpu_seconds"] < 0.1
    assert 0 < client["load_of_ceiling"] < 1
