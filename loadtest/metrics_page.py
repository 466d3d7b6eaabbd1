"""Parses a server's answer to GET /metrics, in Prometheus' text format."""

from __future__ import annotations

import re

Labels = frozenset[tuple[str, str]]
Metrics = dict[tuple[str, Labels], float]  # keyed by the sample's name and its labels

_LABELS_AND_VALUE = r"(?:\{(.*)\})? (\S+)"
_LINE = re.compile(rf"^([a-zA-Z_:][\w:]*){_LABELS_AND_VALUE}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text: str) -> Metrics:
    """Return every sample of the page. Label values keep their escapes."""
    return {(name, frozenset(_LABEL.findall(labels))): float(value) for name, labels, value in _LINE.findall(text)}


def values_of(text: str, name: str) -> list[float]:
    """Return the values of one metric by its labels. Parsing the whole page would take longer than fetching it."""
    return [float(value) for _, value in re.findall(rf"^{re.escape(name)}{_LABELS_AND_VALUE}", text, re.MULTILINE)]
