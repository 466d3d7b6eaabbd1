"""Tests that a real Prometheus reads /metrics without loss, and answers every query of ours.

These are the queries of the docs, and those of each panel, rule and alert of `deploy`. The server is real. Its KV cache
is so small that the load of `load.py` moves every metric family.
"""

import json
import math
import re
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from oaiserve.facts.metric import Metric
from oaiserve.plugins.gateway.app import create_gateway
from oaiserve.plugins.gateway.options import RouteOptions
from oaiserve.telemetry import names, vllm_names
from tests.deploy import promql
from tests.deploy.boards import panels
from tests.deploy.paths import DEPLOY
from tests.e2e.live import LiveServer, serve_process
from tests.e2e.load import CHAT, TEXTS, Call, calls
from tests.e2e.prometheus import Labels, Prometheus, running_prometheus
from tests.models.pictures import picture, png
from tests.plugins.gateway.doubles import OPTIONS
from tests.plugins.media.mmproj_files import save_folder
from tests.serving import RunningServer
from tests.telemetry.collector import Collector, running_collector
from tests.telemetry.pages import OPENMETRICS, TEXT, families, key, samples_on
from tests.telemetry.reported import plugin_metrics
from tests.waiting import wait_until

pytestmark = pytest.mark.prometheus

MODEL = "small"
FLAGS = ("--cost-per-hour", "2", "--kv-cache-memory", "240KiB", "--max-step-tokens", "64", "--max-running", "8")
FLAGS += ("--served-model-name", MODEL, "--drafts", "lookup")
# Nothing is drafted while others wait, so this one is sent when the rest has been answered.
ALWAYS = {"logit_bias": {"40": 100}, "temperature": 0}
REPEATING = Call(TEXTS, {"prompt": "and so on " * 8, "max_tokens": 60, "ignore_eos": True, **ALWAYS})
VALUES = {"$__rate_interval": "5m", "$__range": "5m", "$model": MODEL, "$instance": ".*"}
VALUES |= {"$job": ".*", "$namespace": ".*"}
VALUES |= dict.fromkeys((" offset 1h", " offset 1d"), " offset 1ms")  # the server is not that old
ENGINES = "oaiserve-engines"  # A dashboard for other engines: tests/plugins/gateway/engines/test_board.py
FILES = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
BOARDS = [json.loads(file.read_text()) for file in FILES if file.stem != ENGINES]
DOCS = Path(__file__).parents[2] / "docs"
QUERIES = [
    pytest.param(query, all, id=" ".join(query.split()))
    for page in (DOCS / "slow-requests.md", DOCS / "telemetry.md")
    for query in re.findall(r"^```promql\n(.*?)\n```$", page.read_text(), re.DOTALL | re.MULTILINE)
]
assert len(QUERIES) >= 3, "the docs have queries"
QUERIES += [
    pytest.param(target["expr"], any, id=f"{board['title']}: {panel['title']}: {target['legendFormat']}")
    for board in BOARDS
    for panel in panels(board)
    for target in panel.get("targets", [])
    # The server has no adapters and no replicas, and the machine may have no meter of energy.
    if not any(name in target["expr"] for name in ("oaiserve_adapter_requests", "oaiserve_replica_", "joules"))
]
METRICS = (*names.METRICS, *plugin_metrics(), *names.GEN_AI_METRICS, *vllm_names.METRICS)
# The load fills the KV cache on purpose; the lag of the event loop, and causes, depend on what else the machine does.
MAY_FIRE = {"OaiserveKvCacheFull", "OaiserveEventLoopLag", "OaiserveSlowCause"}


