"""The rules for Prometheus: promtool accepts them, every alert is tested and explained, and all names are known."""

import re
import subprocess
from typing import Any

import pytest
import yaml

from deploy.grafana.slo import OF_CLIENTS
from oaiserve.errors import APIError, kinds_of
from oaiserve.telemetry import names
from oaiserve.telemetry.targets import LEAST_NS, TIMES_ALONE
from tests.deploy import promql
from tests.deploy.paths import DEPLOY, ROOT

FOLDER = DEPLOY / "prometheus"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
RULES = promql.rules()
ALERTS = promql.alerts()
WINDOWS = ("5m", "30m", "1h", "6h")


def rule_id(rule: dict[str, Any]) -> str:
    return rule.get("alert") or f"{rule['record']}-{rule.get('labels', {}).get('slo', '')}"


def promtool(*arguments: str) -> None:
    result = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.prometheus
def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", *(file.name for file in promql.RULE_FILES))
    promtool("check", "config", "prometheus.yml")


@pytest.mark.prometheus
def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", "rules.test.yml")


@pytest.mark.parametrize("alert", ALERTS, ids=rule_id)
def test_an_alert_has_test_cases_that_fire_and_that_do_not(alert: dict[str, Any]) -> None:
    groups = yaml.safe_load((FOLDER / "rules.test.yml").read_text())["tests"]
    cases = [case for group in groups for case in group.get("alert_rule_test", [])]
    fire = {bool(case["exp_alerts"]) for case in cases if case["alertname"] == alert["alert"]}
    assert fire == {True, False}


@pytest.mark.parametrize("alert", ALERTS, ids=rule_id)
def test_an_alert_has_a_severity_and_a_section_in_the_runbook(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert alert["for"]
    notes = alert["annotations"]
    assert set(notes) - {"clients_url"} == {"summary", "description", "runbook_url"}
    link = r'\{\{ or \$externalLabels\.oaiserve_runbook "(.*)" \}\}#(\w+)'
    ((page, section),) = re.findall(link, notes["runbook_url"])
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert section in [heading.lower().replace(" ", "-") for heading in headings]
    assert section == alert["alert"].lower()


def test_the_runbook_has_a_section_for_each_alert_and_no_other() -> None:
    sections = re.split(r"^## ", RUNBOOK, flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections] == [alert["alert"] for alert in ALERTS]
    for section in sections:
        assert {"**Means.**", "**Look at.**", "**Do.**"} <= set(re.findall(r"\*\*[A-Z][a-z ]*\.\*\*", section))


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_a_rule_uses_known_metrics_and_labels(rule: dict[str, Any]) -> None:
    assert list(promql.selectors(rule["expr"])) or rule["expr"].startswith("vector(")
    assert promql.unknown_names(rule["expr"]) == []


def test_no_objective_has_a_fixed_time_and_the_threshold_of_the_event_loop_is_a_bucket() -> None:
    assert not [rule for rule in RULES if re.search(r'le="(?!\+Inf)', rule["expr"])]
    (alert,) = (alert for alert in ALERTS if alert["alert"] == "OaiserveEventLoopLag")
    threshold = float(re.findall(r"> ([\d.]+)", alert["expr"])[0])
    assert threshold in names.EVENT_LOOP_LAG_SECONDS.buckets


def test_comment_in_the_rules_has_the_minimum_targets_of_the_server() -> None:
    head = (FOLDER / "recording.rules.yml").read_text().split("groups:")[0]
    least = [f"{LEAST_NS[slo] / 1e9:g} s ({slo})" for slo in ("ttft", "tpot")]
    assert f"six times that, but at least {' or '.join(least)}" in " ".join(head.replace("#", " ").split())
    assert TIMES_ALONE == 6


def test_the_error_that_the_objectives_leave_out_is_a_refusal_that_a_client_asks_for() -> None:
    left_out = {name for rule in RULES for name in re.findall(r'error_type!="([^"]+)"', rule["expr"])}
    assert left_out == {OF_CLIENTS}
    assert kinds_of(APIError)[OF_CLIENTS].status == 429


def test_objectives_are_the_same_in_all_windows() -> None:
    def of_window(window: str) -> list[tuple[str, str]]:
        return [
            (rule_id(rule).replace(f"rate{window}", "rate"), rule["expr"].replace(window, ""))
            for rule in RULES
            if re.search(rf"rate{window}$", rule.get("record", ""))
        ]

    assert len(of_window("5m")) == 3
    assert all(of_window(window) == of_window("5m") for window in WINDOWS)


def test_the_budgets_are_those_in_the_comment_of_the_file() -> None:
    head = (FOLDER / "recording.rules.yml").read_text().split("groups:")[0]
    for rule in RULES:
        if rule.get("record") == "oaiserve:slo_budget:ratio":
            budget = float(rule["expr"].removeprefix("vector(").removesuffix(")"))
            assert re.search(rf"#   {rule['labels']['slo']} +{100 * (1 - budget):g} %", head)


def test_the_scrape_job_has_the_name_that_alerts_use() -> None:
    jobs = {job["job_name"] for job in yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]}
    used = {job for rule in RULES for jobs in re.findall(r'job=~?"([^"]+)"', rule["expr"]) for job in jobs.split("|")}
    gateway = yaml.safe_load((DEPLOY / "kubernetes" / "gateway" / "service.yaml").read_text())["metadata"]["name"]
    assert f"  # - job_name: {gateway}  #" in (FOLDER / "prometheus.yml").read_text()
    assert used == {"oaiserve", gateway}
    assert "oaiserve" in jobs
