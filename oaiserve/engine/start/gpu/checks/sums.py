"""Compares sums in one kernel with the plain ones; the members of a split model use them if they agree."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oaiserve.engine.model.parallel.sums import OneShotSums
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.compare import Difference, compare, tolerance
from oaiserve.engine.start.gpu.checks.usable import is_usable, tried

SUMMED_ROWS = (1, 8, 33)  # that members add up, one after the other


@torch.inference_mode()
def one_shot_checked(
    loaded: LoadedModel,
    missing: Callable[[torch.device, int], str | None],
    make: Callable[[torch.device, int], OneShotSums],
) -> bool:
    """Let the members of a tensor-parallel model add up small messages in one kernel, if they get the plain sums.

    `missing` finds the reason against it here, without the others. All members `make` it together.
    """
    sums = loaded.sums
    if sums is None:
        return False
    name, instead = "Sums in one kernel", "NCCL makes them, which takes longer for small messages"
    if not is_usable(name, instead, lambda: missing(loaded.device, sums.size), sums):
        return False
    one_shot = tried(name, instead, lambda: make(loaded.device, sums.size), lambda _: None, sums)
    if one_shot is None:
        return False

    def problem() -> Difference | None:
        weights = loaded.model.get_input_embeddings().weight
        assert isinstance(weights, torch.Tensor)
        width = weights.shape[1]
        rows = (_random_rows(num_rows, width, sums.rank) for num_rows in SUMMED_ROWS)
        own = [one.to(loaded.device, loaded.dtype) for one in rows]
        # Twice: the memory that members map is used again. All of them, also if one is wrong: the others add up theirs.
        named = [("sums", one) for one in own if one_shot.fits(one) for _ in range(2)]
        return compare(one_shot, lambda one: sums.by_library(one.clone()), named, tolerance(loaded.dtype))

    if not is_usable(name, instead, problem, sums):
        return False
    sums.one_shot = one_shot
    return True


def _random_rows(num_rows: int, width: int, rank: int) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(100 * num_rows + rank))
