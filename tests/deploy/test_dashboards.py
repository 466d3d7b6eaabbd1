"""The dashboards are current, have descriptions and units, and use known metrics and labels."""

import json
import re
from typing import Any

import pytest
import yaml

from deploy.grafana import build
from deploy.grafana.without_panel import REASONS
from oaiserve.facts.times import PHASES
from oaiserve.telemetry import names
from oaiserve.telemetry.targets import LEAST_NS
from tests.deploy import promql
from tests.deploy.boards import panels
from tests.deploy.paths import DEPLOY, ROOT
from tests.missing_plugins import has_plugin
from tests.telemetry.reported import plugin_metrics

BOARDS = {file.name: json.loads(file.read_text()) for file in sorted(build.FOLDER.glob("*.json"))}
PANELS = [
    pytest.param(panel, id=f"{name.removesuffix('.json')}: {panel['title']}")
    for name, board in BOARDS.items()
    for panel in panels(board)
    if panel["type"] != "row"
]
VARIABLES = {"datasource", "job", "namespace", "model", "instance"}
OF_GRAFANA = {"__rate_interval", "__range"}
SLO_PANELS = {"availability": "Answered", "ttft": "First token in time", "tpot": "Tokens in time"}


def test_the_dashboard_files_are_current() -> None:
    """If this fails, run `python -m deploy.grafana.build`."""
    assert {file.name: file.read_text() for file in build.FOLDER.iterdir()} == build.pages()


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_has_the_variables_and_no_fixed_data_source(board: dict[str, Any]) -> None:
    assert {variable["name"] for variable in board["templating"]["list"]} == VARIABLES
    assert all(not variable.get("current") for variable in board["templating"]["list"])
    assert board["uid"]
    assert board["description"]
    uids = set(re.findall(r'"uid": "([^"]*)"', json.dumps(board))) - {board["uid"]}
    assert uids == {"${datasource}"}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_panels_have_consecutive_ids_and_do_not_overlap(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in panels(board)]
    assert ids == list(range(1, len(ids) + 1))
    # The panels of a collapsed row are shown where those below it are until then.
    for together in (board["panels"], *(row.get("panels", ()) for row in board["panels"])):
        taken: set[tuple[int, int]] = set()
        for position in (panel["gridPos"] for panel in together):
            cells = {(position["x"] + x, position["y"] + y) for x in range(position["w"]) for y in range(position["h"])}
            assert not cells & taken
            assert max(x for x, _ in cells) < 24
            taken |= cells


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_has_a_description_a_unit_and_legends(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 20
    assert panel["description"].endswith(".")
    unit = panel["options"]["yAxis"] if panel["type"] == "heatmap" else panel["fieldConfig"]["defaults"]
    assert unit["unit"]
    assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("panel", PANELS)
def test_a_query_uses_the_variables(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for expr in (target["expr"] for target in panel["targets"]):
        assert list(promql.selectors(expr))
        assert set(re.findall(r"\$\{?(\w+)", expr)) <= VARIABLES | OF_GRAFANA
        assert set(re.findall(r"\[([^\]]*)\]", expr)) <= {f"${name}" for name in OF_GRAFANA}
        for name, labels in promql.selectors(expr):
            assert labels & {"instance", "model"} or name == "oaiserve:slo_budget:ratio", f"{name} ignores variables"
            of_installation = {"job", "namespace"} <= labels
            assert of_installation or name == "oaiserve:slo_budget:ratio", f"{name} adds up several installations"


def test_rules_keep_the_installations_of_one_prometheus_apart() -> None:
    for rule in promql.rules():
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]):
            names_of_labels = set(labels.split(", "))
            assert {"job", "namespace"} <= names_of_labels or names_of_labels == {"slo"}, rule["expr"]


def queries(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels(board) for target in panel.get("targets", [])]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_board_asks_for_known_metrics_and_labels_whatever_others_rename(board: dict[str, Any]) -> None:
    """Boards ask for our own names, which stay. Those of OpenTelemetry's conventions, and of vLLM, may change."""
    expressions = queries(board)
    expressions += [note["expr"] for note in board["annotations"]["list"] if "expr" in note]
    variables = "\n".join(str(variable["query"]) for variable in board["templating"]["list"])
    expressions += re.findall(r"^label_values\((.*), \w+\)$", variables, re.MULTILINE)
    assert len(expressions) > 4
    assert [name for expr in expressions for name in promql.unknown_names(expr, without=("gen_ai_", "vllm:"))] == []


def test_a_query_by_replica_tells_gateways_apart() -> None:
    """Two gateways may give the same number to different servers."""
    groups = [
        group for board in BOARDS.values() for expr in queries(board) for group in re.findall(r"by \((.*?)\)", expr)
    ]
    of_replicas = [group for group in groups if "replica" in group]
    assert of_replicas
    assert all("instance" in group for group in of_replicas)


