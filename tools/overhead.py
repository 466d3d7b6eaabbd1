"""Measures what telemetry costs, as a ratio of paired runs: python -m tools.overhead

Two servers of the demo model run side by side: one with all telemetry (metrics, spans to a collector, a JSON log line
for each request), one with none. To measure scrapes, one server with all telemetry is scraped 20 times a second or
not. The same load runs with and without in turns, and a pair of runs gives one ratio. Prints markdown: the mean ratio
with its 95 % confidence interval, and what each part of telemetry costs per request. What the causes of phases cost is
less than such pairs resolve: `tools.explain_cost` measures it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import EngineAccount, EventKind, Outcome, RequestRecord, WaitReason
from oaiserve.facts.times import RequestTimes
from oaiserve.facts.trace import TraceContext
from oaiserve.telemetry import logs
from oaiserve.telemetry.metrics import Measured, Metrics
from oaiserve.telemetry.recent import RecentRequests
from oaiserve.telemetry.recorder import Recorder
from oaiserve.telemetry.tracing import Tracing
from tools.load import StreamsLoad, StreamsResult
from tools.paired import interval, measure_pairs
from tools.server_process import exit_on_sigterm, free_port, running_oaiserve, running_process

COMPARED = ["telemetry", "scrapes"]
SCRAPES_PER_SECOND = 20  # as often as the Kubernetes endpoint picker polls


LOADS = {
    "streams": ("64 streams of 64 tokens", StreamsLoad(64, prompt_tokens=64, output_tokens=64)),
    "burst": ("256 requests of one token", StreamsLoad(256, prompt_tokens=32, output_tokens=1)),
}


def main() -> None:
    if sys.argv[1:2] == ["serve-without"]:
        return serve_without_telemetry(sys.argv[2:])
    if sys.argv[1:2] == ["collect"]:
        return collect(int(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of runs for each load (default 10)")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--compare", nargs="*", default=COMPARED, choices=COMPARED)
    arguments = parser.parse_args()
    exit_on_sigterm()
    print_parts()
    print("\n| with and without | load | tokens/s, ratio | ITL p99, ratio | pairs | tokens/s without |")
    print("|---|---|---|---|---|---|")
    for compared in arguments.compare:
        with servers(compared) as (with_url, without_url):
            for name in arguments.loads:
                print(row(compared, with_url, without_url, *LOADS[name], arguments.pairs), flush=True)


def row(compared: str, with_url: str, without_url: str, title: str, load: StreamsLoad, num_pairs: int) -> str:
    def run_with(seed: int) -> StreamsResult:
        with ExitStack() as stack:
            if compared == "scrapes":
                stack.enter_context(scraping(with_url))
            return load.run(with_url, seed)

    pairs = measure_pairs(run_with, lambda seed: load.run(without_url, seed), num_pairs)
    speeds = [a.tokens_per_second / b.tokens_per_second for a, b in pairs]
    gaps = [a.itl_p99_seconds / b.itl_p99_seconds for a, b in pairs if b.itl_p99_seconds]
    without = statistics.median(b.tokens_per_second for _, b in pairs)
    return f"| {compared} | {title} | {interval(speeds)} | {interval(gaps)} | {len(pairs)} | {without:.0f} |"


@contextmanager
def scraping(url: str) -> Iterator[None]:
    """Scrape in the block, by a process that uses the standard library: it takes a third of the CPU time of httpx."""
    program = (
        "import http.client, time\n"
        f"connection = http.client.HTTPConnection('{url.removeprefix('http://')}')\n"
        "while True:\n"
        "    before = time.monotonic()\n"
        "    connection.request('GET', '/metrics')\n"
        "    response = connection.getresponse()\n"
        "    assert response.status == 200 and response.read()\n"
        f"    time.sleep(max(0, {1 / SCRAPES_PER_SECOND} - (time.monotonic() - before)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            yield
        finally:
            assert process.poll() is None, "the scraper has failed"
            process.kill()


@contextmanager
def servers(compared: str) -> Iterator[tuple[str, str]]:
    """Run the server with what is compared and the server without it, and give their URLs."""
    port = free_port()
    collector_command = [sys.executable, "-m", "tools.overhead", "collect", str(port)]
    with running_process(collector_command, port) as collector, ExitStack() as stack:

        def start(*flags: str, program: tuple[str, ...] = ("oaiserve",)) -> str:
            environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
            server = running_oaiserve("--log-format", "json", *flags, program=("-m", *program), env=environment)
            return stack.enter_context(server).url

        url = start()
        if compared == "scrapes":
            yield url, url
        else:
            yield url, start(program=("tools.overhead", "serve-without"))


def print_parts() -> None:
    """Print what each part costs for a streamed request of 64 tokens, by itself on one thread, in microseconds."""
    record = a_record()
    with open(os.devnull, "w") as sink:
        logs.configure(form="json", stream=sink)
        metrics = Metrics(Measured("demo", "0", EngineNumbers), vllm=True, epoch_offset_ns=0)
        tracing = Tracing(InMemorySpanExporter(), epoch_offset_ns=0, version="0", count_spans=lambda *_: None)
        recorder, recent = Recorder({}, lambda _: None), RecentRequests(256, 0)
        rows = [
            ("event loop", "hand the record over", lambda: recorder.record(record)),
            ("telemetry thread", "metrics", lambda: metrics.observe(record)),
            ("telemetry thread", "spans", lambda: tracing.record(record)),
            ("telemetry thread", "log line", lambda: logs.log_request(record)),
            ("telemetry thread", "recent requests", lambda: recent.add(record)),
            ("engine thread", "its account", a_record),
        ]
        print("| thread | part | µs per request |\n|---|---|---|")
        for thread, part, call in rows:
            print(f"| {thread} | {part} | {microseconds(call):.1f} |", flush=True)
        metrics.observe(record)
        for form in ("text/plain", "application/openmetrics-text"):
            took = scrape_microseconds(metrics, record, form)
            print(f"| worker thread | a page after one more request, {form} | {took:.0f} |")
        recorder.close(60)
        tracing.close(5)
        logs.configure("warning")


def microseconds(call: Callable[[], object], number: int = 2000) -> float:
    return min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6


def scrape_microseconds(metrics: Metrics, record: RequestRecord, accept: str, number: int = 200) -> float:
    took = []
    for _ in range(number):
        metrics.observe(record)
        before = time.perf_counter()
        metrics.render(accept)
        took.append(time.perf_counter() - before)
    return statistics.median(took) * 1e6


def a_record(num_tokens: int = 64) -> RequestRecord:
    """Make the record of a usual request. It takes about as long as the engine and the routes take to fill one."""
    account = EngineAccount(waits_ns={WaitReason.STEP_UNDER_WAY: 5_000_000}, num_choices=1, first_step=7)
    account.note(EventKind.PREFILL_CHUNK, 40_000_000, 0, start=0, tokens=64)
    account.note(EventKind.FIRST_TOKEN, 40_000_000, 0)
    for token in range(num_tokens - 1):
        account.inter_token_ns.append(20_000_000 + token)
    account.note(EventKind.FINISHED, 1_300_000_000, 0, reason="length")
    account.num_steps, account.model_ns = num_tokens, 1_200_000_000
    return RequestRecord(
        request_id="req-0123456789abcdef0123456789abcdef",
        trace=TraceContext.from_headers(None, None),
        times=RequestTimes(*(1_000, 400_000, 500_000, 1_500_000, 6_500_000, 40_000_000, 1_300_000_000, 1_300_400_000)),
        outcome=Outcome.FINISHED,
        operation="text_completion",
        http_method="POST",
        http_route="/v1/completions",
        http_status=200,
        model="demo",
        stream=True,
        prompt_tokens=64,
        completion_tokens=num_tokens,
        finish_reasons=("length",),
        params={"temperature": 0, "max_tokens": num_tokens},
        account=account,
    )


def serve_without_telemetry(arguments: list[str]) -> None:
    """Run the server with parts in place of its telemetry that do nothing."""
    from oaiserve import app, cli
    from oaiserve.facts import record

    class NoTelemetry:
        recent = live = None

        def __init__(self, **_: Any) -> None: ...
        def record(self, _: Any) -> None: ...
        def observe_event_loop_lag(self, _: float) -> None: ...
        def count_refused_access(self, _: Any) -> None: ...
        def is_sampled(self, _: Any) -> bool:
            return False

        def close(self, _: float) -> bool:
            return True

        def render(self, _: str | None) -> tuple[bytes, str]:
            return b"", "text/plain"

    app.Telemetry = NoTelemetry  # type: ignore[assignment,misc]
    record.EngineAccount.note = lambda *_, **__: None  # type: ignore[method-assign]
    cli.main(arguments)


def collect(port: int) -> None:
    """Run a collector that reads what is exported to it and drops it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
