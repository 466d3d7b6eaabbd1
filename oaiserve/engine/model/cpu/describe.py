"""A transformers decoder as the operations and weights it consists of, read from its modules by their usual names.

Names can mislead, so two things are checked before anybody relies on what was read: that every parameter of the model
has found its place, and (by whoever builds on it) that the outputs are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.model.load import KVShape, LoadedModel

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
}


class NotKnown(Exception):
    """In one sentence: what of the model the native step has no operation for."""


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor  # float32 [width]
    bias: Tensor | None
    epsilon: float
    subtracts_mean: bool


@dataclass(frozen=True, slots=True)
class Matrix:
    weight: Tensor  # [n, k], in the model's dtype
    bias: Tensor | None  # [n]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """As the model itself hands them to its attention function."""

    scaling: float
    sliding_window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: list[Matrix]  # one, or three that belong below each other
    out: Matrix
    heads: int
    shape: KVShape
    query_norm: Norm | None  # of each head
    key_norm: Norm | None
    cosines: Tensor | None  # float32 [positions, dim / 2]; None: positions do not enter here
    sines: Tensor | None
    options: AttentionOptions


@dataclass(frozen=True, slots=True)
class MLP:
    gate: Matrix | None
    up: Matrix
    down: Matrix
    activation: str  # a name in library.ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    attention: Attention
    attention_out_norm: Norm | None
    mlp_norm: Norm | None  # None: attention and MLP read the same normed state, side by side
    mlp: MLP
    mlp_out_norm: Norm | None


@dataclass(frozen=True, slots=True)
class Decoder:
    embedding: Tensor  # [vocab, width]
    embedding_scale: float
    position_embedding: Tensor | None  # [positions, width]
    layers: list[Layer]
    residual_scale: float  # of what a layer adds
    final_norm: Norm
    head: Matrix
    logits_scale: float
    logits_softcap: float


def describe(loaded: LoadedModel, options: dict[int, AttentionOptions]) -> Decoder:
    """`options` by layer index. Raises NotKnown."""
    return _Reader(loaded, options).decoder()


class _Reader:
    def __init__(self, loaded: LoadedModel, options: dict[int, AttentionOptions]) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._config = loaded.model.config
        self._base = loaded.model.base_model
        self._options = options
        self._read: set[int] = set()  # ids of the parameters that have found their place

    def decoder(self) -> Decoder:
        embedding = self._child(self._base, "embed_tokens", "wte")
        position = self._child(self._base, "wpe", optional=True)
        head = self._model.get_output_embeddings()
        config = self._config
        layers = enumerate(self._child(self._base, "layers", "h"))
        decoder = Decoder(
            embedding=self._parameter(embedding, "weight"),
            embedding_scale=float(getattr(embedding, "embed_scale", 1)) * getattr(config, "embedding_multiplier", 1.0),
            position_embedding=None if position is None else self._parameter(position, "weight"),
            layers=[self._layer(index, layer) for index, layer in layers],
            residual_scale=getattr(config, "residual_multiplier", 1.0),
            final_norm=self._norm(self._child(self._base, "norm", "ln_f")),
            head=self._matrix(head),
            logits_scale=getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0),
            logits_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        )
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in self._read:
                raise NotKnown(f"it has a parameter '{name}'")
        return decoder

    def _layer(self, index: int, layer: Module) -> Layer:
        after_attention = self._child(layer, "post_attention_layernorm", "ln_2", optional=True)
        before_mlp = self._child(layer, "pre_feedforward_layernorm", optional=True)
        after_mlp = self._child(layer, "post_feedforward_layernorm", optional=True)
        if before_mlp is None:  # what bears attention's name comes before the MLP, unless that has one of its own
            before_mlp, after_attention = after_attention, None
        return Layer(
            attention_norm=self._norm(self._child(layer, "input_layernorm", "ln_1")),
            attention=self._attention(index, self._child(layer, "self_attn", "attn")),
            attention_out_norm=None if after_attention is None else self._norm(after_attention),
            mlp_norm=None if before_mlp is None else self._norm(before_mlp),
            mlp=self._mlp(self._child(layer, "mlp")),
            mlp_out_norm=None if after_mlp is None else self._norm(after_mlp),
        )

    def _attention(self, index: int, attention: Module) -> Attention:
        shape = self._loaded.kv_shapes[index]
        together = self._child(attention, "qkv_proj", "c_attn", optional=True)
        apart = ("q_proj", "k_proj", "v_proj")
        qkv = [self._child(attention, name) for name in apart] if together is None else [together]
        matrices = [self._matrix(matrix) for matrix in qkv]
        rows = sum(len(matrix.weight) for matrix in matrices)
        heads, rest = divmod(rows - shape.kv_heads * (shape.key_dim + shape.value_dim), shape.key_dim)
        if rest or heads < 1:
            raise NotKnown(f"its projections have {rows} rows, which make no whole heads")
        query_norm = self._child(attention, "q_norm", optional=True)
        key_norm = self._child(attention, "k_norm", optional=True)
        cosines, sines = self._rotary(attention)
        return Attention(
            qkv=matrices,
            out=self._matrix(self._child(attention, "o_proj", "out_proj", "dense", "c_proj")),
            heads=heads,
            shape=shape,
            query_norm=None if query_norm is None else self._norm(query_norm, shape.key_dim),
            key_norm=None if key_norm is None else self._norm(key_norm, shape.key_dim),
            cosines=cosines,
            sines=sines,
            options=self._options[index],
        )

    def _rotary(self, attention: Module) -> tuple[Tensor | None, Tensor | None]:
        rotary = self._child(self._base, "rotary_emb", optional=True)
        if rotary is None or not getattr(attention, "use_rope", True):
            return None, None
        positions = torch.arange(self._loaded.max_model_len)[None]
        arguments: list[Any] = [torch.zeros(1), positions]
        if (layer_type := getattr(attention, "layer_type", None)) is not None:
            arguments.append(layer_type)
        try:
            cosines, sines = rotary(*arguments)
        except TypeError as error:
            raise NotKnown("its rotary embedding takes other arguments") from error
        half = cosines.shape[-1] // 2  # both halves are the same
        return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()

    def _mlp(self, mlp: Module) -> MLP:
        down = self._matrix(self._child(mlp, "down_proj", "c_proj", "fc2"))
        activation = _activation(self._child(mlp, "act_fn", "activation_fn", "act"))
        if (together := self._child(mlp, "gate_up_proj", optional=True)) is not None:
            both = self._matrix(together)
            (gate, up), biases = both.weight.chunk(2), (None, None) if both.bias is None else both.bias.chunk(2)
            return MLP(Matrix(gate, biases[0]), Matrix(up, biases[1]), down, activation)
        gate_proj = self._child(mlp, "gate_proj", optional=True)
        up_proj = self._child(mlp, "up_proj", "c_fc", "fc1")
        return MLP(None if gate_proj is None else self._matrix(gate_proj), self._matrix(up_proj), down, activation)

    def _norm(self, norm: Module, width: int | None = None) -> Norm:
        weight = self._parameter(norm, "weight").float()
        if width is not None and weight.shape != (width,):
            raise NotKnown("it norms queries and keys across heads")
        if isinstance(norm, torch.nn.LayerNorm):
            bias = None if norm.bias is None else self._parameter(norm, "bias").float()
            return Norm(weight, bias, norm.eps, subtracts_mean=True)
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if "RMSNorm" not in type(norm).__name__ or not isinstance(epsilon, float):
            raise NotKnown(f"it has norms of type {type(norm).__name__}")
        # Some families store how much the weight differs from 1: the norm of ones tells.
        ones = norm(torch.ones(len(weight), dtype=self._loaded.dtype)).float() * (1 + epsilon) ** 0.5
        weight = min((weight, weight + 1), key=lambda candidate: float((candidate - ones).abs().max()))
        return Norm(weight, None, epsilon, subtracts_mean=False)

    def _matrix(self, module: Module) -> Matrix:
        weight = self._parameter(module, "weight")
        bias = None if getattr(module, "bias", None) is None else self._parameter(module, "bias")
        if type(module).__name__ == "Conv1D":  # GPT-2's linear layers, with their weights the other way round
            return Matrix(weight.T.contiguous(), bias)
        if not isinstance(module, torch.nn.Linear):
            raise NotKnown(f"it has matrices of type {type(module).__name__}")
        return Matrix(weight, bias)

    def _parameter(self, module: Module, name: str) -> Tensor:
        parameter = getattr(module, name)
        self._read.add(id(parameter))
        return parameter.detach()  # type: ignore[no-any-return]

    def _child(self, module: Module, *names: str, optional: bool = False) -> Any:
        for name in names:
            if (child := getattr(module, name, None)) is not None:
                return child
        if optional:
            return None
        raise NotKnown(f"{type(module).__name__} has no {' or '.join(names)}")


def _activation(function: Any) -> str:
    x = torch.linspace(-4, 4, 101)
    with torch.inference_mode():
        expected = function(x)
    for name, known in _ACTIVATIONS.items():
        if torch.allclose(known(x), expected, atol=1e-6):
            return name
    raise NotKnown(f"its activation is {type(function).__name__}")
