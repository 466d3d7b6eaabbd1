"""Finds the text model inside of a multimodal checkpoint: it is served, without the modules for images or sound.

Where a text model gives each token three positions, for time, height and width, these are one and the same in text. So
it computes the same as the plain text model of its family, and is loaded as that. `rope_axes` of the configuration
says by which of the three each pair of numbers is rotated.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from oaiserve.engine.decoder.sources.gguf.metadata import rope_axes

# The wrappers whose text model reads a text as it does without the wrapper. Others have layers for images between those
# of the text model. PaliGemma reads the text beside an image in both directions, and text alone from left to right.
WRAPPERS = {
    *("aria", "aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "exaone4_5", "gemma3", "gemma3n"),
    *("gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "got_ocr2", "idefics2"),
    *("idefics3", "internvl", "janus", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llama4", "llava", "llava_next"),
    *("llava_next_video", "llava_onevision", "minicpmv4_6", "mistral3", "ovis2", "paligemma", "qwen2_5_omni_thinker"),
    *("qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe_thinker", "qwen3_vl"),
    *("qwen3_vl_moe", "smolvlm", "video_llama_3", "video_llava", "vipllava", "voxtral"),
}
_PLAIN = {
    "glm4v_moe_text": "glm4_moe",
    **dict.fromkeys(("glm4v_text", "glm_ocr_text"), "glm4"),
    **dict.fromkeys(("qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"), "qwen2"),
    **dict.fromkeys(("qwen3_omni_moe_text", "qwen3_vl_moe_text"), "qwen3_moe"),
    "qwen3_vl_text": "qwen3",
}
# What the code of a text model does whatever its configuration says, which that of the plain one goes by.
_SETTINGS: dict[str, dict[str, Any]] = {
    "glm_ocr_text": {"attention_bias": False},
    "qwen3_omni_moe_text": {"norm_topk_prob": True},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
_OF_THE_WRAPPER = {"architectures", "auto_map", "dtype", "model_type", "transformers_version"}


def text_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the configuration of the text model in a wrapper, or None if `config` is of no wrapper that is known."""
    wrapper: PreTrainedConfig = getattr(config, "thinker_config", config)  # which another model speaks for
    if wrapper.model_type not in WRAPPERS:
        return None
    text = wrapper.get_text_config(decoder=True)
    values = {key: value for key, value in text.to_dict().items() if key not in _OF_THE_WRAPPER}
    of_both = (getattr(one, "tie_word_embeddings", None) for one in (wrapper, text))  # not all have one
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
    """Have transformers load the plain text model from tensors as a wrapper has them, where the layouts differ."""
    if config.model_type == "qwen3_vl_moe":  # its experts may have their columns before their rows
        layouts = [get_checkpoint_conversion_mapping(name) or [] for name in ("qwen3_moe", "qwen3_vl_moe")]
        register_checkpoint_conversion_mapping("Qwen3MoeForCausalLM", [*layouts[0], *layouts[1]], overwrite=True)
