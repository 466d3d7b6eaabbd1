"""Replicas are added when the cache or the batch is used up, or requests wait, and removed when few do the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from oaiserve.scale.on_ray.autoscaling import USE, ByUse, use


@dataclass
class Context:
    uses: Mapping[str, float]
    current_num_replicas: int
    target_num_replicas: int = 3
    aggregated_metrics: Mapping[str, Mapping[str, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.aggregated_metrics = {USE: self.uses} if self.uses else {}


@pytest.mark.parametrize(
    ("uses", "num_replicas", "asked"),
    [
        ({"a": 0.8, "b": 0.8}, 2, 2),
        ({"a": 1.6, "b": 1.6}, 2, 4),
        ({"a": 0.2, "b": 0.2}, 2, 0.5),
        ({"a": 0.8}, 2, 2),  # b has just started
        ({}, 2, 3),  # nobody has recorded anything, so the target stays
    ],
)
def test_the_number_follows_the_use(uses: dict[str, float], num_replicas: int, asked: float) -> None:
    assert ByUse(0.8)(Context(uses, num_replicas)) == (pytest.approx(asked), {})


def test_what_waits_counts_as_if_it_were_in_there() -> None:
    assert use(0.5, 0, 1000, 4, 0, 16) == 0.5
    assert use(0.5, 1000, 1000, 4, 0, 16) == 1.5
    assert use(0.1, 0, 1000, 16, 16, 16) == 2


def test_a_wrong_target_is_refused() -> None:
    with pytest.raises(ValueError, match="target_use is 0"):
        ByUse(0)
