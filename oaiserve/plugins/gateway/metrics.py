"""The gateway's own metrics, for Prometheus. Replicas serve theirs themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oaiserve.facts.record import AccessRefusal
from oaiserve.http.connections import Connections
from oaiserve.plugins.gateway.watch import Watch

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CHOICE_SECONDS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01)
WAIT_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Ending(StrEnum):
    """How a request has ended, as the gateway sees it."""

    ANSWERED = "answered"  # A replica answered, with any status.
    REFUSED = "refused"  # The gateway refused it: too large, too slow, or for only one replica.
    CUT_OFF = "cut_off"  # The replica ended before its answer was complete.
    NO_REPLICA = "no_replica"  # No replica could be reached.
    CANCELLED = "cancelled"  # The client disconnected.


class FrontMetrics:
    """The metrics of a process without a model of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter
        self.registry = CollectorRegistry()
        self._refused_access = self._counter("refused_access", "Requests by a forbidden name, or web page.", "reason")
        self._refusal_delay = self._counter("refusal_delay_seconds", "Time for which refusals were held back.")
        self._begin_at_zero(self._refused_access, AccessRefusal)
        ProcessCollector(registry=self.registry)

    def count_refused(self, reason: AccessRefusal) -> None:
        self._refused_access.labels(reason).inc()

    def count_refusal_delay(self, delay_ns: int) -> None:
        self._refusal_delay.inc(delay_ns / 1e9)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"oaiserve_gateway_{name}_total", text, labels, registry=self.registry)

    def _begin_at_zero(self, metric: Counter, values: Iterable[str]) -> None:
        """Start with a sample for each value, so that PromQL's `rate` sees the first increment."""
        for value in values:
            metric.labels(value)

    def show(self, connections: Connections) -> None:
        self.registry.register(_Connections(connections))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class GatewayMetrics(FrontMetrics):
    """The gateway's counters, and the state of the replicas, which is read at a scrape."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        counter = self._counter

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(f"oaiserve_gateway_{name}_seconds", text, buckets=bounds, registry=self.registry)

        self.choices = counter("choices", "Replicas that were chosen, by the reason.", "replica", "reason")
        self.expected_hit_tokens = counter("expected_hit_tokens", "Prompt tokens expected in the cache, at least.")
        self.requests = counter("requests", "Requests that have ended, by how.", "ending")
        self.moved = counter("moved", "Requests sent to another replica: unreachable, or the status.", "reason")
        self.continued = counter("continued", "Streams that another replica goes on with, or failed.", "result")
        self.spans = counter("spans", "Spans: ended, and then exported, failed or dropped.", "result")
        self.choice_seconds = histogram("choice", "Time to make a prompt's keys, and to choose.", CHOICE_SECONDS)
        self.wait_seconds = histogram("wait", "Time from a body to the head of its answer.", WAIT_SECONDS)
        self._begin_at_zero(self.requests, Ending)
        self._begin_at_zero(self.moved, ("unreachable", "429", "500", "503"))
        self._begin_at_zero(self.continued, ("alike", "unlike", "failed"))
        self._begin_at_zero(self.spans, ("ended", "exported", "failed", "dropped"))
        self.registry.register(_Replicas(watch))


def counts(counter: Counter, label: str) -> dict[str, int]:
    """Return the count for each value of the label, over all values of the others."""
    totals: dict[str, int] = {}
    for sample in (sample for metric in counter.collect() for sample in metric.samples):
        totals[sample.labels[label]] = totals.get(sample.labels[label], 0) + int(sample.value)
    return totals


class _Connections(Collector):
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        name = "oaiserve_gateway_connections"
        yield GaugeMetricFamily(name, "Open connections of clients.", self._connections.num_open)
        refused = CounterMetricFamily(f"{name}_refused", "Connections that the gateway closed.", labels=["reason"])
        for reason, number in self._connections.refused.items():
            refused.add_metric([reason], number)
        yield refused


class _Replicas(Collector):
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        by = ["replica"]
        up = GaugeMetricFamily(
            "oaiserve_gateway_replica_up",
            "Whether it gets requests: it answers, is ready, and not left out.",
            labels=by,
        )
        num_open = GaugeMetricFamily("oaiserve_gateway_open_requests", "Requests without a whole answer.", labels=by)
        ejected = CounterMetricFamily("oaiserve_gateway_ejected", "Pauses after failed requests.", labels=by)
        for name, upstream in self._watch.upstreams.items():
            labels = [str(upstream.number)]
            up.add_metric(labels, float(name in self._watch.joined and name not in self._watch.silent))
            num_open.add_metric(labels, upstream.num_open)
            ejected.add_metric(labels, upstream.num_ejections)
        yield from (up, num_open, ejected)
