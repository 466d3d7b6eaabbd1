"""Checks the files of a model before they are loaded: none may run code, or take unlimited time or memory.

The libraries that load a model trust its files: they make as many layers as config.json says, and open the file that an
index names. Stdlib only, so that a refusal comes at once. Other faults fail in the libraries (`load_errors`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from oaiserve.checkpoints.bad_file import BadFile, check_numbers, reason_of, refuse_other_content, refuse_too_large
from oaiserve.checkpoints.checkpoint import CONFIG, INDEX
from oaiserve.checkpoints.gguf import BLOCK_COUNT, architecture
from oaiserve.checkpoints.quantization import read_quantization
from oaiserve.checkpoints.source import ModelSource
from oaiserve.errors import StartupError

log = logging.getLogger(__name__)

_TOKENIZERS = ("tokenizer", "vocab", "tekken")  # beginnings of the names of tokenizer files
_VOCABULARIES = (".model", ".tiktoken")  # endings of the names of vocabulary files
_NO_MODELS = {  # types of GGUF files that are not models
    "adapter": "it is an adapter; serve its model, with --lora NAME=FOLDER for a folder in PEFT's format",
    "mmproj": "it only reads images; serve the model next to it, which takes this file with --mmproj",
}
# What unsupported models do, by the prefix of their architecture in a GGUF file.
_OF_MEDIA = dict.fromkeys(
    ("flux", "sd", "aura", "hidream", "lumina", "qwen_image", "z_image", "pixart", "chroma", "omnigen"),
    "which makes pictures",
) | {
    **dict.fromkeys(("wan", "hyvid", "hunyuan_video", "ltxv", "cosmos", "mochi", "cogvideo"), "which makes videos"),
    "whisper": "which writes down speech (serve such a model as safetensors)",
    **dict.fromkeys(("parakeet", "canary", "moonshine"), "which writes down speech"),
    **dict.fromkeys(("kokoro", "parler", "outetts", "dia", "bark", "chatterbox"), "which speaks"),
}
# Settings that must be names, each with an example.
_NAMES = {"rope_type": "default", "dtype": "bfloat16", "torch_dtype": "bfloat16", "model_type": "llama"}
# Numbers of rotary embeddings, which libraries compute with as a file has them: a file may have "10000" for 10000.
_ROPE_NUMBERS = frozenset(
    {
        *("rope_theta", "rope_local_base_freq", "rotary_emb_base", "rotary_pct", "rotary_dim", "partial_rotary_factor"),
        *("original_max_position_embeddings", "llama_4_scaling_beta", "low_freq_factor", "high_freq_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    }
)
# Sizes of any model, which not all of transformers' types check.
_INTEGERS = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "sliding_window", "max_position_embeddings"),
    }
)
_MAPS = ("id2label", "label2id", "vocabulary_map")  # objects with labels or tokens as keys
_ROPE_FACTOR = "factor"  # outside the settings of rotary embeddings, this name may mean anything
# Those numbers of each type of rotary embedding that its formula needs. The others may be null: programs that write
# files give all types the same keys.
_REQUIRED_FOR_ROPE = {
    "linear": (_ROPE_FACTOR,),
    "dynamic": (_ROPE_FACTOR,),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("original_max_position_embeddings",),
    "llama3": (_ROPE_FACTOR, "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def refuse_unless_sound(source: ModelSource) -> None:
    """Raise StartupError if the files of a local model are truncated, contradict their sizes, or could run code."""
    checkpoint = source.checkpoint
    path = checkpoint.folder / (source.gguf_file or CONFIG)
    try:
        if source.gguf_file is not None:
            values = checkpoint.head.values
            kind = values.get("general.type")
            if isinstance(kind, str) and kind in _NO_MODELS:
                raise BadFile(_NO_MODELS[kind])
            _refuse_unless_of_text(values)
            if not checkpoint.head.tensors:
                raise BadFile("it has a vocabulary, and no weights")
            return
        config = checkpoint.config
        read_quantization(config)
        num_tensors = 0
        for path in checkpoint.weight_files:
            num_tensors += len(checkpoint.header(path)[0])
        path = checkpoint.folder / CONFIG
        check_numbers(config, num_tensors, sum(weight.stat().st_size for weight in checkpoint.weight_files))
        _check_types(config)
    except (BadFile, OSError) as error:
        raise StartupError(f"'{path}' cannot be used: {reason_of(error)}.") from error


def _refuse_unless_of_text(values: Mapping[str, Any]) -> None:
    """Raise BadFile if the metadata of a GGUF file lack layers or a vocabulary, which text models have."""
    name = architecture(values)
    if name is None:
        raise BadFile("it doesn't say what model it has (general.architecture)")
    has_layers = f"{name}{BLOCK_COUNT}" in values
    if not has_layers or not any(key.startswith("tokenizer.") for key in values):
        missing = "no vocabulary" if has_layers else f"no {name[:100]}{BLOCK_COUNT}"
        kind = next((kind for begin, kind in _OF_MEDIA.items() if name.startswith(begin)), f"and it has {missing}")
        raise BadFile(
            f"its architecture is {name[:100]!r}, {kind}, and oaiserve serves models that read and write text"
        )


def warn_of_other_weights(source: ModelSource) -> None:
    """Log the weights that are read from a local folder, if an index there lists others."""
    checkpoint = source.checkpoint
    if source.gguf_file is not None or not (checkpoint.folder / INDEX).is_file():
        return
    read = checkpoint.weight_files
    try:
        named = checkpoint.object(INDEX).get("weight_map")
    except (BadFile, OSError):  # the index is not needed
        return
    others = sorted(set(map(str, named.values())) - {path.name for path in read}) if isinstance(named, dict) else []
    if others:
        log.warning(
            "The weights are read from %s, as transformers does, and not from the files that %s names, such as %s. "
            "Remove those that are not the model's",
            read[0].name,
            INDEX,
            others[0][:100],
        )


def refuse_without_tokenizer(source: ModelSource) -> None:
    """Raise StartupError if a local folder has no tokenizer file. A GGUF file contains its tokenizer."""
    folder = source.folder
    if source.gguf_file is not None:
        return
    names = [path.name for path in folder.iterdir()]
    if not any(name.startswith(_TOKENIZERS) or name.endswith(_VOCABULARIES) for name in names):
        raise StartupError(
            f"'{folder}' has no tokenizer: there is neither tokenizer.json nor another file of one. Copy these files "
            "from where the model comes from."
        )
    path = folder / "tokenizer.json"
    try:
        if path.name in names:
            refuse_other_content(path)
    except (BadFile, OSError) as error:
        raise StartupError(f"'{path}' cannot be used: {reason_of(error)}.") from error


def _check_types(config: Mapping[str, Any], *, is_rope: bool = False) -> None:
    """Raise BadFile for settings of the wrong type, anywhere in a configuration, that libraries don't check: names, and
    numbers of rotary embeddings."""
    for key, value in config.items():
        example = _NAMES.get(key) or (_NAMES["rope_type"] if is_rope and key == "type" else None)
        if example is not None and not isinstance(value, str | None):
            raise BadFile(f"its {key} is {str(value)[:100]}, but must be a name, such as {example}")
        if key in _ROPE_NUMBERS or (is_rope and key == _ROPE_FACTOR):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            may_be_null = not is_rope or key not in _required(config)
            if not is_number and not (value is None and may_be_null):
                raise BadFile(f"its {key} is {json.dumps(value)[:100]}, but must be a number")
            refuse_too_large(key, value)
        if key in _INTEGERS and value is not None:
            each = value if isinstance(value, list) else [value]  # A list has a number for each layer.
            if not all(isinstance(number, int) for number in each):
                raise BadFile(f"its {key} is {json.dumps(value)[:100]}, but must be an integer")
        if isinstance(value, dict) and key not in _MAPS:
            _check_types(value, is_rope=is_rope or key in ("rope_scaling", "rope_parameters"))


def _required(rope: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the numbers that may not be null among those of rotary embeddings."""
    kind = rope.get("rope_type") or rope.get("type")
    return ("rope_theta", *(_REQUIRED_FOR_ROPE.get(kind, ()) if isinstance(kind, str) else ()))
