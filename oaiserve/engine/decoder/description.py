"""The description of a decoder: its layers as operations and weights, from which executors are built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.spec import KVShape


class NotKnown(Exception):
    """The model has a component without a native operation. The message names the component."""


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor  # float32 [width]
    bias: Tensor | None
    epsilon: float
    subtracts_mean: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of rows, float32."""
        if self.subtracts_mean:
            return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
        x = torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        if self.bias is None:
            return x
        return x + self.bias


@dataclass(frozen=True, slots=True)
class Matrix:
    weight: Tensor | Blocks  # [n, k], in the model's dtype or in the blocks of a file
    bias: Tensor | None  # [n]
    # For adapters: the name of the module that this matrix belongs to, and the first of its rows in that module.
    module: str = ""
    first_row: int = 0
    # The module's rows are grouped by this many heads, each with queries, key and value. 0: sorted as in this matrix.
    heads: int = 0
    parts: int = 3

    def picked(self, rows: Tensor | slice) -> Matrix:
        """Return a matrix of only these rows, given as a slice or int64 [m]. Adapters don't apply to it."""
        bias = None if self.bias is None else self.bias[rows]
        if isinstance(self.weight, Blocks):
            return Matrix(self.weight[rows.numpy() if isinstance(rows, Tensor) else rows], bias)
        return Matrix(self.weight[rows], bias)

    def rows_of(self, rows: Tensor) -> Tensor:
        """Return the rows of this matrix, given the rows of its module."""
        if self.heads:
            rows = by_kind(rows, self.heads, self.parts)
        return rows[self.first_row : self.first_row + len(self.weight)]


@dataclass(frozen=True, slots=True)
class LowRank:
    """A low-rank product: two matrices in sequence, with a narrow vector between them."""

    down: Matrix
    up: Matrix


@dataclass(frozen=True, slots=True)
class HeadRows:
    """A range of rows per head. Latent attention multiplies each head's vector by that head's rows of the matrix."""

    matrix: Matrix  # its rows are sorted by head
    heads: int
    first: int  # first row of a head
    count: int
    is_transposed: bool  # the head's vector multiplies the rows instead of the columns

    @property
    def module(self) -> str:
        return self.matrix.module


@dataclass(frozen=True, slots=True)
class RotaryTable:
    cosines: Tensor  # float32 [positions, pairs]
    sines: Tensor
    is_interleaved: bool  # pairs are neighbours; False: number i is paired with number i + apart
    apart: int
    # int32 [pairs]: which coordinate (time, height or width) rotates each pair. None: a token has only one position.
    axes: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    scaling: float
    sliding_window: int | None
    softcap: float | None
    looks_ahead: bool = True  # tokens of an image see later tokens of the image
    chunk: int | None = None  # tokens per chunk; a token sees only the tokens of its chunk


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """Queries, and a latent vector instead of keys and values (multi-head latent attention).

    Each head's key ends with numbers shared by all heads, and only these are rotated, like the corresponding numbers of
    the query. All other numbers, and the values, are computed from a latent vector of the token; the cache stores this
    vector instead of them.
    """

    query_down: Matrix | None  # None: `query` multiplies the hidden state
    query_norm: Norm | None  # norm of the output of `query_down`
    query: Matrix
    down: Matrix  # rows: first the latent vector, then the part of keys that all heads share
    norm: Norm  # norm of the latent vector
    up: Matrix  # for each head: rows of the unrotated part of the key, then rows of the value


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    qkv: list[Matrix] | LatentProjection  # matrices, in the order of their outputs
    cache_of: int | None = None  # index of the layer whose keys and values it reads; None: its own
    values_of_keys: bool = False  # values are the keys before norm and rotation, without separate rows
    gate: Matrix | None = None  # [numbers that `out` reads, width]; the sigmoid of its product multiplies these numbers
    out: Matrix
    heads: int
    shape: KVShape
    query_norm: Norm | None = None  # width: one head, normed separately, or all heads together
    key_norm: Norm | None = None
    value_norm: Norm | None = None  # width: one head
    rotary: RotaryTable | None = None  # None: this layer does not rotate queries and keys by position
    rotary_offset: int = 0  # first number of each head that is rotated
    rotates_before_norms: bool = False  # queries and keys are rotated before their norms
    query_factors: Tensor | None = None  # float32 [positions], multiply the queries
    sinks: Tensor | None = None  # float32 [heads], score of an additional key whose value is 0
    parameters: AttentionParameters
    key_sizes: Tensor | None = None  # float32 [kv_heads, key_dim], see key_sizes.py; None: all are 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return how many numbers of queries, keys and values `qkv` computes per token."""
        shape = self.shape
        has_keys = self.cache_of is None
        num_keys = shape.kv_heads * shape.key_dim if has_keys else 0
        num_values = shape.kv_heads * shape.value_dim if has_keys and not self.values_of_keys else 0
        return self.heads * shape.key_dim, num_keys, num_values


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal convolution of each channel. Its last inputs are part of the layer's state."""

    weight: Tensor  # float32 [taps, channels], from the oldest input to the newest
    bias: Tensor | None  # float32 [channels]
    activation: str  # a name in library.ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """A gated delta net, as src/delta.h computes it. The channels of its convolution are queries, keys and values."""

    # Rows, in this order: queries and keys of all key heads, values of all value heads, and the gates of these values.
    projections: list[Matrix]
    gates: LowRank | None = None  # computes the gates of values if the projections don't
    has_sigmoid_gates: bool = False  # False: their activation is silu
    rates: list[Matrix]  # for each value head: its learning rate, then the input of its decay
    rate_factor: float = 1.0
    decays: LowRank | None = None  # computes a decay for each row of a state; None: one decay per head
    convolution: Convolution
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    speeds: Tensor  # float32 [decays], speed of each decay
    biases: Tensor  # float32 [decays], added to the input of each decay
    norm: Norm  # width: one value head
    out: Matrix


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A Mamba 2 mixer, as src/mamba.h computes it. The channels of its convolution are x, B and C."""

    # Rows, in this order: x of all heads, B and C of all groups, gates of x, and inputs of the time steps.
    projections: list[Matrix]
    convolution: Convolution
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    speeds: Tensor  # float32 [heads], speed of each decay
    biases: Tensor  # float32 [heads], added to the inputs of the time steps
    skips: Tensor  # float32 [heads]
    least_time: float
    most_time: float
    # Width: heads * head_dim. Applied to each group separately, after the gates; None: no norm.
    norm: Norm | None
    out: Matrix


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A short convolution whose inputs and outputs are gated, as in LFM2."""

    projections: list[Matrix]  # rows, in this order: inputs, their gates, gates of the outputs
    convolution: Convolution
    out: Matrix


