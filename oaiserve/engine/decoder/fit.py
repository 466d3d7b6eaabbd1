"""Checks whether the sizes of all weights of a description fit together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from oaiserve.engine.decoder.description import (
    MLP,
    AltUp,
    Attention,
    Decoder,
    DeltaNet,
    Experts,
    LatentProjection,
    Layer,
    LowRank,
    Mamba2,
    Matrix,
    Mixer,
    Norm,
)

Sizes = Iterator[tuple[object, object]]  # pairs of a weight's size and the size that it must have


def fit(decoder: Decoder) -> bool:
    """Compare the sizes of all weights. With wrong sizes, native code would read past their ends."""
    return all(size == wanted for size, wanted in _decoder(decoder))


def _lengths(length: int, *vectors: Norm | Tensor | None) -> Sizes:
    for vector in vectors:
        if isinstance(vector, Norm):
            yield from _lengths(length, vector.weight, vector.bias)
        elif vector is not None:
            yield vector.shape, (length,)


def _shapes(rows: int, columns: int, *matrices: Matrix | None) -> Sizes:
    for matrix in matrices:
        if matrix is not None:
            yield matrix.weight.shape, (rows, columns)
            yield from _lengths(rows, matrix.bias)


def _columns(columns: int, *matrices: Matrix) -> Sizes:
    for matrix in matrices:
        yield from _shapes(matrix.weight.shape[0], columns, matrix)


def _num_rows(matrices: list[Matrix]) -> int:
    return sum(len(matrix.weight) for matrix in matrices)


def _decoder(decoder: Decoder) -> Sizes:
    width = decoder.embedding.shape[1]
    inputs = decoder.layer_inputs
    numbers = 0
    if inputs is not None:
        numbers = len(inputs.norm.weight)  # inputs of a layer
        yield inputs.table.shape[1], len(decoder.layers) * numbers
        yield from _shapes(len(decoder.layers) * numbers, width, inputs.projection)
    if decoder.position_embedding is not None:
        yield decoder.position_embedding.shape[1], width
    yield from _lengths(width, decoder.final_norm)
    yield from _columns(width, decoder.head)
    yield decoder.head.weight.shape[0] <= decoder.embedding.shape[0], True
    if (states := decoder.hidden_states) is not None:
        number = 1 + len(states.projections)
        yield 0 <= states.active < number, True
        yield len(states.unprojections), number - 1
        yield from _shapes(width, width, *states.projections, *states.unprojections)
    for layer in decoder.layers:
        yield layer.altup is None, states is None
        if layer.altup is not None:
            yield from _altup(layer.altup, len(states.projections) + 1 if states is not None else 1, width)
        yield from _layer(layer, width, numbers)


def _layer(layer: Layer, width: int, numbers: int) -> Sizes:
    yield from _lengths(width, layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm)
    if layer.attention is not None:
        yield from _attention(layer.attention, width)
    if layer.mixer is not None:
        yield from _mixer(layer.mixer, width)
    if isinstance(layer.mlp, MLP):
        yield from _mlp(layer.mlp, width)
    elif layer.mlp is not None:
        yield from _experts(layer.mlp, width)
    if (laurel := layer.laurel) is not None:
        yield from _low_rank(width, width, laurel.product)
        yield from _lengths(width, laurel.norm)
    if (gate := layer.input_gate) is not None:
        yield from _shapes(numbers, width, gate.gate)
        yield from _shapes(width, numbers, gate.projection)
        yield from _lengths(width, gate.norm)


def _altup(altup: AltUp, states: int, width: int) -> Sizes:
    yield from _shapes(states, width, altup.router)
    yield from _shapes(states * states, states, altup.predictions)
    yield from _shapes(states, states, altup.corrections)
    yield from _lengths(width, altup.norm, altup.scale)


def _attention(attention: Attention, width: int) -> Sizes:
    heads = attention.heads
    shape = attention.shape
    qkv = attention.qkv
    rotary = attention.rotary
    for norm, of_norm in ((attention.query_norm, heads), (attention.key_norm, shape.kv_heads)):
        if norm is not None:
            yield len(norm.weight) in (shape.key_dim, of_norm * shape.key_dim), True
            yield from _lengths(len(norm.weight), norm)
    yield from _lengths(shape.value_dim, attention.value_norm)
    yield from _shapes(width, heads * shape.value_dim, attention.out)
    yield from _shapes(heads * shape.value_dim, width, attention.gate)
    yield from _lengths(heads, attention.sinks)
    if attention.key_sizes is not None:
        yield attention.key_sizes.shape, (shape.kv_heads, shape.key_dim)
    if attention.values_of_keys:
        yield shape.value_dim, shape.key_dim
    rotated = 0  # rotated numbers of a head
    if rotary is not None:
        pairs = rotary.cosines.shape[1]
        rotated = 2 * pairs if rotary.is_interleaved else rotary.apart + pairs
        yield attention.rotary_offset + rotated <= shape.key_dim, True
    if isinstance(qkv, list):
        yield from _columns(width, *qkv)
    else:
        yield from _latent(qkv, attention, width, rotated)


def _latent(qkv: LatentProjection, attention: Attention, width: int, rotated: int) -> Sizes:
    heads = attention.heads
    shape = attention.shape
    own = attention.rotary_offset
    rank = len(qkv.norm.weight)
    query_rank = width if qkv.query_down is None else len(qkv.query_down.weight)
    yield own < shape.key_dim, True
    if attention.rotary is not None:
        yield own + rotated, shape.key_dim
    yield from _shapes(query_rank, width, qkv.query_down)
    yield from _lengths(query_rank, qkv.query_norm)
    yield from _shapes(heads * shape.key_dim, query_rank, qkv.query)
    yield from _shapes(rank + shape.key_dim - own, width, qkv.down)
    yield shape.latent_dim, len(qkv.down.weight)
    yield from _shapes(heads * (own + shape.value_dim), rank, qkv.up)


def _mixer(mixer: Mixer, width: int) -> Sizes:
    rows = _num_rows(mixer.projections)
    numbers = mixer.out.weight.shape[1]
    channels = numbers
    if isinstance(mixer, DeltaNet):
        yield from _delta_net(mixer, width, rows, numbers)
        channels += 2 * mixer.key_heads * mixer.key_dim
    elif isinstance(mixer, Mamba2):
        channels += 2 * mixer.groups * mixer.state_dim
        yield numbers, mixer.heads * mixer.head_dim
        yield rows, numbers + channels + mixer.heads
        yield mixer.heads % mixer.groups, 0
        yield from _lengths(mixer.heads, mixer.speeds, mixer.biases, mixer.skips)
        yield from _lengths(numbers, mixer.norm)
    else:
        yield rows, 3 * numbers
    yield from _columns(width, *mixer.projections)
    yield from _shapes(width, numbers, mixer.out)
    yield mixer.convolution.weight.shape[1], channels
    yield from _lengths(channels, mixer.convolution.bias)


def _delta_net(net: DeltaNet, width: int, rows: int, numbers: int) -> Sizes:
    decays = net.value_heads * (1 if net.decays is None else net.key_dim)
    yield numbers, net.value_heads * net.value_dim
    yield rows, 2 * net.key_heads * net.key_dim + numbers + (numbers if net.gates is None else 0)
    yield from _columns(width, *net.rates)
    yield _num_rows(net.rates), net.value_heads + (decays if net.decays is None else 0)
    yield from _low_rank(numbers, width, net.gates)
    yield from _low_rank(decays, width, net.decays)
    yield net.value_heads % net.key_heads, 0
    yield from _lengths(decays, net.speeds, net.biases)
    yield from _lengths(net.value_dim, net.norm)


def _low_rank(rows: int, columns: int, product: LowRank | None) -> Sizes:
    if product is not None:
        rank = len(product.down.weight)
        yield from _shapes(rank, columns, product.down)
        yield from _shapes(rows, rank, product.up)


def _mlp(mlp: MLP, width: int) -> Sizes:
    inner = len(mlp.up.weight)
    yield from _shapes(inner, width, mlp.gate, mlp.up)
    yield from _shapes(width, inner, mlp.down)


def _experts(experts: Experts, width: int) -> Sizes:
    router = experts.router
    number = len(experts.experts)
    inner = len(experts.experts[0].up.weight)
    if (norms := experts.norms) is not None:
        yield from _lengths(width, norms.router, norms.experts, norms.experts_out, norms.shared_out)
    for one in experts.experts:
        yield from _shapes(inner, width, one.gate, one.up)
        yield from _shapes(width, inner, one.down)
    yield router.weight.shape, (number, width)
    yield from _lengths(number, router.logits_bias, router.bias, router.factors)
    yield 0 < router.top_k <= number // router.groups * router.top_groups, True
    yield number % router.groups, 0
    yield 0 < router.top_groups <= router.groups, True
    if experts.shared is not None:
        yield from _mlp(experts.shared, width)
    yield from _shapes(1, width, experts.shared_gate)
