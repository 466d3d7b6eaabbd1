"""Tests that a real Prometheus reads both formats of /metrics without loss, and answers every documented query.

The server is real. Its KV cache is so small that the load of `load.py` moves every metric family.
"""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from oaiserve.telemetry import names, vllm_names
from tests.e2e.conftest import LiveServer, serve_process
from tests.e2e.load import Call, calls
from tests.e2e.prometheus import Labels, Prometheus, running_prometheus, text_format_proxy
from tests.telemetry.collector import Collector, running_collector
from tests.telemetry.pages import OPENMETRICS, TEXT, families

pytestmark = pytest.mark.prometheus

DOCS = Path(__file__).parents[2] / "docs"
QUERIES = [
    query
    for page in (DOCS / "slow-requests.md", DOCS / "telemetry.md")
    for query in re.findall(r"^```promql\n(.*?)\n```$", page.read_text(), re.DOTALL | re.MULTILINE)
]
FORMS = {"openmetrics": OPENMETRICS, "text": TEXT}  # by the name of the job that scrapes it
METRICS = (*names.METRICS, *names.GEN_AI_METRICS, *vllm_names.METRICS)


@dataclass
class Watched:
    """A server, and the Prometheus that has seen all of its load."""

    server: LiveServer
    prometheus: Prometheus
    collector: Collector
    trace_ids: list[str] = field(default_factory=list)  # of all requests

    def send(self, threads: ThreadPoolExecutor, http: httpx.Client, calls: Sequence[Call]) -> None:
        """Send all calls at once, and wait until Prometheus has counted them."""
        self.trace_ids += threads.map(lambda call: call.send(http), calls)
        self.prometheus.wait_for("sum by (job) (oaiserve_requests_total)", each_job(len(self.trace_ids)))

    def page(self, form: str) -> bytes:
        return httpx.get(f"{self.server.url}/metrics", headers={"accept": form}, timeout=60).content


def each_job(value: float) -> dict[Labels, float]:
    return {frozenset({("job", job)}): value for job in FORMS}


@pytest.fixture(scope="module")
def watched(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    flags = ("--kv-blocks", "20", "--max-step-tokens", "64", "--max-running", "8", "--served-model-name", "small")
    with running_collector() as collector:
        env = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "NO_PROXY": "127.0.0.1",
            "OMP_NUM_THREADS": "1",  # a second thread does not make so small a model faster
        }
        with (
            serve_process(str(small_model), folder / "server.log", *flags, env=env) as server,
            text_format_proxy(server.url) as text_url,
            running_prometheus(folder, {"openmetrics": server.url, "text": text_url}) as prometheus,
            ThreadPoolExecutor(32) as threads,
            httpx.Client(
                base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
            ) as http,
        ):
            watched = Watched(server, prometheus, collector)
            for round_ in (1, 2):  # a rate needs a series that exists before it grows
                watched.send(threads, http, list(calls(round_)))
            ended, exported = (f'oaiserve_spans_total{{result="{result}"}}' for result in ("ended", "exported"))
            prometheus.wait_for(f"sum by (job) ({ended} - ignoring (result) {exported})", each_job(0))
            yield watched


# -- what Prometheus stores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", FORMS)
def test_prometheus_has_every_value_of_the_page(watched: Watched, job: str) -> None:
    """Metrics that change without requests are left out."""
    host_seconds = names.ENGINE_HOST_SECONDS.name.removesuffix("_total")
    moving = f"{names.EVENT_LOOP_LAG_SECONDS.name}|{names.SCRAPE_DURATION_SECONDS.name}|{host_seconds}"
    moving = f"({moving})_.*|{names.CONNECTIONS.name}"
    selector = f'{{job="{job}", __name__=~"(oaiserve_|gen_ai_|vllm:).*", __name__!~"{moving}"}}'
    found = {
        frozenset((label, value) for label, value in labels if label not in ("job", "instance")): number
        # The last values, because on a busy machine a scrape may fail, after which Prometheus shows none for a moment.
        for labels, number in watched.prometheus.query(f"last_over_time({selector}[5m])").items()
    }
    on_page = {
        # Prometheus drops labels that are empty.
        frozenset({("__name__", sample.name), *(label for label in sample.labels.items() if label[1])}): sample.value
        for family in families(watched.page(FORMS[job]), FORMS[job])
        for sample in family.samples
        if re.fullmatch("(oaiserve_|gen_ai_|vllm:).*", sample.name) and not re.fullmatch(moving, sample.name)
    }
    assert len(on_page) > 500
    assert found == on_page


