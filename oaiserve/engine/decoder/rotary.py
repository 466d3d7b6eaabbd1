"""Rotary tables, computed from a model's settings, with the same bits as in transformers.

Which layers rotate, and which numbers form a pair, depends on the family; no file says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import NotKnown, RotaryTable
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.settings_by_type import Values

# The types that use `partial_rotary_factor` for frequencies of the kind "default". For other kinds, all types do.
_PARTLY_ROTATED = {
    *("bamba", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm4v_text", "glm_ocr_text", "gpt_neox"),
    *("mellum", "minimax_m2", "nemotron", "persimmon", "phi", "phi3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("solar_open", "stablelm"),
}
# These types multiply complex numbers, whose parts differ from cosines and sines in the last bits.
_COMPLEX = {"deepseek_v2", "llama4_text"}
_LENGTH = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"
_WITH_ALPHA = "dynamic with alpha"  # our own name, which no file uses
_HUNYUAN = {"hunyuan_v1_dense", "hunyuan_v1_moe"}


def rotary_table(
    settings: Settings,
    length: int,
    *,
    layer_type: str | None = None,
    theta: float | None = None,
    is_interleaved: bool = False,
    frequency_factors: Tensor | None = None,
) -> RotaryTable | None:
    """Return the table for positions below `length`, or None for a model whose layers don't rotate.

    `layer_type` selects the parameters of a layer type where types have different ones, and `theta` overrides the base
    in the settings. `frequency_factors` are float32 [pairs], the divisors that a GGUF file has. Raises NotKnown for
    parameters that have no known effect, and ValueError for a length at which the frequencies would change (see
    `context_length`).
    """
    rope = _parameters(settings, layer_type)
    if rope is None:
        return None
    if theta is not None:
        rope = {**rope, "rope_theta": theta}
    head_dim = settings["head_dim"]
    if layer_type == "full_attention" and settings["model_type"].startswith("gemma4"):
        head_dim = settings["global_head_dim"]
    kind = _kind(settings, rope)
    if (limit := _unchanged_length(kind, settings, rope)) is not None and length > limit:
        raise ValueError(f"rotary embeddings of kind '{kind}' change beyond {limit} positions, and {length} are needed")
    frequencies, scale = _KINDS[kind](settings, rope, head_dim)
    if frequency_factors is not None:
        frequencies = frequencies / frequency_factors
    angles = torch.arange(length)[:, None].float() * frequencies
    is_complex = settings["model_type"] in _COMPLEX
    apart = head_dim // 2 if kind == "proportional" else len(frequencies)
    if is_complex:
        rotations = torch.polar(torch.ones_like(angles), angles)
    else:
        rotations = None
    return RotaryTable(
        scale * (angles.cos() if rotations is None else rotations.real),
        scale * (angles.sin() if rotations is None else rotations.imag),
        is_interleaved=is_interleaved or is_complex,
        apart=1 if is_complex else apart,
        axes=_axes(settings, rope, len(frequencies)),
    )


def query_factors(settings: Settings, length: int) -> Tensor | None:
    """Return the factors of queries by position, float32 [length], or None if all are 1."""
    if settings["model_type"] == "llama4_text":
        return _llama4_query_factors(settings, length)
    rope = settings.get("rope_parameters") or {}
    beta = rope.get("llama_4_scaling_beta")
    if beta is None:
        return None
    if settings["model_type"] != "ministral3":
        raise NotKnown(f"models of type '{settings['model_type']}' don't scale queries by their positions")
    intervals = torch.arange(length) // _number(rope, _ORIGINAL)
    factors = 1 + beta * (1 + intervals).float().log()
    return None if bool((factors == 1).all()) else factors


def _llama4_query_factors(settings: Settings, length: int) -> Tensor | None:
    """Return the factors of Llama 4. They apply to the layers that do not rotate."""
    intervals = ((torch.arange(length).float() + 1) / settings["floor_scale"]).floor()
    factors = intervals.log1p() * settings["attn_scale"] + 1
    return factors if settings["attn_temperature_tuning"] and bool((factors != 1).any()) else None


def scaling_with_yarn(settings: Settings, scaling: float) -> float:
    """Return the factor of attention scores in DeepSeek's latent attention. Without yarn, it is `scaling`."""
    rope = settings["rope_parameters"]
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return scaling
    scale = _yarn_scale(_number(rope, "factor"), rope["mscale_all_dim"])
    return scaling * scale * scale


