"""A dry run of the articles' experiments: each runs with every setting, and its table has a figure for each column."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loadtest.cli import main as bench
from tools.bench import articles
from tools.load import _words

MODEL = "gpt2-124m"  # a dry run makes it tiny


def test_each_experiment_has_its_figures_beside_those_of_its_article(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it runs in this process: a process for each setting would import torch each time."""
    asked: list[Mapping[str, Any]] = []

    def run(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
        asked.append(options)
        path = tmp_path / "run.json"
        assert bench(["run", "--target", "engine", "--model", model, *_words(options), "--json", str(path)]) == 0
        (point,) = json.loads(path.read_text())["points"]
        return point

    def counts(model: articles.Model, arguments: Any) -> list[dict[str, Any]]:
        capsys.readouterr()
        articles.count(model.path, arguments.device)
        return [{"model": model.name} | json.loads(line) for line in capsys.readouterr().out.splitlines()]

    monkeypatch.setattr(articles, "run_in_process", run)
    monkeypatch.setattr(articles, "_counts", counts)
    monkeypatch.setattr(articles, "COUNTED_STREAMS", ((1, 1), (4, 1), (1, 8)))
    articles.main(["--quick", "--models", MODEL, "--json", str(tmp_path / "articles.json")])
    results = json.loads((tmp_path / "articles.json").read_text())
    num_settings = [len(experiment.settings) for experiment in articles.EXPERIMENTS.values()]
    assert len(asked) == sum(num_settings) == 7
    assert {options["--tokenize-workers"] for options in asked if "--tokenize-workers" in options} == {0, 4}
    assert [(run["model"], len(run["summary"]) > 0) for run in results["runs"]] == [(MODEL, True)] * 7
    text = articles.report(results)
    for row in (line for line in text.splitlines() if line.startswith(f"| {MODEL} ")):
        assert "" not in [cell.strip() for cell in row.strip("|").split("|")], row
    assert text.count(f"| {articles.ARTICLE} |") == 4
    one, four, eighth = results["counts"]
    tokens = articles.COUNTED_TOKENS
    assert (one["num_tokens"], one["hand_overs"], one["wake_ups"]) == (tokens, tokens, tokens)
    assert four["num_tokens"] == 4 * tokens
    # In how many steps depends on when the requests come.
    assert four["hand_overs"] == four["wake_ups"] <= four["num_steps"]
    assert eighth["hand_overs"] == 1 + -(-(tokens - 1) // 8)


def test_a_run_that_measured_nothing_of_a_column_leaves_its_cell_empty() -> None:
    columns = {"TPOT p50, ms": "tpot_p50", "tokens/s": "rate"}
    assert list(articles._shown({"rate": {"mean": 1234.5}}, columns)) == ["", "1,234"]
    assert list(articles._shown({"tpot_p50": {"mean": 0.0125}}, columns)) == ["12.5", ""]
