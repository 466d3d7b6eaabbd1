"""Configurations of a model with each value in turn replaced by each kind of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.attack.spoils import nodes

# Keys that libraries read, in files that need not have them.
MORE_KEYS: dict[str, tuple[str, ...]] = {
    "config.json": (
        *("auto_map", "attention_bias", "audio_config", "dtype", "generation_config", "id2label", "layer_types"),
        *("max_window_layers", "num_experts", "num_labels", "pad_token_id", "quantization_config", "rope_scaling"),
        *("sliding_window", "text_config", "torch_dtype", "transformers_version", "transformers_weights"),
        *("vision_config", "use_cache", "vocab_size", "layer_norm_eps", "rms_norm_eps", "hidden_act"),
    ),
    "generation_config.json": (
        *("eos_token_id", "max_new_tokens", "max_length", "temperature", "top_k", "top_p", "min_p", "do_sample"),
        *("repetition_penalty", "stop_strings", "bos_token_id", "suppress_tokens", "cache_implementation"),
    ),
    "tokenizer_config.json": (
        *("added_tokens_decoder", "additional_special_tokens", "auto_map", "bos_token", "chat_template", "eos_token"),
        *("extra_special_tokens", "model_max_length", "pad_token", "response_template", "split_special_tokens"),
        *("tokenizer_class", "unk_token"),
    ),
    "special_tokens_map.json": ("bos_token", "eos_token", "additional_special_tokens"),
    "adapter_config.json": (
        *("alpha_pattern", "base_model_name_or_path", "bias", "exclude_modules", "layers_pattern", "lora_alpha"),
        *("layers_to_transform", "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules", "use_dora"),
    ),
}
_ABSENT = object()  # the value of a key that is not in a file
NESTED: Any = 7
for _ in range(400):  # about as deep as JSON can be read and written
    NESTED = [NESTED]
KINDS: tuple[Any, ...] = (None, True, 77, -1, 0.5, 10**30, "", "x", "load", [], ["x"], [None], {}, {"x": "x"}, NESTED)


def with_other_kinds(file: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a configuration with each value in turn replaced by each kind of JSON, with what was replaced."""
    tree = json.loads(content)
    tree = dict.fromkeys(MORE_KEYS.get(Path(file).name, ()), _ABSENT) | tree
    for parent in [node for node in nodes(tree) if isinstance(node, dict | list)]:
        for place in list(parent) if isinstance(parent, dict) else range(min(1, len(parent))):
            before = parent[place]
            for kind in KINDS:
                if kind != before:
                    parent[place] = kind
                    present = {key: value for key, value in tree.items() if value is not _ABSENT}
                    yield f"{file}: {place} = {json.dumps(kind)[:20]}", json.dumps(present).encode()
            parent[place] = before
    for kind in KINDS:
        yield f"{file} = {json.dumps(kind)[:20]}", json.dumps(kind).encode()