def _parameters(settings: Settings, layer_type: str | None) -> Values | None:
    name = settings["model_type"]
    if name == "granitemoehybrid" and settings["position_embedding_type"] != "rope":
        return None
    rope: Values | None = settings.get("rope_parameters")
    if rope is not None and layer_type in rope:
        rope = rope[layer_type]
    if rope is not None and name == "olmo_hybrid" and rope["rope_theta"] is None:
        return None
    return rope


def _kind(settings: Settings, rope: Values) -> str:
    name = settings["model_type"]
    kind = str(rope.get("rope_type"))
    if kind == "dynamic" and rope.get("alpha") and name in _HUNYUAN:
        kind = _WITH_ALPHA
    if kind not in _KINDS:
        raise NotKnown(f"the kind of its rotary embeddings is '{kind}'")
    part = rope.get("partial_rotary_factor", 1.0)
    if part != 1 and (kind == _WITH_ALPHA or (kind == "default" and name not in _PARTLY_ROTATED)):
        raise NotKnown(f"its partial_rotary_factor is {part}, but models of type '{name}' rotate whole heads")
    return kind


def _unchanged_length(kind: str, settings: Settings, rope: Values) -> int | None:
    """Return the length of the longest sequence with the same frequencies as shorter ones; None: no limit."""
    if kind == "longrope":
        return int(_number(rope, _ORIGINAL))
    if kind == "dynamic":
        return int(settings[_LENGTH])
    return None


def _axes(settings: Settings, rope: Values, pairs: int) -> Tensor | None:
    axes = settings.get("rope_axes")  # Only GGUF files have this key.
    if (section := rope.get("mrope_section")) is not None:
        if settings["model_type"].startswith("qwen3"):
            axes = [pair % 3 if pair < 3 * section[pair % 3] else 0 for pair in range(pairs)]
        else:
            axes = [number % 3 for number, size in enumerate(section) for _ in range(size)]
    if axes is None:
        return None
    if len(axes) < pairs:
        raise NotKnown(f"its rotary embeddings have axes for {len(axes)} of {pairs} pairs")
    return torch.tensor(axes[:pairs], dtype=torch.int32)


def _number(rope: Values, key: str) -> float:
    value = rope.get(key)
    if not isinstance(value, int | float):
        raise NotKnown(f"the {key} of its rotary embeddings is {value}")
    return value


# -- the kinds of frequencies. Each function returns float32 [pairs], and the factor of cosines and sines.


def _wavelengths(theta: float, dim: int) -> Tensor:
    """Return the wavelengths of all pairs, divided by 2 pi."""
    powers: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
    return powers


def _rotated(rope: Values, head_dim: int) -> int:
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def _unscaled(rope: Values, head_dim: int) -> Tensor:
    return 1.0 / _wavelengths(_number(rope, "rope_theta"), _rotated(rope, head_dim))


def _default(_: Settings, rope: Values, head_dim: int) -> tuple[Tensor, float]:
    return _unscaled(rope, head_dim), 1.0


def _linear(_: Settings, rope: Values, head_dim: int) -> tuple[Tensor, float]:
    return _unscaled(rope, head_dim) / _number(rope, "factor"), 1.0


def _alpha(_: Settings, rope: Values, head_dim: int) -> tuple[Tensor, float]:
    """Return the frequencies of HunYuan, whose files call them dynamic."""
    theta = _number(rope, "rope_theta") * rope["alpha"] ** (head_dim / (head_dim - 2))
    return 1.0 / _wavelengths(theta, head_dim), 1.0


