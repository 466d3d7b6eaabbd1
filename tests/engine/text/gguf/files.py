"""Writes GGUF files that have only a tokenizer and one tensor."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from oaiserve.engine.text.tokenizer import Tokenizer
from tests.models.gguf_files import finish


def write(path: Path, values: dict[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, values["general.architecture"])
    for name, value in values.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif name != "general.architecture":
            writer.add_string(name, value)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    finish(writer)
    return path


def tokenizer_of(folder: Path, values: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_pretrained(write(folder / "model.gguf", values))
