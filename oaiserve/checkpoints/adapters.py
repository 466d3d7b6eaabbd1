"""Reads the files of a LoRA adapter, in PEFT's format, and refuses damaged or unsupported ones.

It doesn't need the base model. It uses only the standard library, so that a bad adapter is rejected at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oaiserve.checkpoints.bad_file import BadFile, reason_of
from oaiserve.checkpoints.checkpoint import conversion, json_object
from oaiserve.checkpoints.name_patterns import (
    MOST_PATTERNS,
    BadPattern,
    FirstMatch,
    Name,
    NamePattern,
    Steps,
    TooMuchWork,
)
from oaiserve.checkpoints.safetensors_header import read_header

MOST_RANK = 256
_MOST_NAME = 500  # most characters in a tensor's name
_MOST_HEADER_BYTES = 2**24  # The header for 18,432 experts has 6 MiB. Parsing a larger one would hold the GIL for long.
_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# Settings of adapters that compute something other than LoRA, and what they mean.
_NOT_SUPPORTED = {
    "use_dora": "it is a DoRA adapter",
    "use_qalora": "it is a QALoRA adapter",
    "use_bdlora": "it is a BD-LoRA adapter",
    "alora_invocation_tokens": "it is an activated LoRA adapter",
    "modules_to_save": "it replaces whole modules",
    "target_parameters": "it adapts parameters that are no modules",
    "trainable_token_indices": "it adapts single tokens of the embedding",
    "layer_replication": "it repeats layers of the model",
    "lora_bias": "it has biases",
}
# Initializations for training that also change the base model's weights.
_CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")

Scaling = Callable[[str], tuple[float, float]]  # returns the rank and the scale of a module, by its name


class BadAdapter(Exception):
    """The adapter cannot be used. The message names the file and the reason, without a full stop."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    dtype: str  # a key of _DTYPE_BYTES
    shape: tuple[int, int]
    offset: int  # byte offset in the file


@dataclass(frozen=True, slots=True)
class StoredModule:
    """The tensors of an adapter for one module, to whose weights `scale * b @ a` is added."""

    a: StoredTensor  # [rank, columns of the module]
    b: StoredTensor  # [rows, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    weights: Path
    modules: Mapping[str, StoredModule]  # keyed by the module's name in the model

    @property
    def num_numbers(self) -> int:
        return sum(math.prod(part.a.shape) + math.prod(part.b.shape) for part in self.modules.values())


def read_adapter(folder: Path) -> AdapterFiles:
    """Read the configuration and the head of the weights of an adapter. Raises BadAdapter."""
    path = folder / _CONFIG
    if folder.is_file():
        raise BadAdapter(f"'{folder}' is a file, but an adapter is a folder in PEFT's format, with {_CONFIG}")
    if not folder.exists():
        reason = f"there is no folder '{folder}'"
        if len(folder.parts) == 2:  # A hub id has two parts.
            reason += f". If it is on the hub, fetch it with 'hf download {folder} --local-dir FOLDER'"
        raise BadAdapter(reason)
    if not path.exists() and (inner := sorted(folder.glob(f"*/{_CONFIG}"))):
        raise BadAdapter(f"'{folder}' has no {_CONFIG}, but its folder '{inner[-1].parent.name}' has one")
    try:
        config = json_object(path)
        _refuse_unless_supported(config)
        scaling = _scaling(config)
        path = folder / _WEIGHTS
        pickled = folder / "adapter_model.bin"
        if not path.is_file() and pickled.is_file():
            command = conversion(pickled, _WEIGHTS)
            raise BadFile(
                "it is missing; there is adapter_model.bin, but pickle can run code, so it is not opened. Convert it "
                f"with: {command}"
            )
        return AdapterFiles(path, _modules(_tensors(path), scaling))
    except (BadFile, OSError) as error:
        raise BadAdapter(f"'{path}': {reason_of(error)}") from error


