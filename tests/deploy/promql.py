"""Find the metrics and labels in a query and check that the server has them, by regular expressions. tests/e2e also
runs the queries in a real Prometheus."""

import re
from collections.abc import Iterator
from typing import Any

import yaml
from prometheus_client import Counter

from oaiserve.telemetry import names, vllm_names
from tests.deploy.paths import DEPLOY
from tests.missing_plugins import has_plugin
from tests.telemetry.reported import PROCESS_METRICS, plugin_metrics

REFERENCE = DEPLOY.parent / "docs" / "reference" / "metrics.md"
RULE_FILES = sorted((DEPLOY / "prometheus").glob("*.rules.yml"))

# The labels of each name that a query may use, including those of the target.
_TARGET = {"job", "namespace", "instance"}
_SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "summary": ("_count", "_sum")}
KNOWN_LABELS = {
    metric.name + suffix: {*metric.labels, *_TARGET, *(["le"] if suffix == "_bucket" else [])}
    for metric in (*names.METRICS, *plugin_metrics(), *names.GEN_AI_METRICS, *vllm_names.METRICS)
    for suffix in _SUFFIXES.get(metric.type, ("",))
}
# A plug-in that is deleted leaves its panels, and its table in the reference.
KNOWN_LABELS = {
    name: {*re.findall(r"`(\w+)`", labels), *_TARGET}
    for table in re.findall(r"<!-- \w+-metrics -->(.*?)<!-- end", REFERENCE.read_text(), re.DOTALL)
    for name, labels in re.findall(r"^\| `(oaiserve_\w+)` \| \w+ \|([^|]*)\|", table, re.MULTILINE)
} | KNOWN_LABELS
KNOWN_LABELS |= dict.fromkeys((*PROCESS_METRICS, "up"), _TARGET)


def _of_gateway() -> dict[str, set[str]]:
    from oaiserve.plugins.gateway.metrics import GatewayMetrics
    from oaiserve.plugins.gateway.routers import Routers
    from oaiserve.plugins.gateway.watch import USUAL, Watch
    from oaiserve.runtime import THREADS

    metrics = GatewayMetrics(Watch(Routers(), (), (), USUAL, THREADS.clock_ns))
    known = {
        f"{vars(metric)['_name']}_total": {*vars(metric)["_labelnames"], *_TARGET}
        for metric in vars(metrics).values()
        if isinstance(metric, Counter)
    }
    known["oaiserve_gateway_connections"] = _TARGET
    known["oaiserve_gateway_connections_refused_total"] = {"reason", *_TARGET}
    of_replicas = ("replica_up", "open_requests", "ejected_total")
    known |= {f"oaiserve_gateway_{name}": {"replica", *_TARGET} for name in of_replicas}
    return known | {f"oaiserve_gateway_{name}_seconds_bucket": {"le", *_TARGET} for name in ("choice", "wait")}


def _of_engines() -> dict[str, set[str]]:
    from oaiserve.plugins.gateway.engines.metrics import ENGINE, readers

    known = {metric.name: {*metric.labels, *_TARGET} for metric in readers(())}
    # In front of engines of other kinds, metrics of requests have this label, too.
    known |= {name: labels | {ENGINE} for name, labels in KNOWN_LABELS.items() if "operation" in labels}
    return known


_DELETED: tuple[str, ...] = ()  # beginnings of names of metrics whose plug-in is deleted, unlike its panels
if has_plugin("gateway"):
    KNOWN_LABELS |= _of_gateway() | _of_engines()
else:
    _DELETED = (
        "oaiserve_gateway_",
        *(f"oaiserve_engine_{name}" for name in ("info", "up", "open_", "unread_", "reported_")),
    )
KNOWN_LABELS["ALERTS"] = {"alertname", "alertstate", "severity", "slo", "model", *_TARGET}

_STRING = re.compile(r'"[^"]*"')
_SELECTOR = re.compile(r"(?<![\w:$])([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\}|(?=[\s)\[*/+<>=-]|$))(?!\s*\()")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right) ?\(([^)]*)\)")
_WORDS = {"and", "or", "unless", "by", "on", "ignoring", "without", "offset", "bool", "group_left", "group_right"}


def rules() -> list[dict[str, Any]]:
    """Return the rules of both files in their order: recording rules, then alerts."""
    groups = [group for file in reversed(RULE_FILES) for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def recorded() -> dict[str, set[str]]:
    """Return the labels of each metric that a recording rule makes."""
    labels_of_record: dict[str, set[str]] = {}
    for rule in rules():
        if "record" in rule:
            by = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
            labels = {*rule.get("labels", {}), *(label.strip() for label in ",".join(by).split(",") if label.strip())}
            labels_of_record.setdefault(rule["record"], set()).update(labels)
    return labels_of_record


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric in the query with the labels of its matchers."""
    without_groupings = _GROUPING.sub(" ", query)
    for name, matchers in _SELECTOR.findall(without_groupings):
        if name not in _WORDS:
            yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", _STRING.sub('""', matchers)))


def unknown_names(query: str, *, without: tuple[str, ...] = ()) -> list[str]:
    """Return every metric and label in the query that neither the server nor a recording rule has.

    The server is taken to lack all metrics whose names begin as one in `without`.
    """
    known = {name: labels for name, labels in (KNOWN_LABELS | recorded()).items() if not name.startswith(without)}
    used = list(selectors(query))
    if any(name.startswith(_DELETED) for name, _ in used):
        return []
    labels_of_all = {label for name, _ in used for label in known.get(name, set())}
    grouped = {label.strip() for group in _GROUPING.findall(query) for label in group.split(",") if label.strip()}
    wrong = [name for name, _ in used if name not in known]
    wrong += [f"{name}{{{label}}}" for name, labels in used for label in labels - known.get(name, labels)]
    return wrong + [f"by ({label})" for label in sorted(grouped - labels_of_all)]
