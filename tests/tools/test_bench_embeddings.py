"""The benchmark of embeddings: its texts, how it compares vectors, and its table."""

from __future__ import annotations

import numpy as np
import pytest

from tools.bench.embeddings import LOADS, OURS, PEER, least_cosine, report, texts_of


@pytest.mark.parametrize("load", LOADS)
def test_texts_are_as_long_as_said_and_never_the_same(load: str) -> None:
    texts = texts_of(load, 0, 50)
    low, high = LOADS[load]
    assert all(low <= len(text.split()) <= high for text in texts)
    assert texts == texts_of(load, 0, 50)
    assert not set(texts) & set(texts_of(load, 1, 50))


def test_the_least_cosine_is_that_of_the_worst_pair() -> None:
    first = np.array([[1.0, 0.0], [0.0, 2.0]])
    assert least_cosine(first, first * 3) == pytest.approx(1.0)
    assert least_cosine(first, np.array([[1.0, 0.0], [2.0, 0.0]])) == pytest.approx(0.0)


def test_the_table_has_a_row_for_each_load() -> None:
    run = {
        "model": "minilm-l6",
        "load": "queries",
        "texts_per_second": {OURS: [300.0, 150.0, 240.0], PEER: [100.0, 100.0, 120.0]},
        "ratios": [3.0, 1.5, 2.0],
        "least_cosine": 0.99999999,
    }
    text = report({"machine": "A CPU", "peer": "x==1", "dtype": "float32", "created": "2026-01-01", "runs": [run]})
    assert "A CPU; x==1; float32; 2026-01-01." in text
    row = "| minilm-l6 | queries | 240 (150..300) | 100 (100..120) | **2.00 (1.50..3.00)** | 1.000000 |"
    assert row in text