def _refuse_unless_supported(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise BadFile(f"its peft_type is {str(kind)[:100]!r}, and only LORA is supported")
    for setting, reason in _NOT_SUPPORTED.items():
        if config.get(setting):
            raise BadFile(f"{reason} ({setting}), which is not supported")
    if config.get("bias", "none") != "none":
        raise BadFile(f"it has biases (bias: {str(config['bias'])[:100]!r}), which is not supported")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_MODEL):
        raise BadFile(
            f"it is for a model whose own weights its training has changed (init_lora_weights: {begun[:100]!r}); PEFT "
            "converts it when it is saved with path_initial_model_for_weight_conversion"
        )


def _scaling(config: Mapping[str, Any]) -> Scaling:
    rank_of_others = _number(config, "r", 8)
    alpha_of_others = _number(config, "lora_alpha", 8)
    ranks = _pattern(config, "rank_pattern")
    alphas = _pattern(config, "alpha_pattern")
    steps = Steps()

    def of_module(module: str) -> tuple[float, float]:
        name = Name(module, steps)
        try:
            rank = ranks.number(name) or rank_of_others
            alpha = alphas.number(name) or alpha_of_others
        except TooMuchWork:
            raise BadFile(
                "its rank_pattern and alpha_pattern have too many or too complicated expressions for the number of its "
                "modules; give ranks and alphas by modules' names"
            ) from None
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return of_module


def _number(config: Mapping[str, Any], name: str, default: int) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise BadFile(f"its {name} is {str(value)[:100]}, which is not a number above 0")
    return value


def _pattern(config: Mapping[str, Any], name: str) -> FirstMatch:
    """Return the numbers that a setting maps to patterns. The patterns match the ends of modules' names."""
    entries = config.get(name) or {}
    if not isinstance(entries, dict):
        raise BadFile(f"its {name} is not a JSON object")
    if len(entries) > MOST_PATTERNS:
        raise BadFile(f"its {name} has {len(entries)} expressions, and may have at most {MOST_PATTERNS}")
    numbers = {}
    for text in entries:
        try:
            numbers[NamePattern(text)] = _number(entries, text, 0)
        except BadPattern as error:
            raise BadFile(f"its {name} has the expression {text[:100]!r}, which {error}") from error
    return FirstMatch(numbers)


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file. Raises BadFile unless all are matrices of floating-point numbers."""
    header, start = read_header(path, _MOST_HEADER_BYTES)
    tensors = {}
    for name, tensor in header.items():
        dtype = tensor["dtype"]
        shape = tensor["shape"]
        begin = tensor["data_offsets"][0]
        if dtype not in _DTYPE_BYTES:
            raise BadFile(f"its tensor {name[:200]!r} has the dtype {dtype[:20]!r}, not one of F32, F16 and BF16")
        if len(shape) != 2 or 0 in shape:
            raise BadFile(f"its tensor {name[:200]!r} has the shape {str(shape)[:50]}, and is no matrix")
        if (start + begin) % _DTYPE_BYTES[dtype]:
            raise BadFile(f"its tensor {name[:200]!r} is not aligned to its numbers")
        tensors[name] = StoredTensor(name, dtype, (shape[0], shape[1]), start + begin)
    return tensors


def _modules(tensors: Mapping[str, StoredTensor], scaling: Scaling) -> dict[str, StoredModule]:
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name) if len(name) <= _MOST_NAME else None
        if match is None:
            raise BadFile(f"its tensor {name[:200]!r} is not the lora_A or lora_B of a linear layer")
        halves.setdefault(match[1], {})[match[2]] = tensor
    modules = {}
    for module, both in halves.items():
        if both.keys() != {"A", "B"}:
            raise BadFile(f"it has only the lora_{next(iter(both))} of '{module[:200]}'")
        a = both["A"]
        b = both["B"]
        rank, scale = scaling(module)
        if a.shape[0] > MOST_RANK:
            raise BadFile(
                f"its tensor '{a.name[:200]}' has the rank {a.shape[0]}, and at most {MOST_RANK} is supported"
            )
        for tensor, number in ((a, a.shape[0]), (b, b.shape[1])):
            if number != rank:
                shape = list(tensor.shape)
                raise BadFile(f"its tensor '{tensor.name[:200]}' {shape} has not the rank {rank:g} of {_CONFIG}")
        modules[module] = StoredModule(a, b, scale)
    if not modules:
        raise BadFile("it has no tensors")
    return modules