# A layer's mixer, next to or instead of attention. States are in the order of the layers that have a mixer.
Mixer = DeltaNet | Mamba2 | ShortConvolution


@dataclass(frozen=True, slots=True)
class MLP:
    gate: Matrix | None
    up: Matrix
    down: Matrix
    activation: str  # a name in library.ACTIVATIONS
    # The mean of a token's gates plus this many standard deviations is subtracted from them; negative ones become 0.
    cutoff: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Chooses the experts of each token and weights them; src/experts.h computes it."""

    weight: Tensor  # [experts, width]
    module: str  # name of the module for adapters; "": adapters can't name it
    logits_bias: Tensor | None  # float32 [experts]
    bias: Tensor | None  # float32 [experts], added to the scores only to choose experts
    top_k: int
    groups: int  # experts are chosen within the best groups
    top_groups: int
    is_sigmoid: bool = False  # False: softmax
    adds_best_two: bool = False  # whether a group's score is the sum of its two best experts' scores, or the best one
    renormalizes: bool = False
    scale: float
    factors: Tensor | None  # float32 [experts], factor of an expert's weight

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.weight, self.logits_bias, self.module)

    def weights(self, logits: Tensor) -> Tensor:
        """Return the weights float32 [tokens, experts] for the logits of all experts. Experts not chosen have 0."""
        chosen, weights = self.choose(logits)
        return torch.zeros_like(logits).scatter(-1, chosen, weights)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts int64 [tokens, top_k] and their weights float32, from the logits of all experts."""
        scores = logits.sigmoid() if self.is_sigmoid else logits.softmax(-1)
        worth = scores if self.bias is None else scores + self.bias
        if self.top_groups < self.groups:
            by_group = worth.unflatten(-1, (self.groups, -1))
            best = by_group.topk(min(2, by_group.shape[-1]) if self.adds_best_two else 1).values.sum(-1)
            left_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.topk(self.top_groups).indices, False)
            worth = by_group.masked_fill(left_out[..., None], -torch.inf).flatten(-2)
        chosen = worth.topk(self.top_k).indices
        weights = scores.gather(-1, chosen)
        if self.renormalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.factors is not None:
            weights = weights * self.factors[chosen]
        return chosen, weights if self.scale == 1.0 else weights * self.scale


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """How gpt-oss' experts combine the gate and up projections. Used instead of an activation."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


@dataclass(frozen=True, slots=True)
class Expert:
    gate: Matrix | None
    up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class MixtureNorms:
    """The norms of a mixture whose router, experts and shared MLP each have norms of their own."""

    router: Norm
    experts: Norm
    experts_out: Norm
    shared_out: Norm  # norm after `shared`, which reads the MLP's norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts whose matrices all have the same sizes."""

    router: Router
    experts: list[Expert]
    activation: (
        str | ClampedGate
    )  # a name in library.ACTIVATIONS, for activation(gate) * up, or activation(up) without gates
    shared: MLP | None  # an MLP that is applied to every token
    shared_gate: Matrix | None = None  # [1, width]; its product with a token is the gate of `shared`
    norms: MixtureNorms | None = None  # None: all parts read the output of the norm before the MLP
    scales_inputs: bool = False  # An expert's weight multiplies its input instead of its output.


