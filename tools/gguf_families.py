"""Compares GGUF files of llama.cpp's own converter with the models they were made of:

    python -m tools.gguf_families LLAMA_CPP [TYPE ...] [--python PYTHON]

LLAMA_CPP is a folder of llama.cpp's sources, and PYTHON an interpreter that has what its convert_hf_to_gguf.py needs
(torch, transformers, sentencepiece), by default this one. For each type of transformers' models a small one with random
weights is saved, converted to a file with all numbers in float32 and to another one in Q8_0, and read again. Prints one
line per type: whether all weights and the logits are those of the model, and whether the weights of the second file are
kept, or why not. Exits with 1 if something differs. Then the records of `tests.models.gguf_records`, with which tests
compare, are written anew. Takes two minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from oaiserve.config import EngineOptions
from oaiserve.engine.model.checkpoints.gguf_config import read_config
from oaiserve.engine.model.checkpoints.gguf_weights import GgufWeights, NotKept
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.check import batches
from oaiserve.engine.start.compare import difference
from oaiserve.engine.start.load import load_model
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.start.ways.quantized import load_quantized
from oaiserve.files.gguf import read_values
from oaiserve.files.source import find_model
from tests.models.decoders import byte_tokenizer
from tests.models.gguf_records import RECORDS, checksum, model_of, parameters_of, records

# The converter knows tokenizers by a hash of what they make of a text, which those of small models are not known by. So
# all are written as if they were Llama 3's: tokenizers are not compared here. What guesses further tokens is left out,
# where the converter can do that, because transformers' models do not have it.
_CONVERT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import convert_hf_to_gguf as converter
from conversion.base import TextModel

def with_such_a_tokenizer(kind):
    if "set_vocab" in vars(kind):
        kind.set_vocab = lambda self: self._set_vocab_gpt2()
    for inner in kind.__subclasses__():
        with_such_a_tokenizer(inner)

TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
find = converter.get_model_class

def found(name, **options):
    kind = find(name, **options)
    with_such_a_tokenizer(TextModel)
    kind.no_mtp = getattr(kind, "supports_mtp_export", False)
    return kind

converter.get_model_class = found
for folder in sys.argv[2:]:
    for kind in ("f32", "q8_0"):
        sys.argv = ["convert", folder, "--outtype", kind, "--outfile", f"{folder}/{kind}.gguf"]
        try:
            converter.main()
        except (Exception, SystemExit) as error:
            open(f"{folder}/why", "w").write(repr(error))
"""
# What config.json has in published checkpoints, where transformers writes it in another way.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere2": {"rotary_pct": 1.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "hunyuan_v1_moe": {"moe_intermediate_size": [96] * 3, "moe_topk": [2] * 3, "num_shared_expert": [1] * 3},
    "minimax_m2": {"rotary_dim": 16},
}
_OPTIONS = EngineOptions(block_size=16, dtype="float32", cpu_threads=1)
_ROUNDING = 1e-4  # relative difference of logits
# What is in the records of the tokenizer.
_TOKENS = re.compile(r"tokenizer\.ggml\.(bos|eos|padding)_token_id$")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("types", nargs="*", default=records())
    parser.add_argument("--python", default=sys.executable)
    asked = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    differs = False
    with TemporaryDirectory() as folder:
        models = {name: _save(name, Path(folder) / name) for name in asked.types}
        folders = [str(Path(folder) / name) for name in models]
        subprocess.run([asked.python, "-c", _CONVERT, str(asked.llama_cpp), *folders], check=True, capture_output=True)
        for name, model in models.items():
            result = _compare(Path(folder) / name, model)
            differs |= not result.startswith("equal")
            print(f"{name:18} {result}", flush=True)
            if result.startswith("equal"):
                _record(name, Path(folder) / name / "f32.gguf")
    return int(differs)


def _save(name: str, folder: Path) -> PreTrainedModel:
    model = model_of(name)
    model.save_pretrained(folder)
    byte_tokenizer(320).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | _PUBLISHED.get(name, {})))
    return model


def _compare(folder: Path, model: PreTrainedModel) -> str:
    """Return whether the files of a model have its weights, and answer as it does."""
    if (why := folder / "why").exists():
        return f"NOT CONVERTED: {why.read_text()[:200]}"
    path = folder / "f32.gguf"
    weights, own = GgufWeights(path, read_config(path)), parameters_of(model)
    if differing := sorted(own.keys() ^ weights.names()):
        return f"DIFFERENT names: {', '.join(differing[:3])}"
    for name, values in own.items():
        found = weights.tensor(name).float().numpy()
        if found.shape != values.shape or not np.allclose(found, values, rtol=1e-5, atol=1e-6):
            return f"DIFFERENT values of {name}"
    expected = _logits(prepare(model))
    far = difference(_logits(load_model(path, dtype="float32")), expected)
    if not far < _ROUNDING:
        return f"DIFFERENT logits, by {far:.2g}"
    try:
        kept = load_quantized(find_model(folder / "q8_0.gguf"), _OPTIONS)
    except NotKept as error:
        return f"equal, expanded: {error}"
    found = torch.cat([kept.native.forward(batch).clone() for batch in batches(kept.loaded, _OPTIONS.block_size)])
    return f"equal, kept (Q8_0 differs by {difference(found, expected):.2g})"


@torch.inference_mode()
def _logits(loaded: LoadedModel) -> Tensor:
    eager = EagerExecutor.with_cache(loaded, num_blocks=8, block_size=_OPTIONS.block_size)
    return torch.cat([eager.forward(batch) for batch in batches(loaded, _OPTIONS.block_size)])


def _record(name: str, path: Path) -> None:
    """Record what a file has, for the tests."""
    values = {
        key: value
        for key, value in read_values(path).items()
        if value is not None and (not key.startswith(("general.", "tokenizer.")) or _TOKENS.match(key))
    }
    tensors = {
        tensor.name: [[int(size) for size in reversed(tensor.shape)], checksum(tensor.data)]
        for tensor in gguf.GGUFReader(path).tensors
        if tensor.name != "rope_freqs.weight"  # which is of no parameter
    }
    values = {"general.architecture": read_values(path)["general.architecture"]} | values
    lines = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in tensors.items()]
    RECORDS.mkdir(exist_ok=True)
    text = json.dumps(values, indent=1)
    (RECORDS / f"{name}.json").write_text(f'{{"values": {text}, "tensors": {{\n ' + ",\n ".join(lines) + "\n}}\n")


if __name__ == "__main__":
    sys.exit(main())
