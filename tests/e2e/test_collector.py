"""Tests a server whose collector is away for a while: requests are not affected, and lost spans are counted."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from oaiserve.facts.times import PHASES
from oaiserve.telemetry import names
from tests.e2e.conftest import serve_process
from tests.e2e.load import streams
from tests.telemetry.collector import Collector, running_collector
from tests.telemetry.pages import samples_on
from tests.waiting import wait_until

NUM_CLIENTS = 4
NUM_TOKENS = 20
REQUESTS = names.REQUESTS.name.removesuffix("_total")  # over OTLP
ENVIRONMENT = {
    "OTEL_METRIC_EXPORT_INTERVAL": "200",
    "OTEL_BSP_SCHEDULE_DELAY": "100",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "2",  # seconds after which the exporter drops a batch
    "NO_PROXY": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Outage:
    """The answers, spans, metrics and log lines from before, during and after the time without a collector."""

    answers: list[list[str]]  # the events of each
    before: Collector
    after: Collector
    num_spans: Counter[str]  # on /metrics, by result, once all had been exported or lost
    log: list[dict[str, Any]]
    exit_code: int

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
            with streams(server.url, NUM_CLIENTS, NUM_TOKENS) as answers:
                wait_for_more(answers)
                wait_until(lambda: has_spans_and_metrics(before))
                collectors.close()
                wait_for_more(answers)
                wait_until(lambda: all(part in log_file.read_text() for part in ("are being lost", "do not reach")))
                wait_for_another_loss(server.url)
                wait_for_another_loss(server.url)
                after = collectors.enter_context(running_collector(before.server.server_port))
                wait_for_more(answers)
                wait_until(lambda: has_spans_and_metrics(after))
            wait_until(lambda: counted(server.url, names.REQUESTS).total() == len(answers))
            wait_until(lambda: num_pending(counted(server.url, names.SPANS)) == 0)
            num_spans = counted(server.url, names.SPANS)
            exit_code = server.terminate()
        return Outage(answers, before, after, num_spans, server.log(), exit_code)


def wait_for_more(answers: list[list[str]]) -> None:
    """Wait for three more answers per client."""
    enough = len(answers) + 3 * NUM_CLIENTS
    wait_until(lambda: len(answers) >= enough)


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
    for *_, last, done in outage.answers:
        assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
    ends = [line for line in outage.log if line["logger"] == "oaiserve.request"]
    assert len(ends) == len(outage.answers)
    for end in ends:
        assert (end["outcome"], end["completion_tokens"]) == ("finished", NUM_TOKENS)
        assert all(end[f"{phase}_ms"] >= 0 for phase in PHASES)
    assert outage.exit_code == 0


def test_every_span_is_counted_as_exported_or_lost(outage: Outage) -> None:
    num_spans = outage.num_spans
    assert num_spans["ended"] == (2 + len(PHASES)) * len(outage.answers)
    assert num_pending(num_spans) == 0
    assert num_spans["failed"] > 0
    # Spans count as failed, too, if the collector has them but its response did not arrive.
    assert num_spans["exported"] <= len(outage.before.spans + outage.after.spans) < num_spans["ended"]


def test_metrics_after_the_outage_include_the_requests_during_it(outage: Outage) -> None:
    num_before, num_after = (
        sum(point.as_double + point.as_int for point in collector.last_metrics()[REQUESTS].sum.data_points)
        for collector in (outage.before, outage.after)
    )
    assert 0 < num_before < num_after == len(outage.answers)


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
