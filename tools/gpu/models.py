"""Describes models with random weights that are in no file: an executor takes them from the device's memory.

Tensors are views of one pool of random numbers, and where they begin there depends on their names. So a model needs the
memory of its largest tensor until it is placed, and a tensor is the same whenever it is read.
"""

from __future__ import annotations

import copy
import json
import math
import zlib
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from oaiserve.engine.decoder.blocks import MXFP4, Blocks
from oaiserve.engine.decoder.context_length import context_length
from oaiserve.engine.decoder.describe import describe
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.model_spec import model_spec
from oaiserve.engine.decoder.settings import settings_of
from oaiserve.engine.decoder.sources.hub import HubTensors
from oaiserve.engine.decoder.sources.integer_layouts import Floats, Integers
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.decoder.sources.unread_matrix import UnreadMatrix
from oaiserve.engine.start.described import Described
from tests.models.packed import Packing

Packed = Packing | str | None
GAIN = 1.3  # A matrix makes a row longer by about this factor.
FP8_COLUMNS = 128  # columns that share a scale, if a row has a multiple of them
_MXFP4_COLUMNS = 32
_PLACES = 1 << 14  # places of the pool in which a tensor may begin
_APART = 64  # numbers between two of these
_LARGE = 1 << 16  # numbers
_NEAR_ONE = ("norm.weight", "layer_scalar", "per_expert_scale", "router.scale")
_OF_STATES = ("A_log", "conv.weight", "conv1d.weight", "dt_bias", "dt_proj.bias")
_DEVIATION_OF_STATES = 0.5  # or else what is in a state hardly changes an answer
_DEVIATION_OF_CODES = 4.6  # deviation of four random bits


def sensitive(config: PreTrainedConfig) -> PreTrainedConfig:
    """Give a configuration weights so large that scores of keys differ, and a wrong key changes an answer."""
    if hasattr(config, "initializer_range"):
        config.initializer_range = GAIN / config.hidden_size**0.5
    return config


@torch.inference_mode()
def described_on(
    config: PreTrainedConfig,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    packing: Packed = None,
) -> Described:
    """Describe a model with random weights on a device. On "meta" its large matrices have only shapes.

    `packing` is that of the matrices of layers: in integers, "fp8", or "mxfp4", which the experts of gpt-oss have.
    """
    settings = settings_of(json.loads(config.to_json_string()))
    family = FAMILIES[settings["model_type"]]
    files = RandomTensors(config, device, dtype, packing)
    tensors = HubTensors(
        files,
        family.names,
        dtype,
        is_transposed=family.is_transposed,
        has_transposed_experts=family.has_transposed_experts,
        keeps_dtype=True,
    )
    decoder = describe(tensors, settings, family, context_length(settings))
    return Described(model_spec(settings, decoder, dtype=dtype, device=device), decoder, None, tensors=tensors)


class RandomTensors(TensorFiles):
    """The tensors of a model by the names that they have in files.

    Small ones are on the host, where descriptions compute with them.
    """

    def __init__(self, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, packing: Packed) -> None:
        self._device = device
        self._dtype = dtype
        self._packing = packing
        self._deviation: float = getattr(config, "initializer_range", 0.02)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config))  # a model changes its config
        self._linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        tied = all_names - {name for name, _ in model.named_parameters()}
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        stored = revert_weight_conversion(model, state)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}

    def names(self) -> set[str]:
        return set(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def has_blocks(self) -> bool:
        return self._packing is not None

    def tensor(self, name: str) -> Tensor:
        shape = self._shapes[name]
        deviation = _DEVIATION_OF_STATES if name.endswith(_OF_STATES) else self._deviation
        if math.prod(shape) < _LARGE:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            numbers = torch.randn(shape, generator=generator) * deviation
            return (numbers + name.endswith(_NEAR_ONE)).to(self._dtype)
        matrix = _part(self._numbers, name, shape)
        return matrix if deviation == self._deviation else matrix * (deviation / self._deviation)

    def blocks(self, name: str) -> Blocks | None:
        if self._packing in (None, "mxfp4") or not self._is_of_layer(name):
            return None
        read = self._floats if self._packing == "fp8" else self._integers
        return UnreadMatrix.of(self._shapes[name], partial(read, name))

    def expert_blocks(self, name: str) -> list[Blocks] | None:
        if self._packing != "mxfp4":
            return None
        experts, columns, rows = self._shapes[name]
        codes = _part(self._bits, name, (experts, rows, columns // 2)).numpy()
        scales = _part(self._bits, f"{name} scales", (experts, rows, columns // _MXFP4_COLUMNS)).numpy() % 6 + 117
        of_experts = zip(codes, scales, strict=True)
        return [Blocks(one, MXFP4, np.arange(rows), scales=of_one) for one, of_one in of_experts]

    def give_back(self) -> None:
        """There are no files."""

    def _is_of_layer(self, name: str) -> bool:
        is_linear = name.removesuffix(".weight") in self._linear or ".experts." in name
        return is_linear and len(self._shapes[name]) == 2 and "lm_head" not in name

    def _floats(self, name: str) -> Floats:
        n, k = self._shapes[name]
        groups = k // FP8_COLUMNS if k % FP8_COLUMNS == 0 else 1
        codes = (_part(self._numbers, name, (n, k)) / self._deviation).to(torch.float8_e4m3fn)
        return Floats(codes, torch.full((n, groups), self._deviation, dtype=torch.float32, device=self._device))

    def _integers(self, name: str) -> Integers:
        assert isinstance(self._packing, Packing)
        n, k = self._shapes[name]
        bits = self._packing.bits
        groups = 1 if self._packing.group_size == -1 else k // self._packing.group_size
        most = (1 << bits) - 1
        codes = _part(self._bits, name, (n, k)) & most
        scale = self._deviation / _DEVIATION_OF_CODES / (1 << bits - 4)
        scales = torch.full((n, groups), scale, dtype=self._packing.scales, device=self._device)
        # Zeros are about half of the range.
        zeros = (_part(self._bits, f"{name} zeros", (n, groups)) & 1) + most // 2
        order = None
        if self._packing.has_act_order:  # the same for all matrices that are joined
            order = torch.randperm(k, generator=torch.Generator().manual_seed(k)).to(self._device)
        return Integers(codes, scales, None if self._packing.is_symmetric else zeros, bits, order)

    @cached_property
    def _numbers(self) -> Tensor:
        pool = torch.empty(self._pool_size, dtype=self._dtype, device=self._device)
        return pool.normal_(std=self._deviation, generator=self._generator)

    @cached_property
    def _bits(self) -> Tensor:
        """Random bytes, which MXFP4 has on the host."""
        is_on_host = self._packing == "mxfp4"
        device = torch.device("cpu") if is_on_host else self._device
        generator = torch.Generator().manual_seed(0) if is_on_host else self._generator
        return torch.empty(self._pool_size, dtype=torch.uint8, device=device).random_(0, 256, generator=generator)

    @property
    def _pool_size(self) -> int:
        return max(map(math.prod, self._shapes.values())) + _PLACES * _APART

    @property
    def _generator(self) -> torch.Generator | None:
        return None if self._device.type == "meta" else torch.Generator(self._device).manual_seed(0)


def _part(pool: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a view of the pool, which begins where its name says."""
    begin = zlib.crc32(name.encode()) % _PLACES * _APART
    return pool[begin : begin + math.prod(shape)].view(shape)
