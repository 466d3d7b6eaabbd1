"""Measures this server in turns against llama.cpp's on the same GGUF files: python -m tools.bench.quantized_peers

They are the demo model and a Llama of the shape of Llama 3.2 1B with random weights, which llama.cpp's own program
quantizes. With --layouts, it is against vLLM's on such a Llama as AWQ or GPTQ stores it, in groups of 128.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedConfig

from oaiserve.checkpoints import demo
from tests.models.decoders import REAL_SHAPES
from tests.models.gguf_files import write_gguf
from tests.models.packed import Layout, Packing, write_checkpoint
from tools.bench import prepare
from tools.bench.servers import llama_cpp, vllm
from tools.bench.turns import CLIENTS, MAX_LEN, add_turns, publish_turns

FORMATS = ("Q4_K_M", "Q8_0")
LLAMA = "llama-3.2-1b"
_TOKENIZER = ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [demo.NAME, LLAMA]
    parser.add_argument("--models", nargs="+", default=models, choices=models, help="default: both")
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="as llama.cpp's program names them")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp leaves the weights as they are in the file")
    parser.add_argument("--files", nargs="+", type=Path, default=[], help="GGUF files to measure instead of models")
    layouts = get_args(Layout)
    parser.add_argument("--layouts", nargs="+", default=[], choices=layouts, help="of 4-bit checkpoints, beside vLLM")
    add_turns(parser, "gguf-peers")
    arguments = parser.parse_args()
    if arguments.layouts:
        publish_turns(
            arguments,
            "packed-peers",
            lambda: {f"{LLAMA} {layout}": packed(layout) for layout in arguments.layouts},
            lambda folder, most: vllm(folder, max_len=MAX_LEN, max_running=most),
        )
        return
    flags = ["--no-repack"] * arguments.no_repack
    publish_turns(
        arguments,
        "gguf-peers",
        lambda: (
            {path.name: path for path in arguments.files}
            or {f"{name} {form}": quantized(name, form) for name in arguments.models for form in arguments.formats}
        ),
        lambda path, most: llama_cpp(path, *flags, slots=most, slot_tokens=CLIENTS * MAX_LEN // most),
    )


def quantized(name: str, form: str) -> Path:
    """Return the file of a model in a format of llama.cpp's."""
    whole = prepare.gguf() if name == demo.NAME else llama_1b()
    path = whole.with_name(f"{name}.{form}.gguf")
    if not path.exists():
        unfinished = path.with_suffix(".part")
        prepare.run(prepare.llama_cpp() / "llama-quantize", whole, unfinished, form)
        unfinished.replace(path)
    return path


def packed(layout: Layout) -> Path:
    """Return the folder of a checkpoint of four bits, with random weights and the demo model's tokenizer."""
    folder = prepare.FOLDER / f"models/packed/{LLAMA}.{layout}"
    if not folder.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(REAL_SHAPES[LLAMA], dtype=torch.float32)
        unfinished = folder.with_suffix(".part")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(unfinished, model, Packing(layout, group_size=128, is_symmetric=layout != "awq"))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo.fetched() / name, unfinished)
        unfinished.replace(folder)
    return folder


def llama_1b() -> Path:
    """Return a model of the shape of Llama 3.2 1B, with random weights and the demo model's tokenizer."""
    path = prepare.FOLDER / f"models/gguf/{LLAMA}.BF16.gguf"
    if not path.exists():
        config = REAL_SHAPES[LLAMA]
        unfinished = path.with_suffix(".part")
        write_gguf(unfinished, config, _random_parameters(config), lambda _: Kind.BF16, _tokenizer(config.vocab_size))
        unfinished.replace(path)
    return path


def _random_parameters(config: PreTrainedConfig) -> Iterator[tuple[str, NDArray[np.float32]]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        yield name, np.ones(shape, np.float32) if len(shape) == 1 else rng.standard_normal(shape, np.float32) * 0.02


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return the demo model's tokenizer, with tokens of no text up to the size of the vocabulary."""
    all_fields = gguf.GGUFReader(prepare.gguf()).fields
    fields = {key: all_fields.get(f"tokenizer.ggml.{key}") for key in _TOKENIZER}
    metadata: dict[str, Any] = {key: field.contents() for key, field in fields.items() if field is not None}
    missing = range(len(metadata["tokens"]), vocab_size)
    metadata["tokens"] += [f"<unused {i}>" for i in missing]
    metadata["token_type"] += [5] * len(missing)
    return metadata


if __name__ == "__main__":
    main()
