"""Llama and similar models, which differ from it only in numbers, names, biases or norms."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.facts import Facts, llama, windows_by_type, windows_of_all, with_layer_norms
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_QWEN2_OF_IMAGES = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")
_GLM4_NORMS: Names = {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}
HUNYUAN_NORMS: Names = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}


def granite(settings: Settings) -> Facts:
    return replace(
        llama(settings),
        scaling=settings["attention_multiplier"],
        embedding_scale=settings["embedding_multiplier"],
        vector_scale=settings["embedding_multiplier"],
        residual_scale=settings["residual_multiplier"],
        logits_scale=1 / settings["logits_scaling"],
    )


def granite_swa(settings: Settings) -> Facts:
    """Return the facts of Granite with sliding windows, some of whose layers may not rotate."""
    thetas = tuple(settings["layer_rope_theta"])  # 0 in layers that do not rotate
    return replace(
        granite(settings),
        windows=windows_by_type(settings),
        rotates=tuple(theta != 0 for theta in thetas),
        thetas=thetas,
    )


def _smollm3(settings: Settings) -> Facts:
    rotates = tuple(bool(rotates) for rotates in settings["no_rope_layers"])
    facts = _with_windows(settings)
    if settings["use_sliding_window"]:
        windows = facts.windows
    else:
        windows = (None,) * facts.num_layers
    return replace(facts, rotates=rotates, windows=windows)


def _hunyuan(settings: Settings) -> Facts:
    return replace(llama(settings), rotates_before_norms=True)


def _mistral(settings: Settings) -> Facts:
    return replace(llama(settings), windows=windows_of_all(settings))


def _with_windows(settings: Settings) -> Facts:
    return replace(llama(settings), windows=windows_by_type(settings))


def _pairs(settings: Settings) -> Facts:
    return replace(llama(settings), is_interleaved=True)


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
    *(Family(type=name) for name in ("llama", "arcee", "internlm3", "iquestcoder", "qwen3_vl_text", "seed_oss")),
    *(Family(type=name, facts=_mistral) for name in ("mistral", "ministral3", "phi3")),
    *(Family(type=name, facts=_with_windows) for name in ("cwm", "ministral", "qwen2", "qwen3", *_QWEN2_OF_IMAGES)),
    *(Family(type=name, facts=_pairs) for name in ("helium", "ernie4_5", "glm")),
    *(Family(type=name, facts=_pairs, other_names=_GLM4_NORMS) for name in ("glm4", "glm4v_text", "glm_ocr_text")),
    Family(type="granite", facts=granite),
    Family(type="granite_swa", facts=granite_swa),
    Family(type="hunyuan_v1_dense", facts=_hunyuan, other_names=HUNYUAN_NORMS),
    Family(type="smollm3", facts=_smollm3),
    Family(type="cohere", facts=_cohere),
    Family(type="cohere2", facts=_cohere2),
)
