"""The description of a decoder: its layers as operations and weights, which the native step is built of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oaiserve.engine.model.cpu.blocks import Blocks
from oaiserve.engine.model.spec import KVShape


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
    weight: Tensor | Blocks  # [n, k], in the model's dtype or in the blocks of a file
    bias: Tensor | None  # [n]
    # The module of the model that it is a part of, by which adapters name it, and the first of that module's rows.
    module: str = ""
    first_row: int = 0
    heads: int = 0  # the module's rows are sorted by so many heads, each with query, key and value; 0: as they are here

    def rows_of(self, rows: Tensor) -> Tensor:
        """Return the rows of this matrix, given those of its module."""
        if self.heads:
            rows = by_kind(rows, self.heads)
        return rows[self.first_row : self.first_row + len(self.weight)]


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
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """Queries, and what stands for keys and values, made from short latent vectors (multi-head latent attention).

    Each head's key ends with numbers that all heads share, and only these are rotated, as are those of queries. All
    others, and the values, are made from a vector of the token, which is in the cache in place of them.
    """

    query_down: Matrix | None  # None: `query` multiplies the hidden state
    query_norm: Norm | None  # of what `query_down` gives
    query: Matrix
    down: Matrix  # its rows make the latent vector of keys and values, and then the shared numbers of keys
    norm: Norm  # of the latent vector
    up: Matrix  # of each head, its rows make the other numbers of the key, and then the value


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: list[Matrix] | LatentProjection  # one matrix, or three whose rows follow each other
    out: Matrix
    heads: int
    shape: KVShape
    query_norm: Norm | None  # as wide as one head, which it norms separately, or as all heads together
    key_norm: Norm | None
    rotary: RotaryTable | None  # None: this layer does not rotate queries and keys by position
    rotary_offset: int  # of the first number of each head that is rotated
    rotates_before_norms: bool  # of queries and keys
    sinks: Tensor | None  # float32 [heads], the score of a key more, whose value is 0
    parameters: AttentionParameters


@dataclass(frozen=True, slots=True)
class MLP:
    gate: Matrix | None
    up: Matrix
    down: Matrix
    activation: str  # a name in library.ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Router:
    """A router chooses the experts of each token, and gives each one a weight; src/experts.h computes it."""

    weight: Tensor  # [experts, width]
    logits_bias: Tensor | None  # float32 [experts]
    bias: Tensor | None  # float32 [experts], added to the scores for the choice alone
    top_k: int
    groups: int  # experts are chosen within the best groups
    top_groups: int
    is_sigmoid: bool  # else softmax
    adds_best_two: bool  # a group is as good as its two best experts together, else as the best one
    renormalizes: bool
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the weights float32 [tokens, experts] for x float32 [tokens, width], 0 for those not chosen."""
        logits = x @ self.weight.float().T
        if self.logits_bias is not None:
            logits = logits + self.logits_bias
        scores = logits.sigmoid() if self.is_sigmoid else logits.softmax(-1)
        worth = scores if self.bias is None else scores + self.bias
        by_group = worth.unflatten(-1, (self.groups, -1))
        best = by_group.topk(min(2, by_group.shape[-1]) if self.adds_best_two else 1).values.sum(-1)
        left_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.topk(self.top_groups).indices, False)
        worth = by_group.masked_fill(left_out[..., None], -torch.inf).flatten(-2)
        chosen = worth.topk(self.top_k).indices
        weights = scores.gather(-1, chosen)
        if self.renormalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return torch.zeros_like(scores).scatter(-1, chosen, weights * self.scale)


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The way in which experts of gpt-oss combine their gate and their up projection, in place of an activation."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


