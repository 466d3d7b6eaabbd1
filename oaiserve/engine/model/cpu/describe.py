"""Describes a transformers decoder by its operations and weights, which are found by the names of its modules.

Names can mislead, so two checks come before the description is used: this module checks that the description contains
every parameter of the model, and `start.py` checks that the outputs are the model's own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.model.spec import KVShape, LoadedModel

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
}


# In these families only the layers with a window rotate queries and keys by position.
_ROTATE_IN_WINDOWS = {"cohere2", "exaone4"}


class NotKnown(Exception):
    """The model has a part that the native step has no operation for; the message names that part."""


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor  # float32 [width]
    bias: Tensor | None
    epsilon: float
    subtracts_mean: bool

    def __call__(self, x: Tensor) -> Tensor:
        if self.subtracts_mean:
            x = x - x.mean()
        x = x / (x.square().mean() + self.epsilon).sqrt() * self.weight
        return x if self.bias is None else x + self.bias


@dataclass(frozen=True, slots=True)
class Matrix:
    weight: Tensor  # [n, k], in the model's dtype
    bias: Tensor | None  # [n]


@dataclass(frozen=True, slots=True)
class RotaryTable:
    cosines: Tensor  # float32 [positions, dim / 2]
    sines: Tensor
    is_interleaved: bool  # numbers are rotated in pairs of neighbours; else number i is paired with number i + dim / 2


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """The parameters that the model passes to its attention function."""

    scaling: float
    sliding_window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: list[Matrix]  # one matrix, or three whose rows follow each other
    out: Matrix
    heads: int
    shape: KVShape
    query_norm: Norm | None  # as wide as one head, which it norms separately, or as all heads together
    key_norm: Norm | None
    rotary: RotaryTable | None  # None: this layer does not rotate queries and keys by position
    parameters: AttentionParameters


@dataclass(frozen=True, slots=True)
class MLP:
    gate: Matrix | None
    up: Matrix
    down: Matrix
    activation: str  # a name in library.ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm | None
    attention: Attention
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp: MLP
    mlp_out_norm: Norm | None
    is_parallel: bool  # the MLP reads the hidden state that attention reads, without what attention adds to it


@dataclass(frozen=True, slots=True)
class Decoder:
    embedding: Tensor  # [vocab, width]
    embedding_scale: float
    position_embedding: Tensor | None  # [positions, width]
    layers: list[Layer]
    residual_scale: float  # the factor of a layer's additions to the hidden state
    final_norm: Norm
    head: Matrix
    logits_scale: float
    logits_softcap: float


@torch.inference_mode()
def describe(loaded: LoadedModel, parameters: dict[int, AttentionParameters]) -> Decoder:
    """Describe the model. `parameters` are those of its attention, by layer index. Raises NotKnown."""
    return _Reader(loaded, parameters).decoder()


class _Reader:
    """Reads the modules of one model, and keeps track of which parameters it has read."""

    def __init__(self, loaded: LoadedModel, parameters: dict[int, AttentionParameters]) -> None:
        self._loaded = loaded
        self._model = loaded.model
        self._config = loaded.model.config
        self._base = loaded.model.base_model
        self._parameters = parameters
        self._read: set[int] = set()  # the id() of each parameter that the description contains
        self._rotary_tables: dict[str | None, RotaryTable] = {}  # by layer type if tables differ between types

    def decoder(self) -> Decoder:
        embedding = self._child(self._base, "embed_tokens", "wte", "embed_in")
        position = self._child(self._base, "wpe", optional=True)
        config = self._config
        layers = enumerate(self._child(self._base, "layers", "h"))
        decoder = Decoder(
            embedding=self._weights(embedding),
            embedding_scale=float(getattr(embedding, "embed_scale", 1)) * getattr(config, "embedding_multiplier", 1.0),
            position_embedding=None if position is None else self._weights(position),
            layers=[self._layer(index, layer) for index, layer in layers],
            residual_scale=getattr(config, "residual_multiplier", 1.0),
            final_norm=self._norm(self._child(self._base, "norm", "ln_f", "final_layernorm", "final_layer_norm")),
            head=self._matrix(self._model.get_output_embeddings()),
            logits_scale=getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0),
            logits_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        )
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in self._read:
                raise NotKnown(f"it has a parameter '{name}'")
        if not all(_fits(layer, decoder.embedding.shape[1]) for layer in decoder.layers):
            raise NotKnown("the sizes of its matrices do not fit together")
        return decoder

    def _layer(self, index: int, layer: Module) -> Layer:
        attention_norm = self._norm_of(layer, "input_layernorm", "ln_1")
        after_attention = self._norm_of(layer, "post_self_attn_layernorm")
        between = self._norm_of(layer, "post_attention_layernorm", "ln_2")
        before_mlp = self._norm_of(layer, "pre_feedforward_layernorm")
        # `post_attention_layernorm` is the norm before the MLP. If the MLP has its own, or attention has no norm before
        # it, that name is the norm of attention's output.
        if before_mlp is None and attention_norm is not None:
            before_mlp = between
        else:
            after_attention = between
        is_parallel = getattr(layer, "use_parallel_residual", before_mlp is None and attention_norm is not None)
        return Layer(
            attention_norm=attention_norm,
            attention=self._attention(index, self._child(layer, "self_attn", "attn", "attention")),
            attention_out_norm=after_attention,
            mlp_norm=attention_norm if is_parallel and before_mlp is None else before_mlp,
            mlp=self._mlp(self._child(layer, "mlp")),
            mlp_out_norm=self._norm_of(layer, "post_feedforward_layernorm", "post_mlp_layernorm"),
            is_parallel=is_parallel,
        )

    def _attention(self, index: int, attention: Module) -> Attention:
        shape = self._loaded.kv_shapes[index]
        qkv = self._qkv(attention, shape)
        rows = sum(len(matrix.weight) for matrix in qkv)
        heads, rest = divmod(rows - shape.kv_heads * (shape.key_dim + shape.value_dim), shape.key_dim)
        if rest or heads < 1 or heads % shape.kv_heads:
            raise NotKnown(f"its projections have {rows} rows, which make no whole heads")
        return Attention(
            qkv=qkv,
            out=self._matrix(self._child(attention, "o_proj", "out_proj", "dense", "c_proj")),
            heads=heads,
            shape=shape,
            query_norm=self._norm_of(attention, "q_norm", "q_layernorm"),
            key_norm=self._norm_of(attention, "k_norm", "k_layernorm"),
            rotary=self._rotary(index, attention),
            parameters=self._parameters[index],
        )

    def _qkv(self, attention: Module, shape: KVShape) -> list[Matrix]:
        if (by_head := self._child(attention, "query_key_value", optional=True)) is not None:
            matrix, heads = self._matrix(by_head), shape.kv_heads
            bias = None if matrix.bias is None else _by_kind(matrix.bias, heads)
            return [Matrix(_by_kind(matrix.weight, heads), bias)]
        if (together := self._child(attention, "qkv_proj", "c_attn", optional=True)) is not None:
            return [self._matrix(together)]
        return [self._matrix(self._child(attention, name)) for name in ("q_proj", "k_proj", "v_proj")]

    def _rotary(self, index: int, attention: Module) -> RotaryTable | None:
        rotary = self._child(self._base, "rotary_emb", optional=True)
        is_left_out = self._config.model_type in _ROTATE_IN_WINDOWS and self._parameters[index].sliding_window is None
        if rotary is None or is_left_out or not getattr(attention, "use_rope", True):
            return None
        if "llama_4_scaling_beta" in (getattr(self._config, "rope_parameters", None) or {}):
            raise NotKnown("it scales queries by their positions")
        layer_type = None
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            layer_type = self._config.layer_types[index]
        if layer_type not in self._rotary_tables:
            positions = torch.arange(self._loaded.max_model_len)[None]
            tables = rotary(torch.zeros(1), positions, *([] if layer_type is None else [layer_type]))
            cosines, sines = (_of_pairs(table[0]) for table in tables)
            # Applying the family's `rotate_half` to 0, 1, 2, 3 shows whether neighbours are pairs.
            rotate_half = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
            is_interleaved = rotate_half is not None and rotate_half(torch.arange(4)).tolist() == [-1, 0, -3, 2]
            self._rotary_tables[layer_type] = RotaryTable(cosines, sines, is_interleaved)
        return self._rotary_tables[layer_type]

    def _mlp(self, mlp: Module) -> MLP:
        down = self._matrix(self._child(mlp, "down_proj", "c_proj", "fc2", "dense_4h_to_h"))
        activation = _activation(self._child(mlp, "act_fn", "activation_fn", "act"))
        if (together := self._child(mlp, "gate_up_proj", optional=True)) is not None:
            both = self._matrix(together)
            (gate, up), biases = both.weight.chunk(2), (None, None) if both.bias is None else both.bias.chunk(2)
            return MLP(Matrix(gate, biases[0]), Matrix(up, biases[1]), down, activation)
        gate_proj = self._child(mlp, "gate_proj", optional=True)
        up_proj = self._child(mlp, "up_proj", "c_fc", "fc1", "dense_h_to_4h")
        return MLP(None if gate_proj is None else self._matrix(gate_proj), self._matrix(up_proj), down, activation)

    def _norm_of(self, module: Module, *names: str) -> Norm | None:
        norm = self._child(module, *names, optional=True)
        return None if norm is None else self._norm(norm)

    def _norm(self, norm: Module) -> Norm:
        if isinstance(norm, torch.nn.LayerNorm) and norm.weight is not None:
            bias = None if norm.bias is None else self._parameter(norm, "bias").float()
            weight = self._parameter(norm, "weight").float()
            if type(norm).__name__ == "NemotronLayerNorm1P":  # stored minus 1
                weight = weight + 1
            return Norm(weight, bias, norm.eps, subtracts_mean=True)
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if "Norm" in type(norm).__name__ and isinstance(epsilon, float):
            weight = self._parameter(norm, "weight").float()
            # Some families store the weight minus 1, and some norms subtract the mean. The outputs show which it is.
            plain = Norm(weight, None, epsilon, subtracts_mean=False)
            x = torch.linspace(-1, 2, weight.shape[-1])
            outputs = norm(x.to(self._loaded.dtype)).float()
            kinds = (plain, replace(plain, weight=weight + 1), replace(plain, subtracts_mean=True))
            difference, kind = min((float((kind(x) - outputs).norm()), i) for i, kind in enumerate(kinds))
            if weight.dim() == 1 and difference <= 0.02 * float(outputs.norm()):
                return kinds[kind]
        raise NotKnown(f"it has norms of type {type(norm).__name__}")

    def _matrix(self, module: Module) -> Matrix:
        weight = self._weights(module)
        bias = None if getattr(module, "bias", None) is None else self._parameter(module, "bias")
        if type(module).__name__ == "Conv1D":  # GPT-2's linear layers, with their weights the other way round
            return Matrix(weight.T.contiguous(), bias)
        if not isinstance(module, torch.nn.Linear):
            raise NotKnown(f"it has matrices of type {type(module).__name__}")
        return Matrix(weight, bias)

    def _weights(self, module: Module) -> Tensor:
        weight = self._parameter(module, "weight")
        if weight.dtype != self._loaded.dtype:
            raise NotKnown(f"it has weights in {weight.dtype} beside those in {self._loaded.dtype}")
        return weight

    def _parameter(self, module: Module, name: str) -> Tensor:
        parameter = getattr(module, name, None)
        if not isinstance(parameter, Tensor):
            raise NotKnown(f"its {type(module).__name__} has no {name}")
        self._read.add(id(parameter))
        return parameter.detach()

    def _child(self, module: Module, *names: str, optional: bool = False) -> Any:
        for name in names:
            if (child := getattr(module, name, None)) is not None:
                return child
        if optional:
            return None
        raise NotKnown(f"its {type(module).__name__} has no {names[0]}")


def _fits(layer: Layer, width: int) -> bool:
    """Return whether the sizes of all weights fit together. Otherwise native code would read beyond their ends."""
    attention, mlp, inner = layer.attention, layer.mlp, len(layer.mlp.up.weight)
    shape = attention.shape
    norms = [
        *((norm, {width}) for norm in (layer.attention_norm, layer.attention_out_norm)),
        *((norm, {width}) for norm in (layer.mlp_norm, layer.mlp_out_norm)),
        (attention.query_norm, {shape.key_dim, attention.heads * shape.key_dim}),
        (attention.key_norm, {shape.key_dim, shape.kv_heads * shape.key_dim}),
    ]
    return (
        all(norm is None or len(norm.weight) in widths for norm, widths in norms)
        and all(matrix.weight.shape[1] == width for matrix in attention.qkv)
        and attention.out.weight.shape == (width, attention.heads * shape.value_dim)
        and all(matrix is None or matrix.weight.shape == (inner, width) for matrix in (mlp.gate, mlp.up))
        and mlp.down.weight.shape == (width, inner)
    )


def _by_kind(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows from query, key and value of each head to all queries, then all keys, then all values."""
    kinds: Tensor = rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return kinds


def _of_pairs(table: Tensor) -> Tensor:
    """Return a table [positions, dim / 2] from cosines or sines [positions, dim] that have each pair's value twice."""
    halves, neighbours = table.float().chunk(2, dim=1), table.float().unflatten(1, (-1, 2)).unbind(2)
    for first, second in (halves, neighbours):
        if torch.equal(first, second):
            return first.contiguous()
    raise NotKnown("its rotary embedding has other pairs than halves and neighbours")


def _activation(function: Any) -> str:
    """Return the name of the activation function, which its outputs show."""
    x = torch.linspace(-4, 4, 101)
    with torch.inference_mode():
        expected = function(x)
    for name, known in _ACTIVATIONS.items():
        if torch.allclose(known(x), expected, atol=1e-6):
            return name
    raise NotKnown(f"its activation is {type(function).__name__}")
