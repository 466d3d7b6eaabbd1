"""Finds out which executors compute each described type from which files: python -m tools.described_types [TYPE ...]

Writes a small model of each type as a file of each kind. Each executor computes its logits, which must be those that
transformers computes with the numbers in the file. Prints the executors of each file, and raises AssertionError where
logits differ. A GPU's executor runs on the CPU, in plain PyTorch. All types take some minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.model_spec import kv_shapes
from oaiserve.engine.decoder.sources.wrapped_names import own_name
from oaiserve.engine.executors.fallback import CachedForward
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.model.transformers_files.gguf_config import read_config
from oaiserve.engine.start.described import describe_model
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.start.ways import fallback
from oaiserve.errors import StartupError
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels
from oaiserve.runtime import THREADS
from tests.engine.decoder.sources.test_gguf import FILES
from tests.engine.executors.native.small_models import config, make_model
from tests.engine.model.steps import BLOCK_SIZE, CPU, batch_of_prompt
from tests.models.gguf_files import ARCHITECTURES, write_gguf
from tests.models.gguf_records import Record, model_of, records
from tests.models.in_blocks import WIDE, file_of, write_gpt2
from tests.models.packed import Packing, save_in_mxfp4
from tools.config_mutants import SIZES, Original, be_quiet, logits_by, logits_of
from tools.markdown import add_publishing, as_markdown, publish, results_of

log = logging.getLogger(__name__)

MARKERS = "described-types"
LENGTH = 60
OPTIONS = EngineOptions(dtype="float32", device="cpu", block_size=BLOCK_SIZE, cpu_threads=1, media=False)
GPU = torch.device("meta")  # matrices for it are not read before they are placed
GGUF_CONFIGS = [*FILES.values(), config("mistral", **WIDE)]  # models that are written as files
# The largest error of logits in float32, relative to their norm; and the median of tokens where weights are rounded, or
# what they are multiplied with, which gives some tokens of random models other experts.
EXACT = 1e-4
ROUNDED = 0.5


class File(NamedTuple):
    """A model's file, and the logits [LENGTH, vocab] of the numbers in it."""

    path: Path
    expected: Tensor
    is_rounded: tuple[str, ...] = ()  # names of the executors that round


def safetensors(original: Original, _: Path) -> File:
    return File(original.folder, original.logits(LENGTH))


def gguf(original: Original, folder: Path) -> File | None:
    """Write a small model of the type that a converted file is known of."""
    name = original.stated["model_type"]
    path = folder / "model.gguf"
    asked = next((one for one in GGUF_CONFIGS if one.model_type == name), None)
    kind = GGMLQuantizationType.Q8_0
    if name in records():
        model = model_of(name)
        Record(name).write(path, model, lambda _: kind)
    elif name == "gpt2":
        model = write_gpt2(path, kind)
    elif asked is not None:
        file_of(asked, folder, {}, kind)
        # A file does not say all that the configuration does.
        model = AutoModelForCausalLM.from_config(
            read_config(Checkpoint.at(path)), dtype=torch.float32, attn_implementation="eager"
        )
        model.load_state_dict(make_model(asked).state_dict())
    elif name in ARCHITECTURES:  # the text model of a wrapper
        model = original.model
        named = [(own_name(key), tensor.numpy()) for key, tensor in model.state_dict().items()]
        parameters = [(key, values) for key, values in named if key is not None]
        text = model.config.get_text_config(decoder=True)
        write_gguf(path, text, parameters, lambda _: GGMLQuantizationType.F32)
    else:
        return None
    return File(path, logits_of(model, LENGTH), tuple(EXECUTORS))


def quantized(packing: Packing | None, original: Original, folder: Path) -> File:
    """Quantize the linear layers of a model by row, to FP8 without a packing."""
    tensors = load_file(original.folder / "model.safetensors")
    kinds = (torch.nn.Linear, Conv1D)
    modules = {_in_layer(name): type(one) for name, one in original.model.named_modules() if isinstance(one, kinds)}
    in_file: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        kind = torch.nn.Linear if ".experts." in name else modules.get(_in_layer(module))
        if kind is None or tensor.dim() != 2 or any(size % 8 for size in tensor.shape) or _is_plain(name):
            in_file[name] = tensor
            continue
        matrix = tensor.T if kind is Conv1D else tensor
        if packing is None:
            in_file[name] = (matrix * 100).to(torch.float8_e4m3fn)
            in_file[f"{module}.weight_scale"] = torch.tensor(0.01)
            numbers = in_file[name].float() * 0.01
        else:
            codes = packing.quantize(matrix.numpy())
            in_file |= packing.tensors(module, codes)
            numbers = torch.from_numpy(codes.weights())
        tensors[name] = (numbers.T if kind is Conv1D else numbers).contiguous()
    config = json.loads((original.folder / "config.json").read_text())
    settings = {"quant_method": "fp8"} if packing is None else packing.config()
    for name, found in (("plain", tensors), ("quantized", in_file)):
        (folder / name).mkdir()
        save_file({key: one.contiguous() for key, one in found.items()}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(config))
        config["quantization_config"] = settings
    return File(folder / "quantized", logits_of(original.loaded(folder / "plain")[0], LENGTH), ("native",))


