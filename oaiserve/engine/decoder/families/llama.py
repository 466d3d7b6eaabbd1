"""Llama and its likes, which differ from it by numbers, names or biases alone."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.facts import Facts, llama, windows_by_type, windows_of_all
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.settings import Settings


def _granite(settings: Settings) -> Facts:
    return replace(
        llama(settings),
        scaling=settings["attention_multiplier"],
        embedding_scale=settings["embedding_multiplier"],
        vector_scale=settings["embedding_multiplier"],
        residual_scale=settings["residual_multiplier"],
        logits_scale=1 / settings["logits_scaling"],
    )


def _mistral(settings: Settings) -> Facts:
    return replace(llama(settings), windows=windows_of_all(settings))


def _with_windows(settings: Settings) -> Facts:
    return replace(llama(settings), windows=windows_by_type(settings))


def _pairs(settings: Settings) -> Facts:
    return replace(llama(settings), is_interleaved=True)


FAMILIES = (
    *(Family(type=name) for name in ("llama", "arcee", "seed_oss")),
    Family(type="mistral", facts=_mistral),
    *(Family(type=name, facts=_with_windows) for name in ("ministral", "qwen2", "qwen3")),
    *(Family(type=name, facts=_pairs) for name in ("helium", "ernie4_5", "glm")),
    Family(type="granite", facts=_granite),
)
