"""Finds the text model in a multimodal checkpoint, and serves it without the modules for images or sound.

Some text models give each token three positions, for time, height and width. In text, all three are equal, so such a
model computes the same as the plain text model of its family, and is loaded as that model. `rope_axes` of the
configuration says which of the three positions rotates each pair of numbers.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from oaiserve.engine.decoder.settings import table
from oaiserve.engine.decoder.sources.gguf.metadata import rope_axes

_PLAIN = {
    "glm4v_moe_text": "glm4_moe",
    **dict.fromkeys(("glm4v_text", "glm_ocr_text"), "glm4"),
    **dict.fromkeys(("qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"), "qwen2"),
    **dict.fromkeys(("qwen3_omni_moe_text", "qwen3_vl_moe_text"), "qwen3_moe"),
    "qwen3_vl_text": "qwen3",
}
# Settings that the code of a wrapped text model ignores, because they are fixed. The plain model's code reads them.
_SETTINGS: dict[str, dict[str, Any]] = {
    "glm_ocr_text": {"attention_bias": False},
    "qwen3_omni_moe_text": {"norm_topk_prob": True},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
_OF_THE_WRAPPER = {"architectures", "auto_map", "dtype", "model_type", "transformers_version"}


def text_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the configuration of the text model in a wrapper, or None if `config` is not of a known wrapper.

    The known wrappers compute text like the text model alone. Others have layers for images between the text layers.
    PaliGemma reads text with an image in both directions, and text alone from left to right.
    """
    wrapper: PreTrainedConfig = getattr(config, "thinker_config", config)  # Another model speaks the thinker's text.
    if wrapper.model_type not in table()["wrappers"]:
        return None
    text = wrapper.get_text_config(decoder=True)
    values = {key: value for key, value in text.to_dict().items() if key not in _OF_THE_WRAPPER}
    of_both = (getattr(one, "tie_word_embeddings", None) for one in (wrapper, text))  # Some lack it.
    values["tie_word_embeddings"] = next((is_tied for is_tied in of_both if is_tied is not None), False)
    values["eos_token_id"] = values.get("eos_token_id") or getattr(wrapper, "eos_token_id", None)
    rope = dict(values.get("rope_parameters") or {})
    if (section := rope.pop("mrope_section", None)) is not None:
        rope.pop("mrope_interleaved", None)
        values["rope_parameters"] = rope
        values["rope_axes"] = rope_axes(section, is_interleaved=text.model_type.startswith("qwen3"))
    if deep := getattr(getattr(wrapper, "vision_config", None), "deepstack_visual_indexes", None):
        values["num_deep_layers"] = len(deep)
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        values["quantization_config"] = quantization
    values |= _SETTINGS.get(text.model_type, {})
    return AutoConfig.for_model(
        _PLAIN.get(text.model_type, text.model_type), dtype=config.dtype or wrapper.dtype or text.dtype, **values
    )


def bring_layout(config: PreTrainedConfig) -> None:
    """Make transformers load the plain text model from a wrapper's tensors, where their layouts differ."""
    if config.model_type == "qwen3_vl_moe":  # Its experts may have columns before rows.
        layouts = [get_checkpoint_conversion_mapping(name) or [] for name in ("qwen3_moe", "qwen3_vl_moe")]
        register_checkpoint_conversion_mapping("Qwen3MoeForCausalLM", [*layouts[0], *layouts[1]], overwrite=True)