@dataclass
class Watched:
    """A server, and the Prometheus with our rules that has seen all of its load."""

    server: LiveServer
    prometheus: Prometheus
    collector: Collector
    trace_ids: list[str]  # trace ids of all requests
    at: float = 0.0  # Unix time after the load, at which no scrape was late

    def query(self, promql: str) -> dict[Labels, float]:
        """Return what a query said after the load. On a busy machine, a later scrape may be late."""
        return self.prometheus.query(promql, self.at)

    def page(self, form: str) -> bytes:
        return httpx.get(f"{self.server.url}/metrics", headers={"accept": form}, timeout=60).content


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    model = tmp_path_factory.mktemp("seeing")
    save_folder("llava", model, max_position_embeddings=16_384)
    with running_collector() as collector:
        env = {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "NO_PROXY": "127.0.0.1",
        }
        # On a busy machine, rounds are further apart than the server keeps idle connections: each request has its own.
        each_its_own = {"limits": httpx.Limits(max_connections=None), "headers": {"connection": "close"}}
        with (
            serve_process(str(model), folder / "server.log", *FLAGS, env=env) as server,
            running_gateway(server.url) as gateway_url,
            running_prometheus(
                folder, {"oaiserve": server.url, "oaiserve-gateway": gateway_url}, promql.RULE_FILES
            ) as prometheus,
            ThreadPoolExecutor(32) as threads,
            httpx.Client(base_url=server.url, timeout=60, **each_its_own) as http,
        ):
            watched = Watched(server, prometheus, collector, [])
            for round_ in (1, 2):  # a rate needs a series that exists before it grows
                watched.trace_ids += threads.map(lambda call: call.send(http), [*calls(round_), *pictures(round_)])
                repeat_until_drafted(watched, http)
                prometheus.wait_for("sum(oaiserve_requests_total)", {frozenset(): len(watched.trace_ids)})
                assert httpx.get(f"{gateway_url}/v1/models", timeout=60).status_code == 200
                answered = "sum(oaiserve_gateway_requests_total{ending='answered'})"
                prometheus.wait_for(answered, {frozenset(): round_})
            ended, exported = (f'oaiserve_spans_total{{result="{result}"}}' for result in ("ended", "exported"))
            prometheus.wait_for(f"sum({ended} - ignoring (result) {exported})", {frozenset(): 0})
            # A page cannot contain its own duration, so the first one lacks this series; and a rate needs two samples.
            samples = "count_over_time(oaiserve_scrape_duration_seconds_count[1m])"
            prometheus.wait_for(f"count({samples} >= 2)", {frozenset(): 1})
            # 12 objectives x windows, and both targets
            watched.at = prometheus.wait_for(
                'count({__name__=~"oaiserve:slo_errors:.*"}) + count(up == 1)', {frozenset(): 14}
            )
            yield watched


def pictures(round_: int) -> Iterator[Call]:
    """Yield requests with an image of this round, and with one of all rounds."""
    for number in (round_, 0):
        url = f"data:image/png;base64,{b64encode(png(picture(number))).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
        yield Call(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 5, "ignore_eos": True})


@contextmanager
def running_gateway(url: str) -> Iterator[str]:
    app, gateway = create_gateway(RouteOptions(replica=(url,)))
    with RunningServer(app, OPTIONS, on_drain=gateway.drain) as server:
        gateway.metrics.show(server.connections)
        wait_until(lambda: gateway.is_ready)
        yield server.url


def repeat_until_drafted(watched: Watched, http: httpx.Client) -> None:
    """Send a request whose text repeats until one of them has had drafts.

    Where the steps so far were slow for other reasons, drafts seem too expensive for a while.
    """

    def num_drafts() -> float:
        return samples_on(watched.page(TEXT))[key("oaiserve_drafts_total")]

    before = num_drafts()
    for _ in range(30):
        watched.trace_ids.append(REPEATING.send(http))
        if num_drafts() > before:
            return
    raise AssertionError("nothing is drafted in 30 requests")


# -- what Prometheus stores -------------------------------------------------------------------------------------------


def test_prometheus_has_every_value_of_the_page(watched: Watched) -> None:
    """Metrics that change without requests are left out."""
    host_seconds = names.ENGINE_HOST_SECONDS.name.removesuffix("_total")
    moving = f"{names.EVENT_LOOP_LAG_SECONDS.name}|{names.SCRAPE_DURATION_SECONDS.name}|{host_seconds}"
    moving = f"{moving}|oaiserve_nobody_(core|machine)_seconds|oaiserve_meter_core_seconds"
    moving = f"({moving})_.*|{names.CONNECTIONS.name}"
    selector = f'{{job="oaiserve", __name__=~"(oaiserve_|gen_ai_|vllm:).*", __name__!~"{moving}"}}'
    stored = {
        frozenset((label, value) for label, value in labels if label not in ("job", "instance")): number
        # The last values, because on a busy machine a scrape may fail, after which Prometheus shows none for a moment.
        for labels, number in watched.prometheus.query(f"last_over_time({selector}[5m])").items()
    }
    on_page = {
        # Prometheus drops labels that are empty.
        frozenset({("__name__", sample.name), *(label for label in sample.labels.items() if label[1])}): sample.value
        for family in families(watched.page(OPENMETRICS), OPENMETRICS)
        for sample in family.samples
        if re.fullmatch("(oaiserve_|gen_ai_|vllm:).*", sample.name) and not re.fullmatch(moving, sample.name)
    }
    assert len(on_page) > 500
    assert stored == on_page


