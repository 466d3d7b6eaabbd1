"""The generated parts of the documentation are those of the code, and of the results."""

import json

import pytest

from tools import charts, reference

TABLES = reference.tables()


@pytest.mark.parametrize(("page", "name"), TABLES, ids=lambda part: part)
def test_the_pages_have_the_tables_of_the_code(page: str, name: str) -> None:
    """If this fails, `python -m tools.reference` writes the tables again."""
    text = TABLES[page, name].strip()
    assert f"<!-- {name} -->\n\n{text}\n\n<!-- end of {name} -->" in (reference.FOLDER / page).read_text()


def test_the_chart_is_current() -> None:
    """If this fails, `python -m tools.charts` draws it again."""
    assert charts.CHART.read_text() == charts.chart(json.loads(charts.RESULTS.read_text()))
