"""Metrics of a server, and the samples on their page by the parsers of the Prometheus client library."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.decoder import _DecodeVarint
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.telemetry import names
from oaiserve.telemetry.metrics import Measured, Metrics

TEXT, OPENMETRICS = "text/plain", "application/openmetrics-text; version=1.0.0"
OPENMETRICS_2 = "application/openmetrics-text; version=2.0.0"
PROTOBUF = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
FORMS = (TEXT, OPENMETRICS, OPENMETRICS_2, PROTOBUF)

# The fields that we use of metrics.proto in prometheus/client_model; a star is for repeated ones.
PROTO = {
    "Label": "name=1:string value=2:string",
    "Time": "seconds=1:int64 nanos=2:int32",
    "Exemplar": "label=1:Label* value=2:double timestamp=3:Time",
    "Bucket": "cumulative_count=1:uint64 upper_bound=2:double exemplar=3:Exemplar",
    "Span": "offset=1:sint32 length=2:uint32",
    "Number": "value=1:double",
    "Histogram": "sample_count=1:uint64 sample_sum=2:double bucket=3:Bucket* schema=5:sint32 zero_threshold=6:double "
    "zero_count=7:uint64 positive_span=12:Span* positive_delta=13:sint64*",
    "Metric": "label=1:Label* gauge=2:Number counter=3:Number summary=4:Histogram histogram=7:Histogram",
    "Family": "name=1:string help=2:string type=3:int32 metric=4:Metric* unit=5:string",
}
ZERO = -1000
TYPES = {0: "counter", 1: "gauge", 2: "summary", 4: "histogram"}

Key = tuple[str, frozenset[tuple[str, str]]]


def metrics_of(*, vllm: bool = True, **changes: Any) -> Metrics:
    elsewhere = {
        names.CONNECTIONS: lambda: {(): 2},
        names.CONNECTIONS_REFUSED: lambda: {("all",): 3},
        names.STORED_RESPONSES: lambda: {(): 4},
        names.STORED_RESPONSE_BYTES: lambda: {(): 500},
        names.STORED_RESPONSES_DROPPED: lambda: {("age",): 6},
        names.ENGINE_FEATURE: lambda: {("attention",): 1},
        names.METER_JOULES: lambda: {(): 812.5},
        names.LOG_MESSAGES: lambda: {("warning", "left_out"): 3},
    }
    measured = Measured(
        model="demo",
        version="1.2.3",
        snapshot=EngineNumbers,
        model_info={"dtype": "bfloat16", "block_size": "16"},
        elsewhere=elsewhere,
    )
    return Metrics(replace(measured, **changes), vllm=vllm, epoch_offset_ns=1_700_000_000 * 10**9)


def key(name: str, **labels: str) -> Key:
    return name, frozenset(labels.items())


def families(page: bytes, form: str) -> list[Metric]:
    if form == PROTOBUF:
        return [_family(family) for family in messages(page)]
    text = page.decode()
    if form == OPENMETRICS_2:
        for name, suffix in re.findall(r"^# TYPE ([\w:]+)(_total|_info) (?:counter|info)$", text, re.MULTILINE):
            text = re.sub(f"^(# [A-Z]+ {name}){suffix} ", r"\1 ", text, flags=re.MULTILINE)
        text = COMPOSITE.sub(_older, text)
    return list((parse_text if form == TEXT else parse_openmetrics)(text))


def messages(page: bytes) -> Iterator[Any]:
    """Yield the families of a page in protobuf, by the library of Google."""
    file = descriptor_pb2.FileDescriptorProto(name="metrics.proto", package="p")
    for name, fields in PROTO.items():
        message = file.message_type.add(name=name)
        for field, number, kind, star in re.findall(r"(\w+)=(\d+):(\w+)(\*?)", fields):
            added = message.field.add(name=field, number=int(number), label=3 if star else 1)
            if kind in PROTO:
                added.type, added.type_name = 11, f".p.{kind}"
            else:
                added.type = getattr(added, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    family, at = message_factory.GetMessageClass(pool.FindMessageTypeByName("p.Family")), 0
    while at < len(page):
        size, at = _DecodeVarint(page, at)
        yield family.FromString(page[at : at + size])
        at += size


def _family(message: Any) -> Metric:
    kind = TYPES[message.type]
    suffix = "_total" if kind == "counter" else ""
    family = Metric(message.name.removesuffix(suffix), message.help, kind, message.unit)
    for metric in message.metric:
        labels, value = {label.name: label.value for label in metric.label}, getattr(metric, kind)
        if kind in ("counter", "gauge"):
            family.add_sample(message.name, labels, value.value)
            continue
        for bucket in value.bucket:
            family.add_sample(
                f"{message.name}_bucket", labels | {"le": str(bucket.upper_bound)}, bucket.cumulative_count
            )
        family.add_sample(f"{message.name}_count", labels, value.sample_count)
        family.add_sample(f"{message.name}_sum", labels, value.sample_sum)
    return family


# The line of a histogram or of a summary in OpenMetrics 2, whose value is all of it.
COMPOSITE = re.compile(
    r"^([\w:]+)(?:\{(.*)\})? \{count:(\d+),sum:([^,]+),(.*?)(?:bucket|quantile):\[(.*?)\]\}.*\n", re.MULTILINE
)


def _older(found: re.Match[str]) -> str:
    """Return the lines of OpenMetrics 1, without exemplars."""
    name, labels, count, total, _, buckets = found.groups()
    in_braces, more = (f"{{{labels}}}", f"{labels},") if labels else ("", "")
    bounds = (bucket.split(":") for bucket in buckets.split(",") if bucket)
    lines = [f'{name}_bucket{{{more}le="{bound}"}} {number}\n' for bound, number in bounds]
    return "".join((*lines, f"{name}_count{in_braces} {count}\n", f"{name}_sum{in_braces} {total}\n"))


def natives(metrics: Metrics, form: str) -> dict[Key, dict[int, int]]:
    """Return the native histograms of a page in protobuf or OpenMetrics 2: counts by bucket, at ZERO those of 0."""
    page, found = metrics.render(form)[0], dict[Key, dict[int, int]]()
    for family in messages(page) if form == PROTOBUF else ():
        for metric in family.metric if family.type == 4 else ():
            value = metric.histogram
            assert (value.schema, value.zero_threshold) == (3, 2.0**-128)
            spans = [number for span in value.positive_span for number in (span.offset, span.length)]
            counts, labels = [*accumulate(value.positive_delta)], {label.name: label.value for label in metric.label}
            found[key(family.name, **labels)] = _by_bucket(spans, counts, value.zero_count, value.sample_count)
    for name, labels, count, _, native, _ in COMPOSITE.findall(page.decode()) if form == OPENMETRICS_2 else ():
        if native:
            head = re.match(r"schema:3,zero_threshold:2\.938735877055719e-39,zero_count:(\d+),", native)
            lists = dict(re.findall(r"(\w+):\[(.*?)\]", native))
            spans, counts = (
                [int(number) for number in re.findall(r"-?\d+", lists.get(f"positive_{name}", ""))]
                for name in ("spans", "buckets")
            )
            pairs = dict(re.findall(r'(\w+)="(.*?)"', labels))
            found[key(name, **pairs)] = _by_bucket(spans, counts, int(head[1]), int(count))
    return found


def _by_bucket(spans: list[int], counts: list[int], zeros: int, total: int) -> dict[int, int]:
    assert sum(counts) + zeros == total
    buckets: list[int] = []
    for gap, length in zip(spans[::2], spans[1::2], strict=True):
        first = gap + (buckets[-1] + 1 if buckets else 0)
        buckets += range(first, first + length)
    return dict(zip(buckets, counts, strict=True)) | ({ZERO: zeros} if zeros else {})


def samples(metrics: Metrics, form: str = TEXT) -> dict[Key, float]:
    return samples_on(metrics.render(form)[0], form)


def samples_on(page: bytes, form: str = TEXT) -> dict[Key, float]:
    """Return the samples of a page by name and labels, with the same spelling of `le` in both formats."""
    found: dict[Key, float] = {}
    for family in families(page, form):
        for sample in family.samples:
            labels = dict(sample.labels)
            if "le" in labels:
                labels["le"] = str(float(labels["le"]))
            assert key(sample.name, **labels) not in found, f"{sample.name} {labels} is there twice"
            found[key(sample.name, **labels)] = sample.value
    return found
