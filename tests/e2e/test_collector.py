"""Tests a server whose collector is away for a while: requests are not affected, and lost spans are counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from oaiserve.facts.times import PHASES
from oaiserve.telemetry import names
from tests.e2e.conftest import serve_process
from tests.telemetry.collector import Collector, running_collector
from tests.telemetry.pages import samples_on
from tests.waiting import wait_until

NUM_CLIENTS = 4
BODY = {"prompt": "Hi", "stream": True, "max_tokens": 20, "ignore_eos": True}
REQUESTS = names.REQUESTS.name.removesuffix("_total")  # over OTLP
ENVIRONMENT = {
    "OTEL_METRIC_EXPORT_INTERVAL": "200",
    "OTEL_BSP_SCHEDULE_DELAY": "100",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "2",  # seconds after which the exporter drops a batch
    "NO_PROXY": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Clients:
    """Clients that send one request after the other, each under its own trace and span, until `stop` is set."""

    url: str
    stop: Event = field(default_factory=Event)
    answers: list[list[str]] = field(default_factory=list)  # the events of each

    def send_requests(self, number: int) -> None:
        headers = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=60) as http:
            while not self.stop.is_set():
                with http.stream("POST", "/v1/completions", json=BODY) as answer:
                    assert answer.status_code == 200
                    self.answers.append([line.removeprefix("data: ") for line in answer.iter_lines() if line])

    def wait_for_more(self) -> None:
        """Wait for three more answers per client."""
        enough = len(self.answers) + 3 * NUM_CLIENTS
        wait_until(lambda: len(self.answers) >= enough)


@contextmanager
def running_clients(url: str) -> Iterator[Clients]:
    clients = Clients(url)
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        running = [threads.submit(clients.send_requests, number) for number in range(1, NUM_CLIENTS + 1)]
        try:
            yield clients
        finally:
            clients.stop.set()
    for client in running:
        client.result()


@dataclass
class Outage:
    """The answers, spans, metrics and log lines from before, during and after the time without a collector."""

    clients: Clients
    before: Collector
    after: Collector
    num_spans: Counter[str]  # on /metrics, by result, once all had been exported or lost
    log: list[dict[str, Any]]
    exit_code: int

    @property
    def spans(self) -> list[Span]:
        return self.before.spans + self.after.spans

    def lines(self, module: str) -> list[tuple[str, str]]:
        """Return level and message of each line that this module of telemetry logged."""
        logger = f"oaiserve.telemetry.{module}"
        return [(line["level"], line["message"]) for line in self.log if line["logger"] == logger]


@pytest.fixture(scope="module")
def outage(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outage:
    log_file = tmp_path_factory.mktemp("outage") / "log"
    with ExitStack() as collectors:
        before = collectors.enter_context(running_collector())
        env = ENVIRONMENT | {"OTEL_EXPORTER_OTLP_ENDPOINT": before.url}
        with serve_process(str(small_model), log_file, "--kv-blocks", "1024", env=env) as server:
            with running_clients(server.url) as clients:
                clients.wait_for_more()
                wait_until(lambda: has_spans_and_metrics(before))
                collectors.close()
                clients.wait_for_more()
                wait_until(lambda: all(part in log_file.read_text() for part in ("are being lost", "do not reach")))
                wait_for_another_loss(server.url)
                wait_for_another_loss(server.url)
                after = collectors.enter_context(running_collector(before.server.server_port))
                clients.wait_for_more()
                wait_until(lambda: has_spans_and_metrics(after))
            wait_until(lambda: counted(server.url, names.REQUESTS).total() == len(clients.answers))
            wait_until(lambda: num_pending(counted(server.url, names.SPANS)) == 0)
            num_spans = counted(server.url, names.SPANS)
            exit_code = server.terminate()
        return Outage(clients, before, after, num_spans, server.log(), exit_code)


def counted(url: str, metric: names.Metric) -> Counter[str]:
    """Return a counter of /metrics by its label `result` or, for requests, `outcome`."""
    numbers: Counter[str] = Counter()
    for (name, labels), value in samples_on(httpx.get(f"{url}/metrics", timeout=60).content).items():
        if name == metric.name:
            numbers[dict(labels).get("result") or dict(labels)["outcome"]] += int(value)
    return numbers


def wait_for_another_loss(url: str) -> None:
    num_failed = counted(url, names.SPANS)["failed"]
    wait_until(lambda: counted(url, names.SPANS)["failed"] > num_failed)


def has_spans_and_metrics(collector: Collector) -> bool:
    return bool(collector.spans and collector.metrics and REQUESTS in collector.last_metrics())


def num_pending(num_spans: Counter[str]) -> int:
    return num_spans["ended"] - num_spans["exported"] - num_spans["failed"] - num_spans["dropped"]


def test_every_request_got_its_complete_answer(outage: Outage) -> None:
    for *_, last, done in outage.clients.answers:
        assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    ends = [line for line in outage.log if line["logger"] == "oaiserve.request"]
    assert len(ends) == len(outage.clients.answers)
    for end in ends:
        assert (end["outcome"], end["completion_tokens"]) == ("finished", BODY["max_tokens"])
        assert all(end[f"{phase}_ms"] >= 0 for phase in PHASES)
    assert outage.exit_code == 0


def test_every_exported_trace_is_complete_and_continues_that_of_its_client(outage: Outage) -> None:
    children: dict[bytes, list[Span]] = {}
    for span in outage.spans:
        children.setdefault(span.parent_span_id, []).append(span)
    servers = [span for span in outage.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert len(outage.spans) == (2 + len(PHASES)) * len(servers)
    for server in servers:
        (inner,) = children[server.span_id]
        phases = sorted(children[inner.span_id], key=lambda span: PHASES.index(span.name))
        assert [span.name for span in phases] == list(PHASES)
        assert {span.trace_id for span in (inner, *phases)} == {server.trace_id}
        assert int.from_bytes(server.parent_span_id) == int.from_bytes(server.trace_id) in range(1, NUM_CLIENTS + 1)


def test_every_span_is_counted_as_exported_or_lost(outage: Outage) -> None:
    num_spans = outage.num_spans
    assert num_spans["ended"] == (2 + len(PHASES)) * len(outage.clients.answers)
    assert num_pending(num_spans) == 0
    assert num_spans["failed"] > 0
    # Spans count as failed, too, if the collector has them but its response did not arrive.
    assert num_spans["exported"] <= len(outage.spans) < num_spans["ended"]


def test_metrics_after_the_outage_include_the_requests_during_it(outage: Outage) -> None:
    num_before, num_after = (
        sum(point.as_double + point.as_int for point in collector.last_metrics()[REQUESTS].sum.data_points)
        for collector in (outage.before, outage.after)
    )
    assert 0 < num_before < num_after == len(outage.clients.answers)


def test_each_change_of_the_connection_is_one_line_in_the_log(outage: Outage) -> None:
    (lost, *again) = outage.lines("span_export")
    assert lost[0] == "WARNING"
    assert lost[1].startswith("Spans are being lost: ")
    assert [level for level, _ in again] in ([], ["INFO"])  # logged if no span was lost for ten seconds
    failing, works = outage.lines("otlp_metrics")
    assert failing[0] == "WARNING"
    assert failing[1].startswith("Metrics do not reach the collector: ")
    assert works == ("INFO", "Metrics reach the collector again.")
    assert sum(line["level"] != "INFO" for line in outage.log) == 2
