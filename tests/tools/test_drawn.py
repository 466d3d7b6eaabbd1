"""Results in the documentation have the numbers that it draws, and no others."""

import json
from typing import Any

import pytest

from tools import drawn


def draw(results: dict[str, Any]) -> str:
    rows = [f"{name}: {run['speed']:.1f}" for name, run in results["runs"].items() if "speed" in run]
    return "\n".join([results["created"], *rows])


def test_what_is_not_drawn_goes_and_the_rest_keeps_its_order_and_few_digits() -> None:
    runs = {
        "b": {"speed": 12.3456, "samples": [1, 2]},
        "a": {"speed": 0.05, "memory": {"MiB": 5}},
        "c": {"samples": []},
    }
    results = {"created": "2026-11-28", "machine": "a", "runs": runs, "counts": [1]}
    text = draw(results)
    reduced = drawn.reduced(results, draw)
    assert reduced == {
        "created": "2026-11-28",
        "machine": "a",
        "runs": {"b": {"speed": 12.3}, "a": {"speed": 0.05}},
    }
    assert [*reduced["runs"]] == ["b", "a"]
    assert draw(json.loads(drawn.as_lines(reduced))) == text


@pytest.mark.parametrize("name", ["cpu-peers", "step"])
def test_the_results_of_the_documentation_are_reduced(name: str) -> None:
    """If this fails, `python -m tools.drawn` reduces them."""
    results = json.loads((drawn.FOLDER / f"{name}.json").read_text())
    assert drawn.as_lines(drawn.reduced(results, drawn.DRAWN[name])) == (drawn.FOLDER / f"{name}.json").read_text()


def test_results_stay_small() -> None:
    assert sum(file.stat().st_size for file in drawn.FOLDER.iterdir()) <= 120_000