WITHOUT_SERIES = (  # in a server without errors, adapters, a GPU and front ends
    *(names.TELEMETRY_ERRORS, names.ADAPTER_REQUESTS, vllm_names.LORA_REQUESTS, names.ENGINE_FEATURE),
    *(names.FRONT_END_CPU_SECONDS, names.FRONT_END_RESIDENT_BYTES, names.FRONT_END_OPEN_FDS),
)


@pytest.mark.parametrize("job", FORMS)
def test_prometheus_has_every_documented_metric_except_the_count_of_errors(watched: Watched, job: str) -> None:
    found = set(watched.prometheus.get("label/__name__/values", **{"match[]": f'{{job="{job}"}}'}))
    for metric in METRICS:
        suffixes = {"histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum")}.get(metric.type, ("",))
        assert {metric.name + suffix for suffix in suffixes} <= found or metric in WITHOUT_SERIES


@pytest.mark.parametrize("job", FORMS)
def test_prometheus_has_the_type_unit_and_help_of_each_metric(watched: Watched, job: str) -> None:
    metadata = watched.prometheus.get("targets/metadata", match_target=f'{{job="{job}"}}')
    found = {entry["metric"]: (entry["type"], entry["unit"], entry["help"]) for entry in metadata}
    for metric in METRICS:
        if job == "openmetrics":
            name = metric.name.removesuffix({"counter": "_total", "info": "_info"}.get(metric.type, ""))
            assert found[name] == (metric.type, metric.unit, metric.help)
        else:  # the classic format has no units, and no type for an info
            assert found[metric.name] == ("gauge" if metric.type == "info" else metric.type, "", metric.help)


def test_prometheus_logged_no_warnings_or_errors(watched: Watched) -> None:
    assert watched.prometheus.problems() == []


def test_promtool_objects_only_to_names_of_vllm(watched: Watched) -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=watched.page(TEXT), capture_output=True, timeout=30, check=False
    )
    shown = [metric for metric in vllm_names.METRICS if metric is not vllm_names.LORA_REQUESTS]  # without adapters
    expected = [f"{metric.name} metric names should not contain ':'" for metric in shown]
    # A histogram, but this is vLLM's name for it.
    expected.append('vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix')
    assert sorted((checked.stdout + checked.stderr).decode().splitlines()) == sorted(expected)


# -- queries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: " ".join(query.split()))
def test_a_documented_query_has_an_answer(watched: Watched, query: str) -> None:
    answer = watched.prometheus.query(query)
    assert answer
    assert all(math.isfinite(value) for value in answer.values())


def test_the_documentation_has_queries() -> None:
    assert len(QUERIES) > 10


def test_the_phases_add_up_to_the_durations(watched: Watched) -> None:
    (phases,) = watched.prometheus.query("sum(oaiserve_request_phase_seconds_sum)").values()
    (durations,) = watched.prometheus.query("sum(oaiserve_request_duration_seconds_sum)").values()
    assert math.isclose(phases, durations, rel_tol=1e-12)


def test_the_reasons_for_waiting_add_up_to_the_phase_queue(watched: Watched) -> None:
    (reasons,) = watched.prometheus.query("sum(oaiserve_queue_wait_seconds_total)").values()
    (queue,) = watched.prometheus.query('sum(oaiserve_request_phase_seconds_sum{phase="queue"})').values()
    assert math.isclose(reasons, queue, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("outcome", "number"),
    [
        ("finished", sum(call.status == 200 and not call.disconnects for call in calls())),
        ("cancelled", sum(call.disconnects for call in calls())),
        ("rejected", sum(call.status != 200 for call in calls())),
    ],
)
def test_each_request_counts_once(watched: Watched, outcome: str, number: int) -> None:
    query = f'sum by (job) (oaiserve_requests_total{{outcome="{outcome}"}})'
    assert watched.prometheus.query(query) == each_job(2 * number)


# -- exemplars --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [names.TIME_TO_FIRST_TOKEN_SECONDS, names.PHASE_SECONDS], ids=lambda m: m.name)
def test_exemplars_lead_to_the_traces_of_the_requests(watched: Watched, metric: names.Metric) -> None:
    found = watched.prometheus.trace_ids(f"{metric.name}_bucket")
    assert found
    assert found <= set(watched.trace_ids)
    assert found <= {span.trace_id.hex() for span in watched.collector.spans}