def _is_plain(name: str) -> bool:
    """Tell tensors that no file has quantized: of routers, and outside of layers."""
    return name.endswith((".gate.weight", "router.weight")) or not re.search(r"(layers|h)\.\d+\.", name)


def _in_layer(name: str) -> str:
    return name.rpartition("layers.")[2]


def mxfp4(original: Original, folder: Path) -> File | None:
    if original.stated["model_type"] != "gpt_oss":  # no other type has such files
        return None
    expanded = save_in_mxfp4(original.model, folder)
    model = original.made(original.folder)
    model.load_state_dict(expanded, strict=False)
    return File(folder, logits_of(model, LENGTH), ("native",))


SOURCES: dict[str, Callable[[Original, Path], File | None]] = {
    "safetensors": safetensors,
    "GGUF": gguf,
    "AWQ": partial(quantized, Packing("awq", group_size=-1)),
    "GPTQ": partial(quantized, Packing("gptq", group_size=-1)),
    "compressed-tensors": partial(quantized, Packing("pack-quantized", group_size=-1)),
    "FP8": partial(quantized, None),
    "MXFP4": mxfp4,
}


def reference(path: Path) -> Tensor:
    found = describe_model(find_model(path), replace(OPTIONS, compile=False))
    return logits_by(ReferenceExecutor(found.decoder, dtype=torch.float32, device=CPU, **SIZES), found, LENGTH)


def native(path: Path) -> Tensor:
    found = describe_model(find_model(path), OPTIONS)
    assert found.library is not None
    return logits_by(NativeDecoder(found.library, found.decoder, **SIZES, num_threads=1), found, LENGTH)


def cuda(path: Path) -> Tensor:
    found = describe_model(find_model(path), OPTIONS, device=GPU)
    weights = CudaWeights(found.decoder, dtype=torch.float32, device=CPU)
    executor = CudaExecutor(weights, kv_shapes(found.decoder), **SIZES, kernels=Kernels())
    return logits_by(executor, found._replace(spec=replace(found.spec, device=CPU)), LENGTH)


def transformers_code(path: Path) -> Tensor:
    model = fallback.load(StartRequest(find_model(path), OPTIONS, THREADS), CPU).eval()
    return CachedForward(model)(batch_of_prompt(LENGTH).input_ids, 0, None, list(range(LENGTH)))[0]


EXECUTORS: dict[str, Callable[[Path], Tensor]] = {
    "reference": reference,
    "native": native,
    "cuda": cuda,
    "fallback": transformers_code,
}


@torch.inference_mode()
def executors_of(name: str) -> dict[str, list[str]]:
    """Return the executors that compute a type, by the kind of file."""
    found: dict[str, list[str]] = {}
    with TemporaryDirectory() as folder:
        original = Original(name, Path(folder))
        for source, write in SOURCES.items():
            with TemporaryDirectory() as other:
                file = write(original, Path(other))
                if file is not None:
                    found[source] = [executor for executor in EXECUTORS if _computes(executor, file, (name, source))]
    return found


def _computes(executor: str, file: File, case: tuple[str, str]) -> bool:
    try:
        logits = EXECUTORS[executor](file.path)
    except (NotKnown, StartupError) as reason:
        log.info("%s %s %s: %s", *case, executor, reason)
        return False
    errors = (logits - file.expected).norm(dim=1) / file.expected.norm(dim=1)
    is_rounded = executor in file.is_rounded
    error = float(errors.median() if is_rounded else errors.max())
    assert error < (ROUNDED if is_rounded else EXACT), (*case, executor, error)
    return True


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the executors of all types or some, by the type and the kind of file."""
    types = {}
    for name in arguments.types or FAMILIES:
        types[name] = executors_of(name)
        print(name, *(f"{source}: {' '.join(found)}" for source, found in types[name].items()), sep="\n  ", flush=True)
    return {"types": types}


def text(found: dict[str, Any]) -> str:
    """Return the published table: types with the same executors in one row, and kinds of files in one column."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, of_type in found["types"].items():
        rows.setdefault(cells(of_type), []).append(name)
    in_order = sorted(rows.items(), key=lambda row: len(row[1]), reverse=True)
    columns: dict[tuple[str, ...], list[str]] = {}
    for place, source in enumerate(SOURCES):
        columns.setdefault(tuple(row[place] for row, _ in in_order), []).append(source)
    names = ["model types", *(", ".join(sorted(names)) for _, names in in_order)]
    of_sources = [(", ".join(sources), *column) for column, sources in columns.items()]
    return "\n".join(as_markdown(list(zip(names, *of_sources, strict=True))))


def cells(of_type: dict[str, list[str]]) -> tuple[str, ...]:
    """Return the initials of the executors of a type for each kind of file."""
    return tuple("".join(one[0].upper() for one in of_type.get(source, [])) or "-" for source in SOURCES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="default: all")
    add_publishing(parser, MARKERS)
    arguments = parser.parse_args()
    be_quiet()
    results = results_of(arguments, measure)
    publish(arguments, MARKERS, results, text(results))
