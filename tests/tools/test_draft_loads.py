"""The rows of figures of drafts say what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from oaiserve.engine.engine import Engine
from tools.bench.draft_loads import HEADER, PARTS, Answers, Work, row
from tools.bench.drafts import Case


def test_a_row_has_medians_ratios_and_what_came_true() -> None:
    work = Work("quote", cast("Engine", None), Case("quote", 0.0), 2, 3, 4)
    ids = [[1, 2, 3, 4], [5, 6, 7, 8]]
    pairs = [(Answers(ids, 2.0, 6, 3), Answers(ids, ms, 0, 0)) for ms in (4.0, 4.0, 8.0)]
    pairs[2] = (pairs[2][0], Answers([[0], [0]], 8.0, 0, 0))
    found = dict(zip(HEADER, row(work, pairs), strict=True))
    assert found["text"] == "quote, temperature 0"
    assert (found["sequences"], found["ms/token without"], found["with"]) == ("2", "4.00", "2.00")
    assert found["times as fast"].startswith("2.5198 (")
    assert (found["drafted"], found["came true"], found["same answers"]) == ("75%", "50%", "2 of 3")


def test_each_part_has_a_table_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "measurements.md").read_text()
    for part in PARTS:
        assert f"<!-- drafts-{part} -->" in page