@dataclass(frozen=True, slots=True)
class Expert:
    """The matrices of a gated MLP, one of many in a layer."""

    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, whose matrices all have the same sizes."""

    router: Router
    experts: list[Expert]
    activation: str | ClampedGate  # a name in library.ACTIVATIONS, for activation(gate) * up
    shared: MLP | None  # an MLP that computes all tokens
    shared_gate: Matrix | None  # [1, width], whose product with a token decides how much of `shared` it gets


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm | None
    attention: Attention
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp: MLP | Experts
    mlp_out_norm: Norm | None
    is_parallel: bool  # the MLP reads the hidden state that attention reads, without what attention adds to it


@dataclass(frozen=True, slots=True)
class Decoder:
    embedding: Tensor | Blocks  # [vocab, width]
    embedding_scale: float
    position_embedding: Tensor | None  # [positions, width]
    layers: list[Layer]
    residual_scale: float  # the factor of a layer's additions to the hidden state
    final_norm: Norm
    head: Matrix
    logits_scale: float
    logits_softcap: float

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.mlp, Experts) for layer in self.layers)

    def adaptable(self) -> dict[str, tuple[int, int]]:
        """Return rows and columns of each linear layer that adapters may name, by the name of its module."""
        found: dict[str, tuple[int, int]] = {}
        for layer in self.layers:
            qkv = layer.attention.qkv if isinstance(layer.attention.qkv, list) else []
            mlp = layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp
            of_mlp = [] if mlp is None else [mlp.gate, mlp.up, mlp.down]
            of_mixture = [layer.mlp.shared_gate] if isinstance(layer.mlp, Experts) else []
            for matrix in (*qkv, layer.attention.out, *of_mlp, *of_mixture):
                if matrix is not None and matrix.module:
                    rows, columns = matrix.weight.shape
                    found[matrix.module] = (found.get(matrix.module, (0, 0))[0] + rows, columns)
        return found


def fits(layer: Layer, width: int) -> bool:
    """Return whether the sizes of all weights fit together. Otherwise native code would read beyond their ends."""
    attention, shape = layer.attention, layer.attention.shape
    norms = [
        *((norm, {width}) for norm in (layer.attention_norm, layer.attention_out_norm)),
        *((norm, {width}) for norm in (layer.mlp_norm, layer.mlp_out_norm)),
        (attention.query_norm, {shape.key_dim, attention.heads * shape.key_dim}),
        (attention.key_norm, {shape.key_dim, shape.kv_heads * shape.key_dim}),
    ]
    return (
        all(norm is None or len(norm.weight) in widths for norm, widths in norms)
        and _fits_projection(attention, width)
        and attention.out.weight.shape == (width, attention.heads * shape.value_dim)
        and (attention.sinks is None or len(attention.sinks) == attention.heads)
        and (attention.rotary is None or attention.rotary_offset + _rotated(attention.rotary) <= shape.key_dim)
        and (_fits_mlp(layer.mlp, width) if isinstance(layer.mlp, MLP) else _fits_experts(layer.mlp, width))
    )


def _fits_projection(attention: Attention, width: int) -> bool:
    qkv, shape = attention.qkv, attention.shape
    if isinstance(qkv, list):
        return all(matrix.weight.shape[1] == width for matrix in qkv)
    own, rank = attention.rotary_offset, len(qkv.norm.weight)
    query_rank = width if qkv.query_down is None else len(qkv.query_down.weight)
    return (
        attention.rotary is not None
        and own + _rotated(attention.rotary) == shape.key_dim
        and (qkv.query_down is None or qkv.query_down.weight.shape[1] == width)
        and (qkv.query_norm is None or len(qkv.query_norm.weight) == query_rank)
        and qkv.query.weight.shape == (attention.heads * shape.key_dim, query_rank)
        and qkv.down.weight.shape == (rank + shape.key_dim - own, width)
        and shape.latent_dim == len(qkv.down.weight)
        and qkv.up.weight.shape == (attention.heads * (own + shape.value_dim), rank)
    )


def _rotated(rotary: RotaryTable) -> int:
    """Return how many numbers of a head are rotated."""
    return 2 * rotary.cosines.shape[1]


def _fits_mlp(mlp: MLP, width: int) -> bool:
    inner = len(mlp.up.weight)
    return (
        all(matrix is None or matrix.weight.shape == (inner, width) for matrix in (mlp.gate, mlp.up))
        and mlp.down.weight.shape == (width, inner)
    )  # fmt: skip


def _fits_experts(experts: Experts, width: int) -> bool:
    router, number, inner = experts.router, len(experts.experts), len(experts.experts[0].up.weight)
    matrices = [(matrix, (inner, width)) for one in experts.experts for matrix in (one.gate, one.up)]
    matrices += [(one.down, (width, inner)) for one in experts.experts]
    return (
        all(matrix.weight.shape == shape for matrix, shape in matrices)
        and all(matrix.bias is None or len(matrix.bias) == shape[0] for matrix, shape in matrices)
        and router.weight.shape == (number, width)
        and all(bias is None or len(bias) == number for bias in (router.logits_bias, router.bias))
        and 0 < router.top_k <= number // router.groups * router.top_groups
        and number % router.groups == 0
        and (experts.shared is None or _fits_mlp(experts.shared, width))
        and (experts.shared_gate is None or experts.shared_gate.weight.shape == (1, width))
    )


def by_kind(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows from query, key and value of each head to all queries, then all keys, then all values."""
    kinds: Tensor = rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return kinds
