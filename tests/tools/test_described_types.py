"""The table of docs/reference/models.md says which executors compute each described type from which files."""

from dataclasses import replace
from pathlib import Path

import pytest

from oaiserve.engine.decoder.facts import Facts, llama
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.settings import Settings
from tools.described_types import MARKERS, SOURCES, cells, executors_of

pytestmark = pytest.mark.compiler
_PAGE = (Path(__file__).parents[2] / "docs/reference/models.md").read_text()
_TABLE = _PAGE.partition(f"<!-- {MARKERS} -->")[2].partition("<!-- end")[0].strip().splitlines()
(_, *_SOURCES), _, *_ROWS = ([cell.strip() for cell in line.strip("|").split("|")] for line in _TABLE)


def test_each_described_type_has_one_row() -> None:
    assert sorted(name for types, *_ in _ROWS for name in types.split(", ")) == sorted(FAMILIES)


@pytest.mark.parametrize("row", _ROWS, ids=lambda row: row[0].split(", ")[0])
def test_the_first_type_of_a_row_has_these_executors(row: list[str]) -> None:
    types, *published = row
    found = dict(zip(SOURCES, cells(executors_of(types.split(", ")[0])), strict=True))
    columns = zip(_SOURCES, published, strict=True)
    assert found == {source: executors for sources, executors in columns for source in sources.split(", ")}


def test_an_executor_that_computes_other_logits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(settings: Settings) -> Facts:
        return replace(llama(settings), residual_scale=0.9)

    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], facts=facts))
    with pytest.raises(AssertionError, match="'llama', 'safetensors', 'reference'"):
        executors_of("llama")
