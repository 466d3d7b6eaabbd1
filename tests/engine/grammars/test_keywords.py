"""Tests that keywords of JSON Schema are obeyed or refused as the documentation says."""

from pathlib import Path

import pytest

from tests.engine.grammars.keywords import OBEYED, REFUSED, Obeyed, RefusedRow, Vocabulary, failures, tables

ROOT = Path(__file__).parents[3]
VOCABULARY = Vocabulary()


@pytest.mark.parametrize("row", [*OBEYED, *REFUSED], ids=lambda row: f"{row.keyword} {row.note}".rstrip())
def test_a_keyword_is_obeyed_or_refused_as_its_row_says(row: Obeyed | RefusedRow) -> None:
    assert list(failures(VOCABULARY, row, num_walks=3)) == []


def test_a_row_that_does_not_hold_is_found() -> None:
    row = Obeyed("type", {"type": "integer"}, valid=["x"], invalid=[5])
    assert list(failures(VOCABULARY, row, 0)) == ["x is not accepted", "5 is accepted"]
    assert list(failures(VOCABULARY, RefusedRow("type", {"type": "integer"}, "$.type"), 0)) == ["it is not refused"]


def test_the_tables_are_those_of_the_documentation() -> None:
    assert tables() in (ROOT / "docs/reference/json-schema.md").read_text()
