"""Compares sums in one kernel with the plain ones; the members of a split model use them if they agree."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oaiserve.engine.model.parallel.sums import OneShot
from oaiserve.engine.model.rehearsal import difference, tolerance
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.gpu.checks.usable import is_usable

SUMMED_ROWS = (1, 8, 33)  # that members add up, one after the other


@torch.inference_mode()
def one_shot_checked(
    loaded: LoadedModel,
    missing: Callable[[torch.device, int], str | None],
    make: Callable[[torch.device, int], OneShot],
) -> bool:
    """Let the members of a model that is split add up small messages in one kernel, if they get the plain sums. Return
    whether they do.

    `missing` says what that lacks here, without the others. All members `make` it together.
    """
    sums = loaded.sums
    if sums is None:
        return False
    name, instead = "Sums in one kernel", "NCCL makes them, which takes longer for small messages"
    if not is_usable(name, instead, lambda: missing(loaded.device, sums.size), sums):
        return False
    made: list[OneShot] = []

    def prepare() -> None:
        made.append(make(loaded.device, sums.size))

    def problem() -> str | None:
        weights = loaded.model.get_input_embeddings().weight
        assert isinstance(weights, torch.Tensor)
        differences = [0.0]
        for num_rows in SUMMED_ROWS:  # all of them, also if one is wrong: the others add up theirs
            generator = torch.Generator().manual_seed(100 * num_rows + sums.rank)
            own = torch.randn(num_rows, weights.shape[1], generator=generator).to(loaded.device, loaded.dtype)
            want = sums.by_library(own.clone())
            if made[0].fits(own):
                # Twice: the memory that members map is used again.
                differences += [difference(made[0](own), want) for _ in range(2)]
        limit = tolerance(loaded.dtype)
        wrong = [one for one in differences if not one <= limit]
        return f"sums would differ by {wrong[0]:.1%} (allowed: {limit:.1%})" if wrong else None

    if not is_usable(name, instead, prepare, sums) or not is_usable(name, instead, problem, sums):
        return False
    sums.one_shot = made[0]
    return True
