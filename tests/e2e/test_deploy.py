"""Tests every query of every panel, rule and alert with a real Prometheus that scrapes a real server under load.

One alert is also tested with an engine that stalls.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy import promql
from tests.deploy.paths import DEPLOY
from tests.e2e.conftest import serve_process
from tests.e2e.load import TEXTS, Call, calls
from tests.e2e.prometheus import Prometheus, running_prometheus

pytestmark = pytest.mark.prometheus

MODEL = "small"
ENV = {"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
FLAGS = ("--kv-blocks", "20", "--max-step-tokens", "64", "--max-running", "8", "--served-model-name", MODEL)
FLAGS += ("--drafts", "lookup")
# Nothing is drafted while others wait, so this one is sent when the rest has been answered.
REPEATING = Call(TEXTS, {"prompt": "and so on " * 8, "max_tokens": 60, "ignore_eos": True, "temperature": 0})
VALUES = {"$__rate_interval": "1m", "$__range": "5m", "$model": MODEL, "$instance": ".*"}

BOARDS = [json.loads(file.read_text()) for file in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))]
QUERIES = [
    pytest.param(target["expr"], id=f"{board['title']}: {panel['title']}: {target['legendFormat']}")
    for board in BOARDS
    for panel in board["panels"]
    for target in panel.get("targets", [])
    if "oaiserve_adapter_requests" not in target["expr"]  # the server has no adapters
]
ALERTS = [pytest.param(alert, id=alert["alert"]) for alert in promql.alerts()]
# The load fills the KV cache on purpose; the lag of the event loop, and causes, depend on what else the machine does.
MAY_FIRE = {"OaiserveKvCacheFull", "OaiserveEventLoopLag", "OaiserveSlowCause"}
RECORDED = [
    pytest.param(rule["record"], rule.get("labels", {}), id=f"{rule['record']} {rule.get('labels', '')}")
    for rule in promql.rules()
    if "record" in rule
]


@pytest.fixture(scope="module")
def prometheus(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    # On a busy machine, the rounds are further apart than the server keeps idle connections: each request has its own.
    with (
        serve_process(str(small_model), folder / "server.log", *FLAGS, env=ENV) as server,
        running_prometheus(folder, {"oaiserve": server.url}, promql.RULE_FILES) as prometheus,
        ThreadPoolExecutor(32) as threads,
        httpx.Client(
            base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        ) as http,
    ):
        num_repeated = 0
        for round_ in (1, 2):  # a rate needs a series that exists before it grows
            load = list(calls(round_))
            for _ in threads.map(lambda call: call.send(http), load):
                pass
            num_repeated += repeat_until_drafted(http)
            prometheus.wait_for("sum(oaiserve_requests_total)", {frozenset(): round_ * len(load) + num_repeated})
        prometheus.wait_for('count({__name__=~"oaiserve:slo_errors:.*"})', {frozenset(): 12})  # objectives x windows
        # A page cannot contain its own duration, so the first one lacks this series; and a rate needs two samples.
        samples = "count_over_time(oaiserve_scrape_duration_seconds_count[1m])"
        prometheus.wait_for(f"count({samples} >= 2)", {frozenset(): 1})
        yield prometheus


def repeat_until_drafted(http: httpx.Client) -> int:
    """Send a request whose text repeats until one of them has had drafts, and return how many were sent.

    Where the steps so far were slow for other reasons, drafts seem too expensive for a while.
    """
    before = num_drafts(http)
    for number in range(1, 31):
        REPEATING.send(http)
        if num_drafts(http) > before:
            return number
    raise AssertionError("nothing is drafted in 30 requests")


def num_drafts(http: httpx.Client) -> float:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return sum(one.value for family in families for one in family.samples if one.name == "oaiserve_drafts_total")


def filled_in(query: str) -> str:
    for name, value in VALUES.items():
        query = query.replace(name, value)
    return query


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_of_a_panel_returns_a_finite_value(prometheus: Prometheus, query: str) -> None:
    answer = prometheus.query(filled_in(query))
    assert any(math.isfinite(value) for value in answer.values()), answer


@pytest.mark.parametrize(("name", "labels"), RECORDED)
def test_a_recording_rule_has_one_finite_value(prometheus: Prometheus, name: str, labels: dict[str, str]) -> None:
    matchers = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    (value,) = prometheus.query(f"{name}{{{matchers}}}").values()
    assert math.isfinite(value)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_is_a_valid_query_and_does_not_fire_on_a_healthy_server(
    prometheus: Prometheus, alert: dict[str, str]
) -> None:
    answer = prometheus.query(alert["expr"])
    assert answer == {} or alert["alert"] in MAY_FIRE


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["title"])
def test_the_variables_of_a_dashboard_find_model_and_instance(
    prometheus: Prometheus, board: dict[str, dict[str, list[dict[str, str]]]]
) -> None:
    found = {}
    for variable in board["templating"]["list"]:
        if match := re.fullmatch(r"label_values\((.*), (\w+)\)", str(variable["query"])):
            selector, label = match.groups()
            found[label] = prometheus.get(f"label/{label}/values", **{"match[]": filled_in(selector)})
    assert found["model"] == [MODEL]
    assert [instance.split(":")[0] for instance in found["instance"]] == ["127.0.0.1"]


def test_the_annotation_is_a_valid_query(prometheus: Prometheus) -> None:
    """The annotation shows alerts that fire. None does, so the result is empty."""
    (expr,) = {annotation["expr"] for board in BOARDS for annotation in board["annotations"]["list"]}
    assert prometheus.query(expr) == {}


def test_prometheus_logs_no_problems_and_all_rules_are_healthy(prometheus: Prometheus) -> None:
    assert prometheus.problems() == []
    groups = prometheus.get("rules")["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}


# -- an alert that fires ----------------------------------------------------------------------------------------------

# The command with a model whose steps wait while the file STALL_FILE exists.
STALLING_SERVER = """
import os
import sys
import time

