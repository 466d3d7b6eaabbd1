"""Writes checkpoints in packed integers (AWQ, GPTQ, compressed-tensors), in FP8 and in MXFP4, for tests and attacks.

What is written is said plainly: numbers are quantized to the nearest integer between the extremes of a group, and
packed field by field. In FP8 and MXFP4, scales are drawn, not chosen for the weights, so that it is a model of its own.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.quantization import read_quantization
from oaiserve.engine.decoder.sources.packed_weights import PackedWeights

Integers = NDArray[np.int64]
Layout = Literal["awq", "gptq", "gptq_v2", "pack-quantized", "int-quantized"]
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class Quantized(NamedTuple):
    """A matrix [n, k]: (codes - zeros) * scales, where column j belongs to the group `group_of[j]`."""

    codes: Integers  # [n, k]
    zeros: Integers  # [n, groups]
    scales: NDArray[np.float32]  # [n, groups]
    group_of: Integers  # [k]

    def weights(self) -> NDArray[np.float32]:
        integers = self.codes - self.zeros[:, self.group_of]
        return integers.astype(np.float32) * self.scales[:, self.group_of]


def _compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


@dataclass(frozen=True, slots=True)
class Packing:
    """A packing says how the matrices of a checkpoint are quantized and stored."""

    layout: Layout
    bits: int = 4
    group_size: int = 32  # -1: all of a row
    is_symmetric: bool = False
    has_act_order: bool = False  # columns belong to groups in any order
    scales: torch.dtype = torch.float16
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def group_of(self, k: int, seed: int = 0) -> Integers:
        """Return the group of each of k columns."""
        groups = np.arange(k) // (k if self.group_size == -1 else self.group_size)
        return np.random.default_rng(seed).permutation(groups) if self.has_act_order else groups

    def quantize(self, weight: NDArray[np.float32], seed: int = 0) -> Quantized:
        group_of = self.group_of(weight.shape[1], seed)
        scales: list[NDArray[np.float32]] = []
        zeros: list[Integers] = []
        half = 1 << (self.bits - 1)
        most = (1 << self.bits) - 1
        for group in range(group_of.max() + 1):
            members = weight[:, group_of == group]
            low = np.minimum(members.min(1), 0)
            high = np.maximum(members.max(1), 0)
            scale = np.maximum(-low, high) / (half - 1) if self.is_symmetric else (high - low) / most
            scale = torch.from_numpy(scale.astype(np.float32)).to(self.scales).float().numpy()
            scales.append(scale)
            zeros.append(np.full(len(scale), half) if self.is_symmetric else np.rint(-low / scale).astype(np.int64))
        all_scales = np.stack(scales, 1)
        all_zeros = np.stack(zeros, 1)
        codes = np.rint(weight / all_scales[:, group_of]).astype(np.int64) + all_zeros[:, group_of]
        return Quantized(np.clip(codes, 0, most), all_zeros, all_scales, group_of)

    def tensors(self, name: str, matrix: Quantized) -> dict[str, Tensor]:
        """Return the tensors of a matrix in the file, by the name of its module."""
        codes, zeros, scales, group_of = matrix
        in_type = torch.from_numpy(scales).to(self.scales)
        if self.layout == "awq":
            tensors_of_matrix = {"qweight": packed(codes.T, 4, _AWQ_ORDER), "qzeros": packed(zeros.T, 4, _AWQ_ORDER)}
            tensors_of_matrix["scales"] = in_type.T.contiguous()
        elif self.layout in ("gptq", "gptq_v2"):
            stored = zeros - 1 & (1 << self.bits) - 1 if self.layout == "gptq" else zeros
            tensors_of_matrix = {
                "qweight": packed(codes, self.bits).T.contiguous(),
                "qzeros": packed(stored.T, self.bits),
                "scales": in_type.T.contiguous(),
                "g_idx": torch.from_numpy(group_of).int(),
            }
        elif self.layout == "pack-quantized":
            tensors_of_matrix = {
                "weight_packed": packed(codes, self.bits),
                "weight_scale": in_type,
                "weight_shape": torch.tensor(codes.shape),
            }
            if not self.is_symmetric:
                tensors_of_matrix["weight_zero_point"] = packed(zeros.T, self.bits).T.contiguous()
        else:
            tensors_of_matrix = {"weight": torch.from_numpy(codes - 128).to(torch.int8), "weight_scale": in_type}
            if not self.is_symmetric:
                tensors_of_matrix["weight_zero_point"] = torch.from_numpy(zeros - 128).to(torch.int8)
        if self.has_act_order and self.layout in ("pack-quantized", "int-quantized"):
            tensors_of_matrix["weight_g_idx"] = torch.from_numpy(group_of).int()
        return {f"{name}.{part}": tensor for part, tensor in tensors_of_matrix.items()}

    def config(self) -> dict[str, Any]:
        """Return the quantization_config of config.json."""
        settings: dict[str, Any]
        if self.layout == "awq":
            settings = {"quant_method": "awq", "version": "gemm", "zero_point": True}
        elif self.layout in ("gptq", "gptq_v2"):
            settings = {"quant_method": "gptq", "checkpoint_format": self.layout, "desc_act": self.has_act_order}
            settings["sym"] = self.is_symmetric  # vLLM needs this field.
        else:
            weights = {
                "num_bits": self.bits,
                "type": "int",
                "symmetric": self.is_symmetric,
                "strategy": "channel" if self.group_size == -1 else "group",
                "group_size": None if self.group_size == -1 else self.group_size,
                "actorder": "group" if self.has_act_order else None,
            }
            return _compressed(self.layout, weights) | {"ignore": ["lm_head"]}
        return settings | {"bits": self.bits, "group_size": self.group_size}


def packed(values: Integers, bits: int, order: list[int] | None = None) -> Tensor:
    """Pack the numbers of each row into int32, the first into the lowest bits. `order` is that within an int32."""
    each = 32 // bits
    fields = values.reshape(len(values), -1, each)[:, :, order or list(range(each))]
    words = sum(fields[:, :, place] << bits * place for place in range(each))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))


def _expert_tensors(name: str, parameter: Tensor, packing: Packing) -> dict[str, Tensor]:
    """Quantize the matrices of all experts, which checkpoints have one by one."""
    base, _, last = name.rpartition(".")
    if "w1" in packing.expert_names:  # Mixtral's
        base = base.replace(".mlp.", ".block_sparse_moe.")
    gate, up, down = packing.expert_names
    names = [gate, up] if last == "gate_up_proj" else [down]
    stored: dict[str, Tensor] = {}
    for index, matrices in enumerate(parameter.data):
        for part, rows in zip(names, matrices.chunk(len(names)), strict=True):
            matrix = packing.quantize(rows.float().numpy())
            rows.copy_(torch.from_numpy(matrix.weights()))
            stored |= packing.tensors(f"{base}.{index}.{part}", matrix)
    return stored


def write_checkpoint(folder: Path, model: PreTrainedModel, packing: Packing) -> None:
    """Write a model with its linear layers quantized, except for the last, and give it the weights that this makes."""
    tensors: dict[str, Tensor] = {}
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if module in linear and name.endswith(".weight"):
            matrix = packing.quantize(parameter.detach().float().numpy())
            parameter.data = torch.from_numpy(matrix.weights()).to(parameter.dtype)
            tensors |= packing.tensors(module, matrix)
        elif parameter.dim() == 3:
            tensors |= _expert_tensors(name, parameter, packing)
        else:
            parameter.data = parameter.data.to(torch.float16).to(parameter.dtype)
            tensors[name] = parameter.data.to(torch.float16)
    save(folder, model, tensors, packing.config(), "float16")


def save(folder: Path, model: PreTrainedModel, tensors: dict[str, Tensor], quantization: Any, dtype: str) -> None:
    """Save tensors as a checkpoint of a model, with what its config.json says of quantization and of the rest."""
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization, "dtype": dtype}
    path.write_text(json.dumps(config))


Fp8Layout = Literal["blocks", "tensor", "fbgemm", "compressed"]
BLOCK = 32  # rows, and columns, of a block that has a scale


def write_fp8(folder: Path, model: PreTrainedModel, layout: Fp8Layout) -> None:
    """Write a model with its linear layers in FP8, except for the last, and give it the numbers of its file.

    The columns of these layers are multiples of `BLOCK`.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2 or "embed" in name or "lm_head" in name:
            found[name] = parameter.detach().to(torch.bfloat16)
            parameter.data = found[name].to(parameter.dtype)
            continue
        base = name.removesuffix(".weight")
        n, k = parameter.shape
        scale = _fp8_scale(n, k, layout)
        found[f"{base}.weight_scale_inv" if layout == "blocks" else f"{base}.weight_scale"] = scale
        whole = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1) if layout == "blocks" else scale
        found[name] = (parameter.detach() / whole).to(torch.float8_e4m3fn)
        parameter.data = found[name].to(parameter.dtype) * whole
        found[f"{base}.input_scale"] = torch.tensor(1.0)
    save(folder, model, found, _FP8_SETTINGS[layout], "bfloat16")


