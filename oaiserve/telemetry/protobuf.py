"""Prometheus' protobuf format, the only one in which it reads native histograms.

The numbers of fields are those of io.prometheus.client.MetricFamily, in metrics.proto of prometheus/client_model.
"""

from __future__ import annotations

import struct

from oaiserve.telemetry.names import Metric
from oaiserve.telemetry.native import SCHEMA, ZERO_THRESHOLD
from oaiserve.telemetry.series import NS_PER_SECOND, Exemplar, HistogramChild, HistogramFamily, LabelValues, Number

# The type of a family, and the field of a metric that has its value.
_TYPES = {"counter": (0, 3), "gauge": (1, 2), "info": (1, 2), "summary": (2, 4), "histogram": (4, 7)}


def family_of(metric: Metric, samples: bytes) -> bytes:
    """Return a family with its length before it, or nothing for one without samples."""
    head = _text(1, metric.name) + _text(2, metric.help) + _integer(3, _TYPES[metric.type][0]) + _text(5, metric.unit)
    return _varint(len(head + samples)) + head + samples if samples else b""


def sample_of(metric: Metric, values: LabelValues, value: bytes) -> bytes:
    labels = b"".join(_label(*pair) for pair in zip(metric.labels, values, strict=True))
    return _message(4, labels + _message(_TYPES[metric.type][1], value))


def number(value: Number) -> bytes:
    return _real(1, value)


def histogram(family: HistogramFamily, child: HistogramChild) -> bytes:
    """Return a histogram with the buckets of the metric and with native ones, or a summary, which has neither."""
    parts = [_integer(1, child.num), _real(2, family.total(child))]
    if family.metric.buckets:
        exemplars, native = family.exemplars(child), family.native(child)
        bounds = (*family.metric.buckets, float("inf"))
        for place, (bound, count) in enumerate(zip(bounds, family.cumulative(child), strict=True)):
            exemplar = _exemplar(exemplars[place], family.per_unit) if place in exemplars else b""
            parts.append(_message(3, _integer(1, count) + _real(2, bound) + exemplar))
        parts += (_integer(5, _zigzag(SCHEMA)), _real(6, ZERO_THRESHOLD), _integer(7, native.num_zeros))
        parts += (_message(12, _integer(1, _zigzag(gap)) + _integer(2, 1)) for gap in native.gaps)
        steps = zip([0, *native.counts], native.counts, strict=False)
        parts += (_integer(13, _zigzag(count - before)) for before, count in steps)
    return b"".join(parts)


def _exemplar(exemplar: Exemplar, per_unit: int) -> bytes:
    seconds, ns = divmod(exemplar.origin.at_unix_ns, NS_PER_SECOND)
    label = _label("trace_id", f"{exemplar.origin.trace_id:032x}")
    time = _message(3, _integer(1, seconds) + _integer(2, ns))
    return _message(3, label + _real(2, exemplar.value / per_unit) + time)


def _label(name: str, value: str) -> bytes:
    return _message(1, _text(1, name) + _text(2, value))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


def _zigzag(value: int) -> int:
    return value * 2 if value >= 0 else -2 * value - 1


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _real(field: int, value: Number) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode("utf-8", "replace"))  # as in the text formats
