"""What a metric is: its name, type, help text, unit, labels and buckets."""

from __future__ import annotations

from dataclasses import dataclass

_UNITS = ("seconds", "tokens", "ratio", "bytes", "blocks", "sequences", "joules", "price")


@dataclass(frozen=True, eq=False)
class Metric:
    """A metric as Prometheus names it: a counter ends in `_total`, a histogram gets `_bucket`, `_sum` and `_count`."""

    name: str
    type: str  # "counter" | "gauge" | "histogram" | "summary" | "info"
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    # It shows the series of another metric, or this number of the engine. Without either, it has its own series.
    of: Metric | str | None = None
    where: tuple[tuple[str, str], ...] = ()  # the values that labels of the series must have


def unit_of(name: str) -> str:
    last = name.removesuffix("_total").rpartition("_")[2]
    if last in _UNITS:
        return last
    return ""


def metric(name: str, help: str, labels: str = "", of: str | None = None) -> Metric:
    """Return a counter, an info or a gauge, depending on the end of the name."""
    kind = {"total": "counter", "info": "info"}.get(name.rpartition("_")[2], "gauge")
    return Metric(name, kind, help, unit_of(name), tuple(labels.split()), of=of)


def histogram(name: str, buckets: tuple[float, ...], help: str, labels: str = "", unit: str = "") -> Metric:
    return Metric(name, "histogram", help, unit or unit_of(name), tuple(labels.split()), buckets)
