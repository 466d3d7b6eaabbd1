"""Small models in each format that is read, for starts on broken files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import GptOssConfig, LlamaConfig, PreTrainedModel

from oaiserve.checkpoints.checkpoint import INDEX
from tests.models.adapters import adaptable, write_adapter
from tests.models.decoders import byte_tokenizer, random_model
from tests.models.gguf_files import random_blocks, write_gguf
from tests.models.packed import Packing, save_in_mxfp4, write_checkpoint, write_fp8

ADAPTER = "adapter"
SHARD = "model-00001-of-00001.safetensors"
WEIGHTS = "model.safetensors"
GGUF = "model.gguf"
CONFIG = "config.json"
ADAPTER_FILES = (f"{ADAPTER}/adapter_model.safetensors", f"{ADAPTER}/adapter_config.json")
VOCAB = 256
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
# As wide as the longest blocks, with a matrix for each of their formats.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 3}
GPT_OSS = LLAMA | {
    "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
# The formats that the matrices of a GGUF file have in turn.
SHORT_BLOCKS = (Kind.Q8_0, Kind.Q4_0, Kind.F16)
LONG_BLOCKS = (
    *(Kind.Q4_K, Kind.Q6_K, Kind.Q5_K, Kind.IQ4_XS, Kind.Q2_K, Kind.Q3_K),
    *(Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.IQ4_NL, Kind.BF16),
    *(Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S, Kind.TQ1_0, Kind.TQ2_0),
)


def llama() -> PreTrainedModel:
    return random_model(LlamaConfig(**LLAMA))


def write_with_index(folder: Path) -> None:
    """Write a model with an index, as models have it whose weights are in several files."""
    llama().save_pretrained(folder)
    (folder / WEIGHTS).rename(folder / SHARD)
    content = (folder / SHARD).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    index = {
        "metadata": {"total_size": len(content)},
        "weight_map": dict.fromkeys([name for name in header if name != "__metadata__"], SHARD),
    }
    (folder / INDEX).write_text(json.dumps(index))


def write_in_blocks(path: Path, kinds: Sequence[Kind], **changes: int) -> None:
    """Write a GGUF file whose matrices have these formats in turn."""
    tokens = byte_tokenizer(VOCAB).convert_ids_to_tokens(list(range(VOCAB)))
    tokens[-1] = tokens[64] + tokens[65]  # the only one that is merged
    tokenizer = {
        "model": "gpt2", "pre": "default", "tokens": tokens, "token_type": [int(gguf.TokenType.NORMAL)] * VOCAB,
        "merges": [f"{tokens[64]} {tokens[65]}"], "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = LlamaConfig(**LLAMA | changes)
    parameters = [(name, tensor.detach().numpy()) for name, tensor in random_model(config).named_parameters()]
    rng = np.random.default_rng(0)
    in_turn = cycle(kinds)

    def quantize(values: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
        if gguf.GGML_QUANT_SIZES[kind][0] == 1 or kind in SHORT_BLOCKS:
            return gguf.quantize(values, kind)
        scale = 1e-4 if gguf.GGML_QUANT_SIZES[kind][0] == 256 else 0.005  # long blocks have integers as scales, too
        return random_blocks(rng, kind, *values.shape, scale=scale)

    write_gguf(path, config, parameters, lambda _: next(in_turn), tokenizer, quantize=quantize)


def write_adapted(folder: Path) -> None:
    llama().save_pretrained(folder)
    write_adapter(folder / ADAPTER, adaptable(llama()), rank=4, alpha_pattern={"q_proj": 4}, use_rslora=True)


def write_mxfp4(folder: Path) -> None:
    save_in_mxfp4(random_model(GptOssConfig(**GPT_OSS), dtype=torch.bfloat16), folder)


# How a model of each format is written into an empty folder, and which of its files are spoiled.
FORMATS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "safetensors": (lambda folder: llama().save_pretrained(folder), (WEIGHTS, CONFIG)),
    "index": (write_with_index, (INDEX, CONFIG)),
    "GPTQ": (lambda folder: write_checkpoint(folder, llama(), Packing("gptq", has_act_order=True)), (WEIGHTS, CONFIG)),
    "AWQ": (lambda folder: write_checkpoint(folder, llama(), Packing("awq")), (WEIGHTS, CONFIG)),
    "packed": (lambda folder: write_checkpoint(folder, llama(), Packing("pack-quantized")), (WEIGHTS, CONFIG)),
    "FP8": (lambda folder: write_fp8(folder, llama(), "blocks"), (WEIGHTS, CONFIG)),
    "MXFP4": (write_mxfp4, (WEIGHTS, CONFIG)),
    "GGUF": (lambda folder: write_in_blocks(folder / GGUF, SHORT_BLOCKS), (GGUF,)),
    "GGUF-blocks": (lambda folder: write_in_blocks(folder / GGUF, LONG_BLOCKS, **WIDE), (GGUF,)),
    "adapter": (write_adapted, ADAPTER_FILES),
}


def write(name: str, folder: Path) -> None:
    """Write a sound model of a format. Its files are always the same."""
    folder.mkdir(parents=True)
    FORMATS[name][0](folder)
    if not name.startswith("GGUF"):
        byte_tokenizer(VOCAB).save_pretrained(folder)
