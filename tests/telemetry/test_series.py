"""A quantity is recorded once in a series and shown by several families."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.facts.metric import Metric
from oaiserve.telemetry.series import Distribution, Exemplar, HistogramFamily, Origin

FINE = Metric("fine", "histogram", "", "seconds", ("model", "size"), (0.001, 0.01, 0.1, 1.0))
COARSE = Metric("coarse", "histogram", "", "seconds", ("model_name",), (0.01, 1.0))
RED = ("red", "small")


def origin(at_unix_ns: int) -> Origin:
    return Origin(1, 2, at_unix_ns)


ORIGIN = origin(3)


def distribution() -> Distribution:
    return Distribution("model", "size", shown_as=(FINE, COARSE), per_unit=1000)  # whole milliseconds


def points(family: HistogramFamily) -> list[tuple[list[int], float, dict[int, Exemplar]]]:
    return [(family.cumulative(child), family.total(child), family.exemplars(child)) for child in family.children()]


def test_an_exemplar_of_a_wide_bucket_is_the_latest_of_the_narrow_ones() -> None:
    series = distribution()
    series.add(("red", "small"), 1, origin(20))
    series.add(("red", "large"), 10, origin(10))
    series.add(("red", "large"), 5000, ORIGIN)
    ((_, _, exemplars),) = points(HistogramFamily(COARSE, series))
    assert exemplars == {0: Exemplar(1, origin(20)), 2: Exemplar(5000, ORIGIN)}


@given(st.lists(st.lists(st.integers(0, 2000), max_size=30), max_size=3))
def test_many_values_at_once_are_the_same_as_one_by_one(lists: list[list[int]]) -> None:
    at_once = distribution()
    one_by_one = distribution()
    for values in lists:
        at_once.add_all(RED, array("q", values), ORIGIN)
        for value in values:
            one_by_one.add(RED, value, ORIGIN)
    assert points(HistogramFamily(FINE, at_once)) == points(HistogramFamily(FINE, one_by_one))


def test_all_values_of_a_very_long_answer_count() -> None:
    series = distribution()
    series.add_all(RED, array("q", range(10_000)), ORIGIN)
    ((counts, total, _),) = points(HistogramFamily(FINE, series))
    assert (counts, total) == ([2, 11, 101, 1001, 10_000], sum(range(10_000)) / 1000)


def test_a_family_cannot_show_a_boundary_that_the_series_lacks() -> None:
    with pytest.raises(ValueError, match="500 is not in list"):
        HistogramFamily(Metric("other", "histogram", "", buckets=(0.5,)), distribution())
