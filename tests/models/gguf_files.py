"""Writes GGUF files of models with random weights, and random blocks of each format, for tests and benchmarks."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

# Where a file has another name than transformers.
ARCHITECTURES = {
    **dict.fromkeys(("mistral", "mixtral"), "llama"),
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), "qwen2vl"),
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
}
# Where a block has 16-bit floats, in bytes.
_FLOATS = {
    **dict.fromkeys((Kind.Q4_0, Kind.Q5_0, Kind.Q8_0, Kind.IQ4_NL, Kind.IQ4_XS), (0,)),
    **dict.fromkeys((Kind.IQ1_S, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S), (0,)),
    **dict.fromkeys((Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), (0, 2)),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q6_K: (208,),
    Kind.TQ1_0: (52,),
    Kind.TQ2_0: (64,),
    Kind.IQ1_M: (),
    Kind.MXFP4: (),
}


def random_blocks(rng: np.random.Generator, kind: Kind, n: int, k: int, scale: float = 0.01) -> NDArray[np.uint8]:
    """Return the bytes of a matrix [n, k] in blocks: random codes, and random scales about `scale`."""
    weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n * k // weights, num_bytes), np.uint8)
    for at in _FLOATS[kind]:
        floats = rng.uniform(-scale, scale, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = floats[:, None].view(np.uint8)
    if kind == Kind.MXFP4:  # the exponents of its scales
        blocks[:, 0] = 127 + int(np.log2(scale)) - rng.integers(0, 4, len(blocks))
    if kind == Kind.IQ1_M:  # The four quarters of its scale lie in four places.
        quarters = rng.uniform(-scale, scale, len(blocks)).astype(np.float16).view(np.uint16)
        for quarter in range(4):
            blocks[:, 49 + 2 * quarter] = blocks[:, 49 + 2 * quarter] & 15 | (quarters >> 4 * quarter & 15) << 4
    return blocks.reshape(n, -1)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    config: PreTrainedConfig,
    parameters: Iterable[tuple[str, NDArray[np.float32]]],
    kind_of: Callable[[str], Kind],
    tokenizer: dict[str, Any] | None = None,
    rope_factors: NDArray[np.float32] | None = None,
    quantize: Callable[[NDArray[np.float32], Kind], NDArray[np.uint8]] = gguf.quantize,
    most_tensors: int = 0,
) -> None:
    """Write a model, whose parameters have transformers' names, as llama.cpp's conversion does.

    `kind_of` says in which format a matrix is to be, by its name in the file. `tokenizer` has fields of the tokenizer;
    without them there are only as many tokens as the model has. `rope_factors` divide the frequencies of rotary
    embeddings. `quantize` makes the blocks of a matrix. With `most_tensors`, the model is in several files, of which
    each has this number, and whose names llama.cpp gives them.
    """
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=most_tensors)
    _add_sizes(writer, config)
    if tokenizer is None:
        tokenizer = {"model": "gpt2", "tokens": [f"<{i}>" for i in range(config.vocab_size)]}
    for key, value in tokenizer.items():
        add = writer.add_array if isinstance(value, list) else writer.add_string
        if isinstance(value, int):
            add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add("tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}", value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    for name, values in _as_in_a_file(parameters, turned=config.model_type == "gpt_oss"):
        name_in_file = _name_in_file(config, name)
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and "norm" in name:
            values = values + 1
        if values.ndim == 1:
            writer.add_tensor(name_in_file, values)
            continue
        kind = _kind(name_in_file, kind_of)
        writer.add_tensor(name_in_file, quantize(values, kind), raw_dtype=kind)
    finish(writer)


@torch.no_grad()
def round_as_in_a_file(model: PreTrainedModel, kind_of: Callable[[str], Kind]) -> None:
    """Give a model the numbers of the file that `write_gguf` makes of it. Gates and ups of experts have one format."""
    model.config.rms_norm_eps = float(np.float32(model.config.rms_norm_eps))
    is_turned = model.config.model_type == "gpt_oss"
    for name, parameter in model.named_parameters():
        rows = parameter.mT if is_turned and ".experts." in name and parameter.dim() == 3 else parameter
        part, in_file = next(_as_in_a_file([(name, rows.numpy())], turned=False))
        if in_file.ndim == 1:
            continue
        kind = _kind(_name_in_file(model.config, part), kind_of)
        values = gguf.dequantize(gguf.quantize(rows.contiguous().numpy(), kind), kind)
        rows.copy_(torch.from_numpy(values).view(rows.shape))


def _name_in_file(config: PreTrainedConfig, parameter: str) -> str:
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
    assert found is not None
    return found


def _kind(name_in_file: str, kind_of: Callable[[str], Kind]) -> Kind:
    is_small = "ffn_gate_inp" in name_in_file or name_in_file.endswith(".bias")  # routers and biases
    return Kind.F32 if is_small else kind_of(name_in_file)


def _as_in_a_file(
    parameters: Iterable[tuple[str, NDArray[np.float32]]], *, turned: bool
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the parameters as a file has them: gates and up projections of experts apart, and no matrix of one row.

    `turned` says that the model has the columns of experts before their rows, and gates and up projections in turns.
    """
    for name, values in parameters:
        if ".experts." in name:
            in_file = f"{name.removesuffix('_bias')}{'.bias' if name.endswith('_bias') else '.weight'}"
            rows = values.swapaxes(1, 2) if turned and values.ndim == 3 else values
            parts = {in_file: rows}
            if "gate_up" in name:
                gates, ups = (rows[:, ::2], rows[:, 1::2]) if turned else np.split(rows, 2, axis=1)
                parts = {in_file.replace("gate_up", "gate"): gates, in_file.replace("gate_up", "up"): ups}
            yield from ((part, np.ascontiguousarray(of_part)) for part, of_part in parts.items())
        elif name.endswith(".sinks"):
            yield f"{name}.weight", values
        else:
            yield name, values.reshape(-1) if "shared_expert_gate." in name else values


def _add_sizes(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("rope_theta") or rope["full_attention"]["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    if section := rope.get("mrope_section"):
        writer.add_rope_dimension_sections([*section, 0])
    if config.model_type.startswith("qwen3_vl"):
        writer.add_num_deepstack_layers(1)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