WITHOUT_SERIES = (  # in a server without errors, adapters, replicas, a meter of energy, and runs that have ended
    *(metric for metric in plugin_metrics() if metric.name.startswith("oaiserve_run_")),
    *(names.TELEMETRY_ERRORS, names.ADAPTER_REQUESTS, vllm_names.LORA_REQUESTS),
    *(metric for metric in names.METRICS if "joules" in metric.name or metric.name.startswith("oaiserve_replica_")),
)


def test_prometheus_has_every_documented_metric_except_the_count_of_errors(watched: Watched) -> None:
    names_there = set(watched.prometheus.get("label/__name__/values"))
    for metric in METRICS:
        suffixes = {"histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum")}.get(metric.type, ("",))
        assert {metric.name + suffix for suffix in suffixes} <= names_there or metric in WITHOUT_SERIES
    assert names.TELEMETRY_ERRORS.name not in names_there


def test_prometheus_logged_no_problems_and_all_rules_are_healthy(watched: Watched) -> None:
    assert watched.prometheus.problems() == []
    groups = watched.prometheus.get("rules")["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}


def test_promtool_objects_only_to_names_of_vllm(watched: Watched) -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=watched.page(TEXT), capture_output=True, check=False
    )
    shown = [metric for metric in vllm_names.METRICS if metric is not vllm_names.LORA_REQUESTS]  # without adapters
    expected = [f"{metric.name} metric names should not contain ':'" for metric in shown if ":" in metric.name]
    # A histogram, but this is vLLM's name for it.
    expected.append('vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix')
    assert sorted((checked.stdout + checked.stderr).decode().splitlines()) == sorted(expected)


# -- queries ----------------------------------------------------------------------------------------------------------


def filled_in(query: str) -> str:
    for name, value in VALUES.items():
        query = query.replace(name, value)
    return query


@pytest.mark.parametrize(("query", "which"), QUERIES)
def test_a_query_of_the_docs_or_of_a_panel_has_an_answer(
    watched: Watched, query: str, which: Callable[..., bool]
) -> None:
    """All values of a query of the docs are numbers, and one of a panel at least."""
    answer = watched.query(filled_in(query))
    assert answer
    assert which(math.isfinite(value) for value in answer.values()), answer


@pytest.mark.parametrize("rule", promql.rules(), ids=lambda rule: f"{rule.get('record') or rule['alert']}")
def test_a_recording_rule_has_a_finite_value_for_each_objective_and_an_alert_does_not_fire(
    watched: Watched, rule: dict[str, Any]
) -> None:
    if "alert" in rule:
        assert watched.query(rule["expr"]) == {} or rule["alert"] in MAY_FIRE
        return
    matchers = ", ".join(f'{label}="{value}"' for label, value in rule.get("labels", {}).items())
    values = watched.query(f"{rule['record']}{{{matchers}}}").values()
    # One rule is for `ttft` and `tpot`, and another one of its name for `availability`.
    assert len(values) == (3 if "by (job, namespace, model, slo)" in rule["expr"] else 1)
    assert all(map(math.isfinite, values))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["title"])
def test_the_variables_of_a_dashboard_find_model_and_instance(watched: Watched, board: dict[str, Any]) -> None:
    values = {}
    for variable in board["templating"]["list"]:
        if match := re.fullmatch(r"label_values\((.*), (\w+)\)", str(variable["query"])):
            selector, label = match.groups()
            values[label] = watched.prometheus.get(f"label/{label}/values", **{"match[]": filled_in(selector)})
    job = "oaiserve-gateway" if board["uid"] == "oaiserve-gateway" else "oaiserve"
    assert (values["job"], values["namespace"]) == ([job], [])
    assert values["model"] == [MODEL]
    assert [instance.split(":")[0] for instance in values["instance"]] == ["127.0.0.1"]


def test_the_annotation_is_a_valid_query(watched: Watched) -> None:
    """The annotation shows alerts that fire. None does, so the result is empty."""
    (expr,) = {annotation["expr"] for board in BOARDS for annotation in board["annotations"]["list"]}
    assert watched.query(expr) == {}


# -- exemplars --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", [names.TIME_TO_FIRST_TOKEN_SECONDS, names.PHASE_SECONDS], ids=lambda m: m.name)
def test_exemplars_lead_to_the_traces_of_the_requests(watched: Watched, metric: Metric) -> None:
    ids = watched.prometheus.trace_ids(f"{metric.name}_bucket")
    assert ids
    assert ids <= set(watched.trace_ids)
    assert ids <= {span.trace_id.hex() for span in watched.collector.spans}
