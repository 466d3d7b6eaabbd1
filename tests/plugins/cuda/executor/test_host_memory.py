"""Weights reach a GPU one by one: main memory holds the largest one, and not the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
import torch

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Matrix
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.start.described import describe_model
from tests.engine.executors.fake_gpu import GPU
from tests.models.decoders import FAMILIES, random_model
from tests.plugins.cuda.executor.test_executor import batch_of, on_cpu

HIDDEN = 8192  # sizes of Llama 3.1 70B
INNER = 28_672
VOCAB = 128_256
KEYS = 1024
# On a GPU, a tensor of another dtype is converted on the host: 2 GiB for the embedding, in addition to this.
LIMIT_GIB = 1

PLACE = """
import resource, sys
import torch
from pathlib import Path
from oaiserve.config import EngineOptions
from oaiserve.plugins.cuda.executor.executor import CudaWeights
from oaiserve.engine.start.described import describe_model
from oaiserve.checkpoints.source import find_model

def used():  # private memory, in which mapped files count, too
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])

folder, limit = Path(sys.argv[1]), int(sys.argv[2])
before = used() + (folder / "model.safetensors").stat().st_size
resource.setrlimit(resource.RLIMIT_DATA, (before + limit, before + limit))
gpu = torch.device("meta")
found = describe_model(find_model(folder), EngineOptions(max_model_len=2048), device=gpu)
weights = CudaWeights(found.decoder, dtype=found.spec.dtype, device=gpu)
print(len(weights.packed), used() - before)
"""


def tensors() -> Iterator[tuple[str, str, list[int]]]:
    """Yield names, types and shapes of a model of one layer in 4 bits."""
    yield "model.embed_tokens.weight", "F16", [VOCAB, HIDDEN]
    yield "lm_head.weight", "F16", [VOCAB, HIDDEN]
    yield "model.norm.weight", "F16", [HIDDEN]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"model.layers.0.{norm}.weight", "F16", [HIDDEN]
    sizes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN, KEYS),
        "self_attn.v_proj": (HIDDEN, KEYS),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (HIDDEN, INNER),
        "mlp.up_proj": (HIDDEN, INNER),
        "mlp.down_proj": (INNER, HIDDEN),
    }
    for name, (columns, rows) in sizes.items():
        yield f"model.layers.0.{name}.qweight", "I32", [columns, rows // 8]
        yield f"model.layers.0.{name}.qzeros", "I32", [columns // 128, rows // 8]
        yield f"model.layers.0.{name}.scales", "F16", [columns // 128, rows]


def write_sparse(folder: Path) -> None:
    """Write the files of the model, whose numbers are zeros that take no place on the disk."""
    header = {}
    end = 0
    for name, kind, shape in tensors():
        begin = end
        end += prod(shape) * {"F16": 2, "I32": 4}[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB, "num_hidden_layers": 1}
    heads = {"num_attention_heads": HIDDEN // 128, "num_key_value_heads": KEYS // 128}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    config = {"model_type": "llama", **sizes, **heads, "torch_dtype": "float16", "quantization_config": awq}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits private memory: run it there")
def test_a_layer_of_70b_in_4_bits_takes_little_main_memory(tmp_path: Path) -> None:
    write_sparse(tmp_path)
    command = [sys.executable, "-c", PLACE, str(tmp_path), str(LIMIT_GIB << 30)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    packed, left = map(int, done.stdout.split())
    assert packed == 4  # joined inputs of attention, its output, and the same of the MLP
    assert left < 1 << 29  # nothing stays there for each layer


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.inference_mode()
def test_matrices_in_another_dtype_are_converted_when_they_are_placed(family: str, tmp_path: Path) -> None:
    random_model(FAMILIES[family], dtype=torch.float32).save_pretrained(tmp_path)

    def described(device: torch.device) -> tuple[ModelSpec, list[Matrix], torch.Tensor]:
        found = describe_model(find_model(tmp_path), EngineOptions(dtype="bfloat16", compile=False), device=device)
        layer = found.decoder.layers[0]
        assert layer.attention is not None
        logits = on_cpu(found.decoder, dtype=torch.bfloat16).forward(batch_of([([5, 6, 7], 0)]))
        return found.spec, [layer.attention.out], logits

    spec, (kept,), placed = described(GPU)
    _, (converted,), expected = described(torch.device("cpu"))
    assert spec.dtype == placed.dtype == expected.dtype == torch.bfloat16
    assert (kept.weight.dtype, converted.weight.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(placed, expected)