def _fp8_scale(n: int, k: int, layout: Fp8Layout) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if layout == "blocks":
        return (torch.randn(-(-n // BLOCK), k // BLOCK, generator=generator).abs() + 0.5) / 64
    if layout == "tensor":
        return torch.tensor(0.02)
    return torch.randn(n, 1, generator=generator).abs() / 64 + 0.01


_FP8_SETTINGS: dict[Fp8Layout, dict[str, Any]] = {
    "blocks": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "tensor": {"quant_method": "fp8"},
    "fbgemm": {"quant_method": "fbgemm_fp8"},
    "compressed": _compressed(
        "float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    ),
}


_HALVES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # what the codes mean


def save_in_mxfp4(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Save a gpt-oss model with random numbers of MXFP4 in place of its experts' weights. Return these, expanded."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(path)
    expanded = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, rows, width // 32, 16), generator=generator)
        scales = torch.randint(117, 123, (experts, rows, width // 32), generator=generator)
        tensors |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
        numbers = torch.stack([_HALVES[blocks % 16], _HALVES[blocks // 16]], dim=-1).flatten(-2)
        expanded[name] = (numbers * 2.0 ** (scales[..., None] - 127)).flatten(-2).transpose(1, 2)
    save_file(tensors, path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return expanded


def weights_in(folder: Path, **arguments: Any) -> PackedWeights:
    """Return the weights of a quantized checkpoint."""
    quantization = read_quantization(json.loads((folder / "config.json").read_text()))
    return PackedWeights(Checkpoint(folder), quantization, **arguments)
