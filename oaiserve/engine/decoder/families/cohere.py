"""Cohere's Command models, whose attention and MLP read the output of one LayerNorm without a bias."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.facts import Facts, windows_by_type, with_layer_norms
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.settings import Settings


def _cohere(settings: Settings) -> Facts:
    return replace(
        with_layer_norms(settings),
        is_interleaved=True,
        is_parallel=True,
        logits_scale=settings["logit_scale"],
    )


def _cohere2(settings: Settings) -> Facts:
    windows = windows_by_type(settings)
    return replace(_cohere(settings), windows=windows, rotates=tuple(window is not None for window in windows))


FAMILIES = (
    Family(type="cohere", facts=_cohere),
    Family(type="cohere2", facts=_cohere2),
)
