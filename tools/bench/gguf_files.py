"""Makes the GGUF files that this server and llama.cpp are compared on.

They are the demo model and a Llama of the shape of Llama 3.2 1B with random weights, which llama.cpp's own program
quantizes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedConfig

from oaiserve.files import demo
from tests.models.decoders import REAL_SHAPES
from tests.models.gguf_files import write_gguf
from tools.bench import prepare

FORMATS = ("Q4_K_M", "Q8_0")
LLAMA = "llama-3.2-1b"
_TOKENIZER = ("model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id")


def demo_model(form: str) -> Path:
    """Return the demo model in a format of llama.cpp's."""
    return _quantized(prepare.gguf(), demo.NAME, form)


def llama_1b(form: str) -> Path:
    """Return a model of the shape of Llama 3.2 1B, with random weights and the demo model's tokenizer."""
    whole = prepare.FOLDER / f"models/gguf/{LLAMA}.BF16.gguf"
    if not whole.exists():
        config = REAL_SHAPES[LLAMA]
        unfinished = whole.with_suffix(".part")
        write_gguf(unfinished, config, _random_parameters(config), lambda _: Kind.BF16, _tokenizer(config.vocab_size))
        unfinished.replace(whole)
    return _quantized(whole, LLAMA, form)


def _quantized(whole: Path, name: str, form: str) -> Path:
    path = whole.with_name(f"{name}.{form}.gguf")
    if not path.exists():
        unfinished = path.with_suffix(".part")
        program = str(prepare.llama_cpp() / "llama-quantize")
        subprocess.run([program, str(whole), str(unfinished), form], check=True, capture_output=True)
        unfinished.replace(path)
    return path


def _random_parameters(config: PreTrainedConfig) -> Iterator[tuple[str, NDArray[np.float32]]]:
    rng = np.random.default_rng(0)
    for name, shape in _shapes(config):
        yield name, np.ones(shape, np.float32) if len(shape) == 1 else rng.standard_normal(shape, np.float32) * 0.02


def _shapes(config: PreTrainedConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of each parameter."""
    import torch

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return the demo model's tokenizer, with tokens of no text up to the size of the vocabulary."""
    fields = gguf.GGUFReader(prepare.gguf()).fields
    found: dict[str, Any] = {}
    for key in _TOKENIZER:
        if (field := fields.get(f"tokenizer.ggml.{key}")) is not None:
            found[key] = field.contents()
    missing = range(len(found["tokens"]), vocab_size)
    found["tokens"] += [f"<unused {i}>" for i in missing]
    found["token_type"] += [5] * len(missing)
    return found


MODELS: dict[str, Callable[[str], Path]] = {demo.NAME: demo_model, LLAMA: llama_1b}


def chosen(models: list[str], formats: list[str]) -> dict[str, Path]:
    """Return the files of these models in these formats, by title."""
    return {f"{name} {form}": MODELS[name](form) for name in models for form in formats}
