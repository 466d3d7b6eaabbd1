"""Native histograms have the values of the classic ones, in both formats that have them, and in a real Prometheus."""

from collections import Counter
from fractions import Fraction
from itertools import count
from math import ceil, floor, log2
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.facts.record import RequestRecord
from oaiserve.telemetry import names
from tests.e2e.prometheus import running_prometheus
from tests.plain_http import Handler, running_http
from tests.telemetry.pages import OPENMETRICS_2, PROTOBUF, ZERO, messages, metrics_of, natives
from tests.telemetry.records import Value, histograms, records


def bucket_of(value: Value) -> int:
    """Return the first bucket whose boundary, the eighth root of a power of two, is not less than the value.

    A mean may be between two nanoseconds, and counts as the upper one.
    """
    rounded = Fraction(ceil(value * 10**9), 10**9)
    if rounded == 0:
        return ZERO
    return next(index for index in count(floor(8 * log2(rounded)) - 2) if rounded**8 <= Fraction(2) ** index)


@pytest.mark.parametrize("form", [OPENMETRICS_2, PROTOBUF])
@given(ended=st.lists(records(), max_size=5))
@settings(max_examples=20)
def test_every_value_of_a_request_is_in_its_native_bucket(form: str, ended: list[RequestRecord]) -> None:
    metrics = metrics_of()
    for record in ended:
        metrics.observe(record)
    expected = {name: Counter(map(bucket_of, values)) for name, values in histograms(ended).items()}
    assert {name: counts for name, counts in natives(metrics, form).items() if counts} == expected


def test_a_bucket_in_protobuf_has_its_exemplar(make_record) -> None:
    metrics, record = metrics_of(), make_record()
    metrics.observe(record)
    (family,) = (one for one in messages(metrics.render(PROTOBUF)[0]) if one.name == names.DURATION_SECONDS.name)
    (exemplar,) = (bucket.exemplar for bucket in family.metric[0].histogram.bucket if bucket.HasField("exemplar"))
    assert [(label.name, label.value) for label in exemplar.label] == [("trace_id", f"{0xABC:032x}")]
    assert exemplar.value == record.times.duration_ns / 1e9
    at_ns = exemplar.timestamp.seconds * 10**9 + exemplar.timestamp.nanos
    assert at_ns == 1_700_000_000 * 10**9 + record.times.responded


@pytest.mark.prometheus
def test_a_prometheus_that_asks_for_native_histograms_reads_them(tmp_path: Path, make_record) -> None:
    metrics = metrics_of()
    for _ in range(3):
        metrics.observe(make_record())
    accepted: set[str] = set()

    class Page(Handler):
        def do_GET(self) -> None:
            page, kind = metrics.render(self.headers["accept"])
            accepted.add(kind)
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(page)

    seconds = make_record().times.duration_ns / 1e9
    with (
        running_http(Page) as url,
        running_prometheus(tmp_path, {"oaiserve": url}, features=("native-histograms",)) as prometheus,
    ):
        name = names.DURATION_SECONDS.name
        prometheus.wait_for(f"sum(histogram_count({name}))", {frozenset(): 3})
        (total,) = prometheus.query(f"sum(histogram_sum({name}))").values()
        (median,) = prometheus.query(f"histogram_quantile(0.5, sum({name}))").values()
        assert total == pytest.approx(3 * seconds)
        assert median == pytest.approx(seconds, rel=0.09)
        assert prometheus.query(f"sum({names.PROMPT_TOKENS.name})") == {frozenset(): 12}
        (series,) = prometheus.get("query_exemplars", query=name, start="0", end="2e9")
        assert [exemplar["labels"] for exemplar in series["exemplars"]] == [{"trace_id": f"{0xABC:032x}"}]
        assert prometheus.problems() == []
    assert accepted == {PROTOBUF}
