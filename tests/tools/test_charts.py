"""The chart of the documentation agrees with the results that it is drawn from."""

from __future__ import annotations

from tools import charts


def test_the_chart_is_current() -> None:
    """If this fails, `python -m tools.charts` draws it again."""
    assert charts.CHART.read_text() == charts.chart()