@dataclass(frozen=True, slots=True)
class InputGate:
    """Adds norm(projection(inputs * activation(gate(hidden state)))), where the inputs are the layer's own."""

    gate: Matrix  # [inputs of a layer, width]
    activation: str  # a name in library.ACTIVATIONS
    projection: Matrix  # [width, inputs of a layer]
    norm: Norm


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A token's inputs of each layer, in addition to its embedding: (norm(projection(embedding)) + table) * scale."""

    table: Tensor | Blocks  # [vocab, layers * inputs of a layer]; tokens beyond its last row use the first one
    table_scale: float
    projection: Matrix  # [layers * inputs of a layer, width]
    norm: Norm  # norm of one layer's inputs
    scale: float


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The ends of a decoder with several hidden states per token (alternating updates, Baykal et al. 2023).

    The first state begins as the embedding, the others as projections of it, scaled to its magnitude. After the last
    layer, the others are projected again and scaled likewise, and the final norm reads the mean of all states.
    """

    projections: list[Matrix]  # projections of the embedding, for all states but the first
    unprojections: list[Matrix]  # one for each state but the first
    active: int  # index of the state that layers read


@dataclass(frozen=True, slots=True)
class AltUp:
    """How a layer predicts all hidden states, and corrects them by the error of the active state's prediction.

    Two matrices turn tanh(router(norm(hidden state))) into the coefficients of predictions and of corrections.
    """

    norm: Norm
    router: Matrix  # [states, width]
    predictions: Matrix  # [states * states, states]
    corrections: Matrix  # [states, states]
    scale: Tensor | None  # float32 [width], multiplies the active state before the gate of the layer's inputs reads it


@dataclass(frozen=True, slots=True)
class Laurel:
    """A low-rank path in parallel with attention (learned augmented residual layer, Menghani et al. 2024).

    After attention, the hidden state becomes (hidden state + x + norm(product(x))) / sqrt(2). x is attention's input.
    """

    product: LowRank
    norm: Norm


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors for the outputs that a layer adds to the hidden state. The decoder's factors apply in addition."""

    mixer: float = 1.0
    attention: float = 1.0
    mlp: float = 1.0


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm | None = None  # before attention, or before the mixer
    attention: Attention | None = None
    mixer: Mixer | None = None
    attention_out_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp: MLP | Experts | None = None
    mlp_out_norm: Norm | None = None
    is_parallel: bool = False  # The MLP reads the same hidden state as attention does.
    input_gate: InputGate | None = None  # applied last
    factor: float = 1.0  # factor of the hidden state after the layer
    scales: Scales | None = None  # None: every scale is 1
    laurel: Laurel | None = None
    altup: AltUp | None = None  # set in every layer, if the decoder has several hidden states


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    embedding: Tensor | Blocks  # [vocab, width]
    embedding_scale: float = 1.0
    position_embedding: Tensor | None = None  # [positions, width]
    layer_inputs: LayerInputs | None = None
    layers: list[Layer]
    residual_scale: float = 1.0  # the factor of a layer's additions to the hidden state
    final_norm: Norm
    head: Matrix
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    # For vectors that replace embeddings: their factor, and the token id used for these tokens' per-layer inputs.
    vector_scale: float = 1.0
    padding_id: int = 0
    num_deep: int = 0  # how many of the first layers have vectors of an image added to their outputs
    hidden_states: HiddenStates | None = None  # None: each token has one hidden state

    def adaptable(self) -> dict[str, tuple[int, int]]:
        """Return the rows and columns of each linear layer that adapters may change, by the name of its module."""
        sizes: dict[str, tuple[int, int]] = {}
        routers = [layer.mlp.router.matrix for layer in self.layers if isinstance(layer.mlp, Experts)]
        parts = [self.layer_inputs, [replace(layer, mixer=None) for layer in self.layers], routers]
        for matrix in matrices_in(parts):
            if matrix.module:
                rows, columns = matrix.weight.shape
                sizes[matrix.module] = (sizes.get(matrix.module, (0, 0))[0] + rows, columns)
        return sizes


def matrices_in(part: object) -> Iterator[Matrix]:
    if isinstance(part, Matrix):
        yield part
    elif isinstance(part, list):
        for one in part:
            yield from matrices_in(one)
    elif is_dataclass(part):
        for field in fields(part):
            yield from matrices_in(getattr(part, field.name))


def by_kind(rows: Tensor, heads: int, parts: int) -> Tensor:
    """Reorder rows that are grouped by key head into all queries, then all keys, then all values."""
    of_heads = rows.unflatten(0, (heads, parts, -1))
    return torch.cat([kind.flatten(0, 2) for kind in of_heads.split([parts - 2, 1, 1], dim=1)])
