"""The charts of the documentation agree with the results that they are drawn from."""

from __future__ import annotations

import pytest

from tools import charts

IMAGES = charts.DOCS / "images"


@pytest.mark.parametrize("name", charts.charts())
def test_the_charts_are_current(name: str) -> None:
    """If this fails, `python -m tools.charts` draws them again."""
    assert (IMAGES / name).read_text() == charts.charts()[name]
