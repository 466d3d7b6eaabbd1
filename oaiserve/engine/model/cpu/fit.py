"""Checks whether the sizes of all weights of a description fit together."""

from __future__ import annotations

from oaiserve.engine.model.cpu.description import (
    MLP,
    Attention,
    Decoder,
    DeltaNet,
    Experts,
    InputGate,
    LatentProjection,
    Layer,
    LowRank,
    Mamba,
    Mamba2,
    Matrix,
    Mixer,
    RotaryTable,
)


def fit(decoder: Decoder) -> bool:
    """Compare the sizes of all weights. If they did not fit together, native code would read beyond their ends."""
    width = decoder.embedding.shape[1]
    inputs, gates = decoder.layer_inputs, [layer.input_gate for layer in decoder.layers]
    numbers = 0 if inputs is None else len(inputs.norm.weight)  # of a layer
    return (
        all(_fits(layer, width) for layer in decoder.layers)
        and (decoder.embedding_norm is None or len(decoder.embedding_norm.weight) == width)
        and all(gate is None or len(gate.gate.weight) == numbers for gate in gates)
        and (
            inputs is None
            or (
                inputs.table.shape[1] == len(gates) * numbers
                and inputs.projection.weight.shape == (len(gates) * numbers, width)
            )
        )
    )


def _fits(layer: Layer, width: int) -> bool:
    norms = [layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm]
    if isinstance(layer.mlp, Experts) and (own := layer.mlp.norms) is not None:
        norms += [own.router, own.experts, own.experts_out, own.shared_out]
    return (
        all(norm is None or len(norm.weight) == width for norm in norms)
        and (layer.attention is None or _fits_attention(layer.attention, width))
        and (layer.mixer is None or _fits_mixer(layer.mixer, width))
        and (layer.input_gate is None or _fits_gate(layer.input_gate, width))
        and (not isinstance(layer.mlp, MLP) or _fits_mlp(layer.mlp, width))
        and (not isinstance(layer.mlp, Experts) or _fits_experts(layer.mlp, width))
    )


def _fits_attention(attention: Attention, width: int) -> bool:
    shape, numbers = attention.shape, attention.heads * attention.shape.value_dim
    norms = [
        (attention.query_norm, {shape.key_dim, attention.heads * shape.key_dim}),
        (attention.key_norm, {shape.key_dim, shape.kv_heads * shape.key_dim}),
        (attention.value_norm, {shape.value_dim}),
    ]
    return (
        all(norm is None or len(norm.weight) in widths for norm, widths in norms)
        and _fits_projection(attention, width)
        and attention.out.weight.shape == (width, numbers)
        and (attention.factors is None or len(attention.factors) == _num_rows(attention.qkv))
        and (attention.gate is None or attention.gate.weight.shape == (numbers, width))
        and all(own is None or len(own) == attention.heads for own in (attention.sinks, attention.parameters.slopes))
        and (not attention.values_of_keys or shape.value_dim == shape.key_dim)
        and (attention.rotary is None or attention.rotary_offset + _rotated(attention.rotary) <= shape.key_dim)
    )


def _num_rows(qkv: list[Matrix] | LatentProjection) -> int:
    return sum(len(matrix.weight) for matrix in qkv) if isinstance(qkv, list) else 0


def _fits_mixer(mixer: Mixer, width: int) -> bool:
    rows = sum(len(matrix.weight) for matrix in mixer.projections)
    numbers = mixer.out.weight.shape[1]
    if isinstance(mixer, DeltaNet):
        fits = _fits_delta_net(mixer, width, rows, numbers)
        channels = 2 * mixer.key_heads * mixer.key_dim + numbers
    elif isinstance(mixer, Mamba2):
        fits, channels = _fits_mamba2(mixer, rows, numbers), rows - numbers - mixer.heads
    elif isinstance(mixer, Mamba):
        fits, channels = _fits_mamba(mixer, rows, numbers), numbers
    else:
        fits, channels = rows == 3 * numbers, numbers
    weight, bias = mixer.convolution.weight, mixer.convolution.bias
    return (
        fits
        and all(matrix.weight.shape[1] == width for matrix in mixer.projections)
        and mixer.out.weight.shape == (width, numbers)
        and weight.shape[1] == channels
        and (bias is None or len(bias) == channels)
    )


def _fits_delta_net(net: DeltaNet, width: int, rows: int, numbers: int) -> bool:
    decays = net.value_heads * (1 if net.decays is None else net.key_dim)
    rates = net.value_heads + (decays if net.decays is None else 0)
    gated = numbers if net.gates is None else 0
    return (
        numbers == net.value_heads * net.value_dim
        and rows == 2 * net.key_heads * net.key_dim + numbers + gated
        and all(matrix.weight.shape[1] == width for matrix in net.rates)
        and sum(len(matrix.weight) for matrix in net.rates) == rates
        and (net.gates is None or _fits_low_rank(net.gates, numbers, width))
        and (net.decays is None or _fits_low_rank(net.decays, decays, width))
        and net.value_heads % net.key_heads == 0
        and len(net.speeds) == len(net.biases) == decays
        and len(net.norm.weight) == net.value_dim
    )


