"""The definition of a metric: its name, type, help text, unit, labels and buckets."""

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
    # The metric whose series this one shows, or the field of the engine's numbers. None: it has series of its own.
    of: Metric | str | None = None
    where: tuple[tuple[str, str], ...] = ()  # label values that select which series are shown


def unit_of(name: str) -> str:
    last = name.removesuffix("_total").rpartition("_")[2]
    if last in _UNITS:
        return last
    return ""


def metric(name: str, help: str, labels: str = "", of: str | None = None) -> Metric:
    """Return a counter, an info or a gauge, depending on how the name ends."""
    kind = {"total": "counter", "info": "info"}.get(name.rpartition("_")[2], "gauge")
    return Metric(name, kind, help, unit_of(name), tuple(labels.split()), of=of)


def histogram(name: str, buckets: tuple[float, ...], help: str, labels: str = "", unit: str = "") -> Metric:
    return Metric(name, "histogram", help, unit or unit_of(name), tuple(labels.split()), buckets)
