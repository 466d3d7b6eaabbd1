"""The configuration of a GGUF file's model, as transformers has it for a checkpoint.

Transformers reads those of some families. What it does not read of their mixtures of experts is read here, and so is
all of gpt-oss. All other families are in the table of `gguf_numbers.py`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GptOssConfig, MixtralConfig, PreTrainedConfig

from oaiserve.engine.model.checkpoints import gguf_numbers
from oaiserve.engine.text.gguf_head import without_vocabulary
from oaiserve.errors import StartupError
from oaiserve.files.gguf import READ_BY_TRANSFORMERS, GgufTensor, architecture, read_tensors, read_values
from oaiserve.files.metadata_limits import BadFile

_GPT_OSS = "gpt-oss"  # as files name the family
# Its tokens <|endoftext|>, <|return|> and <|call|> end an answer, or the call of a tool. A file names one of them.
_ENDS_OF_GPT_OSS = {199999, 200002, 200012}
_VOCABULARY_OF_GPT_OSS = 201088


def read_config(path: Path) -> PreTrainedConfig:
    """Return the configuration of a file's model.

    Raises StartupError for a file that does not have all that it needs, and what transformers raises.
    """
    try:
        numbers, tensors = read_values(path), read_tensors(path)
        if architecture(numbers) == _GPT_OSS:
            return _config_of_gpt_oss(numbers, tensors)
        if architecture(numbers) in gguf_numbers.ARCHITECTURES:
            return gguf_numbers.read_numbers(numbers, tensors)
        config = _with_experts(_of_transformers(path, architecture(numbers)), numbers, tensors)
        config.tie_word_embeddings = "output.weight" not in tensors  # transformers looks into the first file alone
        return config
    except BadFile as error:
        raise StartupError(f"'{path}' cannot be used: {error}.") from error


def _of_transformers(path: Path, name: str | None) -> PreTrainedConfig:
    try:
        with without_vocabulary():
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                path.parent, gguf_file=path.name, trust_remote_code=False
            )
    except ValueError as error:
        if "is not supported" not in str(error):
            raise
        known = ", ".join(sorted({*READ_BY_TRANSFORMERS, _GPT_OSS, *gguf_numbers.ARCHITECTURES}))
        raise BadFile(f"its architecture is '{name}', and those that can be read are {known}") from error
    return config


def _with_experts(
    config: PreTrainedConfig, numbers: dict[str, Any], tensors: dict[str, GgufTensor]
) -> PreTrainedConfig:
    """Return a configuration with what transformers does not read of a model's experts."""
    gates = tensors.get("blk.0.ffn_gate_exps.weight")
    if config.model_type in ("llama", "mistral") and gates is not None:
        sizes = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
        top_k = _number(numbers, "llama.expert_used_count")
        return MixtralConfig(**sizes, num_local_experts=gates.shape[0], num_experts_per_tok=top_k)
    found = copy.deepcopy(config)
    for name, field in (("exps", "moe_intermediate_size"), ("shexp", "shared_expert_intermediate_size")):
        if (downs := tensors.get(f"blk.0.ffn_down_{name}.weight")) is not None and hasattr(config, field):
            setattr(found, field, downs.shape[-1])
    return found


def _config_of_gpt_oss(numbers: dict[str, Any], tensors: dict[str, GgufTensor]) -> GptOssConfig:
    def number(name: str) -> Any:
        return _number(numbers, f"{_GPT_OSS}.{name}")

    def optional(name: str, default: float) -> Any:
        found = numbers.get(f"{_GPT_OSS}.{name}")
        return default if found is None else found

    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BadFile("it has no embedding")
    vocab_size = embedding.shape[0]
    rope = {"rope_type": "default", "rope_theta": number("rope.freq_base")}
    if f"{_GPT_OSS}.rope.scaling.factor" in numbers:
        rope |= {
            "rope_type": "yarn",
            "factor": number("rope.scaling.factor"),
            "original_max_position_embeddings": number("rope.scaling.original_context_length"),
            "beta_fast": optional("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": optional("rope.scaling.yarn_beta_slow", 1.0),
            "truncate": False,
        }
    end = numbers.get("tokenizer.ggml.eos_token_id")
    ends = set() if end is None else {end}
    if vocab_size == _VOCABULARY_OF_GPT_OSS:
        ends |= _ENDS_OF_GPT_OSS
    return GptOssConfig(
        architectures=["GptOssForCausalLM"],
        vocab_size=vocab_size,
        num_hidden_layers=number("block_count"),
        hidden_size=number("embedding_length"),
        intermediate_size=numbers.get(f"{_GPT_OSS}.expert_feed_forward_length") or number("feed_forward_length"),
        num_attention_heads=number("attention.head_count"),
        num_key_value_heads=number("attention.head_count_kv"),
        head_dim=number("attention.key_length"),
        num_local_experts=number("expert_count"),
        num_experts_per_tok=number("expert_used_count"),
        sliding_window=number("attention.sliding_window"),
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_parameters=rope,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=numbers.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=sorted(ends) or None,
    )


def _number(numbers: dict[str, Any], name: str) -> Any:
    """Return a number of a file. Raises BadFile if there is none of this name."""
    found = numbers.get(name)
    if found is None:
        raise BadFile(f"it has no number {name}")
    return found