def test_the_dashboard_gateway_shows_all_metrics_that_its_page_lists() -> None:
    listed = re.findall(r"^\| `(oaiserve_gateway_\w+)", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    shown = " ".join(queries(BOARDS["oaiserve-gateway.json"]))
    assert len(listed) > 10
    assert [name for name in listed if not re.search(rf"{name}(_bucket)?\b", shown)] == []


@pytest.mark.skipif(not has_plugin("gateway"), reason="the metrics are the plug-in's")
def test_the_dashboard_engines_shows_what_is_known_of_engines_and_nothing_else() -> None:
    from oaiserve.plugins.gateway.engines.metrics import is_shown, readers

    shown = {name for expr in queries(BOARDS["oaiserve-engines.json"]) for name, _ in promql.selectors(expr)}
    of_engines = {metric.name for metric in readers(())}
    assert of_engines - shown == {"oaiserve_engine_info"}  # It has the names of the variables.
    of_requests = tuple(metric.name for metric in (*names.METRICS, *plugin_metrics()) if is_shown(metric))
    assert [name for name in shown - of_engines if not name.startswith(of_requests)] == []


def test_rows_for_some_servers_only_are_collapsed_so_that_a_board_fits_a_few_screens() -> None:
    board = BOARDS["oaiserve-engine.json"]
    rows = {row["title"]: row for row in board["panels"] if row["type"] == "row"}
    collapsed = [title for title, row in rows.items() if row["collapsed"]]
    assert collapsed == ["Drafts", "Grammars and tools", "Images and sounds", "Queue"]
    assert all(rows[title]["panels"] for title in collapsed)
    assert len(board["panels"]) - len(rows) <= 24


def test_every_phase_has_a_heatmap() -> None:
    heatmaps = [panel["title"] for panel in panels(BOARDS["oaiserve-phases.json"]) if panel["type"] == "heatmap"]
    assert heatmaps == list(PHASES)


def test_the_thresholds_of_the_slo_dashboard_are_those_of_the_rules() -> None:
    on_board = set(re.findall(r'(\w+_bucket)\{le="([^"]*)"', " ".join(queries(BOARDS["oaiserve-slo.json"]))))
    rules = " ".join(rule["expr"] for rule in promql.rules())
    in_rules = set(re.findall(r'(\w+_bucket)\{[^}]*le="([^"]*)"', rules))
    assert on_board == in_rules


def test_the_lines_of_the_overview_are_the_least_targets_of_a_request() -> None:
    by_title = {panel["title"]: panel for panel in panels(BOARDS["oaiserve-overview.json"])}
    for title, slo in (("Time to first token", "ttft"), ("Time per output token", "tpot")):
        (_, line) = by_title[title]["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert line["value"] == LEAST_NS[slo] / 1e9
        assert f"Up to the line of {line['value']:g} s no request misses" in by_title[title]["description"]


def test_the_readme_lists_every_dashboard() -> None:
    section = (DEPLOY / "README.md").read_text().split("## Dashboards")[1].split("##")[0]
    listed = re.findall(r"^\| (?!dashboard|---)([^|]+) \|", section, re.MULTILINE)
    assert sorted(listed) == sorted(board["title"].removeprefix("oaiserve / ") for board in BOARDS.values())


def test_the_objectives_of_the_slo_dashboard_match_the_budgets_of_the_rules() -> None:
    by_title = {panel["title"]: panel for panel in panels(BOARDS["oaiserve-slo.json"])}
    for rule in promql.rules():
        if rule.get("record") == "oaiserve:slo_budget:ratio":
            budget = float(rule["expr"].removeprefix("vector(").removesuffix(")"))
            steps = by_title[SLO_PANELS[rule["labels"]["slo"]]]["fieldConfig"]["defaults"]["thresholds"]["steps"]
            assert steps[-1] == {"color": "green", "value": pytest.approx(1 - budget)}


def unused_metrics() -> set[str]:
    """Return the metrics that neither a dashboard nor a rule uses."""
    expressions = [expr for board in BOARDS.values() for expr in queries(board)]
    expressions += [rule["expr"] for rule in promql.rules()]
    used = {name for expr in expressions for name, _ in promql.selectors(expr)}
    return {
        metric.name
        for metric in (*names.METRICS, *plugin_metrics())
        if not any(name.startswith(metric.name) for name in used)
    }


def test_each_metric_is_used_or_listed_with_a_reason() -> None:
    missing = unused_metrics() - REASONS.keys()

    assert not missing, "add a panel in deploy/grafana/, or a line with the reason in deploy/grafana/without_panel.py"


def test_each_metric_with_a_reason_has_no_panel() -> None:
    assert REASONS.keys() <= unused_metrics()


def test_exemplars_link_to_the_trace_store_and_to_the_page_of_the_request() -> None:
    sources = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "oaiserve.yml").read_text())
    by_uid = {source["uid"]: source for source in sources["datasources"]}
    trace, account = by_uid["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert trace["name"] == account["name"] == "trace_id"
    assert by_uid[trace["datasourceUid"]]["type"] == "jaeger"
    # Grafana takes a single $ for a variable of the environment.
    assert account["url"].endswith(":8000/requests/$${__value.raw}")
    scraped_every = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert by_uid["prometheus"]["jsonData"]["timeInterval"] == scraped_every