def _fits_low_rank(product: LowRank, rows: int, width: int) -> bool:
    rank = len(product.down.weight)
    return product.down.weight.shape == (rank, width) and product.up.weight.shape == (rows, rank)


def _fits_mamba2(mixer: Mamba2, rows: int, numbers: int) -> bool:
    return (
        numbers == mixer.heads * mixer.head_dim
        and rows == 2 * numbers + 2 * mixer.groups * mixer.state_dim + mixer.heads
        and mixer.heads % mixer.groups == 0
        and len(mixer.speeds) == len(mixer.biases) == len(mixer.skips) == mixer.heads
        and (mixer.norm is None or len(mixer.norm.weight) == numbers)
        and (mixer.factors is None or len(mixer.factors) == rows)
    )


def _fits_mamba(mixer: Mamba, rows: int, numbers: int) -> bool:
    dim, rank = mixer.speeds.shape[1], mixer.times.weight.shape[1]
    norms = [(mixer.time_norm, rank), (mixer.b_norm, dim), (mixer.c_norm, dim)]
    return (
        rows == 2 * numbers
        and mixer.vectors.weight.shape == (rank + 2 * dim, numbers)
        and len(mixer.times.weight) == len(mixer.speeds) == len(mixer.skips) == numbers
        and all(norm is None or len(norm.weight) == width for norm, width in norms)
    )


def _fits_projection(attention: Attention, width: int) -> bool:
    qkv, shape = attention.qkv, attention.shape
    if isinstance(qkv, list):
        return all(matrix.weight.shape[1] == width for matrix in qkv)
    own, rank = attention.rotary_offset, len(qkv.norm.weight)
    query_rank = width if qkv.query_down is None else len(qkv.query_down.weight)
    return (
        own < shape.key_dim
        and (attention.rotary is None or own + _rotated(attention.rotary) == shape.key_dim)
        and (qkv.query_down is None or qkv.query_down.weight.shape[1] == width)
        and (qkv.query_norm is None or len(qkv.query_norm.weight) == query_rank)
        and qkv.query.weight.shape == (attention.heads * shape.key_dim, query_rank)
        and qkv.down.weight.shape == (rank + shape.key_dim - own, width)
        and shape.latent_dim == len(qkv.down.weight)
        and qkv.up.weight.shape == (attention.heads * (own + shape.value_dim), rank)
    )


def _rotated(rotary: RotaryTable) -> int:
    """Return the number of rotated elements of a head."""
    pairs = rotary.cosines.shape[1]
    return 2 * pairs if rotary.is_interleaved else rotary.apart + pairs


def _fits_gate(gate: InputGate, width: int) -> bool:
    own = len(gate.gate.weight)
    return (
        gate.gate.weight.shape[1] == width
        and gate.projection.weight.shape == (width, own)
        and len(gate.norm.weight) == width
    )


def _fits_mlp(mlp: MLP, width: int) -> bool:
    inner = len(mlp.up.weight)
    return (
        all(matrix is None or matrix.weight.shape == (inner, width) for matrix in (mlp.gate, mlp.up))
        and mlp.down.weight.shape == (width, inner)
    )  # fmt: skip


def _fits_experts(experts: Experts, width: int) -> bool:
    router, number, inner, own = experts.router, len(experts.experts), len(experts.experts[0].up.weight), width
    fits = True
    if (projections := experts.projections) is not None:
        own = len(projections.before.weight)
        fits = projections.before.weight.shape == (own, width) and projections.behind.weight.shape == (width, own)
    ups = [matrix for one in experts.experts for matrix in (one.gate, one.up) if matrix is not None]
    matrices = [*((matrix, (inner, own)) for matrix in ups), *((one.down, (own, inner)) for one in experts.experts)]
    return (
        fits
        and len({one.gate is None for one in experts.experts}) == 1
        and all(matrix.weight.shape == shape for matrix, shape in matrices)
        and all(matrix.bias is None or len(matrix.bias) == shape[0] for matrix, shape in matrices)
        and router.weight.shape == (number, width)
        and all(own is None or len(own) == number for own in (router.logits_bias, router.bias, router.factors))
        and 0 < router.top_k <= number // router.groups * router.top_groups
        and number % router.groups == 0
        and (experts.shared is None or _fits_mlp(experts.shared, width))
        and (experts.shared_gate is None or experts.shared_gate.weight.shape == (1, width))
    )