def _dynamic(settings: Settings, rope: Values, head_dim: int) -> tuple[Tensor, float]:
    """Return the frequencies for sequences no longer than `max_position_embeddings`."""
    dim = _rotated(rope, head_dim)
    factor = _number(rope, "factor")
    length = settings[_LENGTH]
    growth = (factor * length / length) - (factor - 1)  # 1, apart from rounding
    return 1.0 / _wavelengths(_number(rope, "rope_theta") * growth ** (dim / (dim - 2)), dim), 1.0


def _proportional(_: Settings, rope: Values, head_dim: int) -> tuple[Tensor, float]:
    """Return the frequencies of Gemma 4 for the first pairs of a head.

    The other pairs count for the wavelengths, but aren't rotated.
    """
    pairs = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
    return 1.0 / _wavelengths(_number(rope, "rope_theta"), head_dim)[:pairs] / rope.get("factor", 1.0), 1.0


def _llama3(_: Settings, rope: Values, head_dim: int) -> tuple[Tensor, float]:
    """Divide low frequencies by the factor, keep high ones, and blend those in between."""
    frequencies = _unscaled(rope, head_dim)
    factor = _number(rope, "factor")
    original = _number(rope, _ORIGINAL)
    low = _number(rope, "low_freq_factor")
    high = _number(rope, "high_freq_factor")
    wavelengths = 2 * math.pi / frequencies
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * frequencies / factor + share * frequencies
    unscaled = torch.where(wavelengths < original / high, frequencies, blended)
    return torch.where(wavelengths > original / low, frequencies / factor, unscaled), 1.0


def _longrope(settings: Settings, rope: Values, head_dim: int) -> tuple[Tensor, float]:
    """Return the frequencies for sequences no longer than the original length."""
    original = _number(rope, _ORIGINAL)
    factor = _factor(settings, rope)
    scale = rope.get("attention_factor")
    if scale is None:
        if factor <= 1:
            scale = 1.0
        else:
            scale = math.sqrt(1 + math.log(factor) / math.log(original))
    factors = torch.tensor(rope["short_factor"], dtype=torch.float32)
    return 1.0 / (factors * _wavelengths(_number(rope, "rope_theta"), _rotated(rope, head_dim))), scale


def _yarn(settings: Settings, rope: Values, head_dim: int) -> tuple[Tensor, float]:
    """Divide low frequencies by the factor, keep high ones, and blend those in between along a ramp over the pairs."""
    dim = _rotated(rope, head_dim)
    theta = _number(rope, "rope_theta")
    original = _number(rope, _ORIGINAL)
    factor = _factor(settings, rope)

    def pair_of(rotations: float) -> float:
        """Return the pair that turns this many times within the original length. It may be fractional."""
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    first = pair_of(rope.get("beta_fast") or 32)
    last = pair_of(rope.get("beta_slow") or 1)
    if settings["rope_parameters"].get("truncate", True):  # transformers ignores a layer type's own value
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first or 0.001)
    share = 1 - ramp.clamp(0, 1)
    wavelengths = _wavelengths(theta, dim)
    return 1.0 / (factor * wavelengths) * (1 - share) + 1.0 / wavelengths * share, _yarn_factor(rope, factor)


def _yarn_factor(rope: Values, factor: float) -> float:
    """Return the factor of cosines and sines."""
    if (scale := rope.get("attention_factor")) is not None:
        return float(scale)
    numerator = rope.get("mscale")
    denominator = rope.get("mscale_all_dim")
    if numerator and denominator:
        return _yarn_scale(factor, numerator) / _yarn_scale(factor, denominator)
    return _yarn_scale(factor)


def _yarn_scale(factor: float, mscale: float = 1) -> float:
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


def _factor(settings: Settings, rope: Values) -> float:
    """Return the factor by which lengths grow. Where files don't state it, it is the ratio of the two lengths."""
    if rope.get("factor") is None:
        return float(settings[_LENGTH] / _number(rope, _ORIGINAL))
    return _number(rope, "factor")


_KINDS: dict[str, Callable[[Settings, Values, int], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _dynamic,
    _WITH_ALPHA: _alpha,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "yarn": _yarn,
}