from oaiserve.cli import main
from oaiserve.engine.model.runner import ModelRunner

launch = ModelRunner.launch


def stall_and_launch(self, step):
    while os.path.exists(os.environ["STALL_FILE"]):
        time.sleep(0.01)
    return launch(self, step)


ModelRunner.launch = stall_and_launch
sys.exit(main())
"""


def quick_alert(folder: Path) -> Path:
    """Write a rule file with the alert of a stalled engine, with shorter times, so that the test need not wait for two
    minutes."""
    (alert,) = (alert for alert in promql.alerts() if alert["alert"] == "OaiserveEngineStalled")
    assert (alert["for"], re.findall(r"\[(\w+)\]", alert["expr"])) == ("1m", ["1m"])
    quick = alert | {"for": "1s", "expr": alert["expr"].replace("[1m]", "[3s]")}
    file = folder / "alerts.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "quick", "rules": [quick]}]}))
    return file


def test_a_stalled_engine_raises_its_alert_until_it_steps_again(small_model: Path, tmp_path: Path) -> None:
    stall = tmp_path / "stall"
    firing = 'count(ALERTS{alertname="OaiserveEngineStalled", alertstate="firing"})'
    body = {"prompt": "Hi", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with (
        serve_process(
            str(small_model),
            tmp_path / "server.log",
            "--kv-blocks",
            "200",
            env=ENV | {"STALL_FILE": str(stall)},
            program=("-c", STALLING_SERVER),
        ) as server,
        running_prometheus(tmp_path, {"oaiserve": server.url}, [quick_alert(tmp_path)]) as prometheus,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        prometheus.wait_for("count(oaiserve_engine_steps_total)", {frozenset(): 1})
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            stall.touch()
            prometheus.wait_for(firing, {frozenset(): 1})
            stall.unlink()
            assert "data: [DONE]" in list(lines)
        prometheus.wait_for(firing, {})
