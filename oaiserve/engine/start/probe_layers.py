"""Small synthetic decoders with a layer of each kind, whose weights have outliers as trained ones have.

`probe.py` computes them in two ways. Sizes are the smallest at which kernels take the paths of large ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import FORMATS, IQ1_M, MXFP4, new_blocks
from oaiserve.engine.decoder.description import (
    MLP,
    Attention,
    AttentionParameters,
    ClampedGate,
    Convolution,
    Decoder,
    DeltaNet,
    Expert,
    Experts,
    LatentProjection,
    Layer,
    LowRank,
    Mamba2,
    Matrix,
    Norm,
    RotaryTable,
    Router,
    ShortConvolution,
)
from oaiserve.engine.decoder.spec import KVShape

POSITIONS = 64
VOCAB_SIZE = 64
_WIDTH = 256
_INNER = 256
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 64
_WINDOW = 4
_TAPS = 4
_RANK = 64  # rank of latent vectors
_SHARED = 32  # numbers of keys that all heads share
_OUTLIERS = 3  # columns of a matrix whose weights are larger
_OUTLIER_FACTOR = 8.0
# Where a block of each format has 16-bit numbers, in bytes. The other bytes of a block may have any value.
_FLOATS = {
    **dict.fromkeys((2, 6, 8, 16, 17, 18, 19, 20, 21, 22, 23, 1004, 1008), (0,)),
    **dict.fromkeys((3, 7, 12, 13), (0, 2)),
    10: (80, 82),
    11: (108,),
    14: (208,),
    34: (52,),
    35: (64,),
    IQ1_M: (),
    MXFP4: (),
}
_MXFP4_EXPONENT = 122


class ProbeLayers:
    """Makes the decoders for one dtype of weights, with the same numbers each time."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(0)
        self._bytes = np.random.default_rng(0)

    def decoders(self) -> Iterator[tuple[str, Decoder]]:
        """Yield the name and the decoder of each kind of layer."""
        plain = self._attention()
        dense = self._mlp("silu")
        yield "attention and an MLP", self._decoder(Layer(self._norm(), plain, None, None, self._norm(), dense))
        yield "attention with a window", self._decoder(self._windowed())
        yield "latent attention", self._decoder(Layer(self._norm(), self._latent(), None, None, self._norm(), dense))
        for kind, kind_of_block in FORMATS.items():
            if kind in _FLOATS:
                gate, up, down = (self._in_blocks(kind, _INNER, _WIDTH) for _ in range(3))
                layer = Layer(self._norm(), plain, mlp_norm=self._norm(), mlp=MLP(gate, up, down, "silu"))
                yield f"weights in {kind_of_block.name}", self._decoder(layer)
        for activation in ("silu", ClampedGate(1.702, 7.0)):
            mixture = self._experts(activation)
            yield "experts", self._decoder(Layer(self._norm(), plain, None, None, self._norm(), mixture))
        for mixer in (self._delta_net(), self._mamba2(), self._short_convolution(), self._fading_by_row()):
            yield type(mixer).__name__, self._decoder(Layer(self._norm(), None, mixer, None, self._norm(), dense))

    def _decoder(self, layer: Layer) -> Decoder:
        return Decoder(
            embedding=self._weights(VOCAB_SIZE, _WIDTH, scale=1.0),
            layers=[layer],
            final_norm=self._norm(),
            head=self._matrix(VOCAB_SIZE, _WIDTH),
        )

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _weights(self, n: int, k: int, scale: float | None = None) -> Tensor:
        weights = self._normal(n, k) * (k**-0.5 if scale is None else scale)
        weights[:, torch.randperm(k, generator=self._generator)[:_OUTLIERS]] *= _OUTLIER_FACTOR
        return weights.to(self._dtype)

    def _matrix(self, n: int, k: int, *, has_bias: bool = False) -> Matrix:
        return Matrix(self._weights(n, k), self._normal(n).to(self._dtype) if has_bias else None)

    def _in_blocks(self, kind: int, n: int, k: int) -> Matrix:
        """Return a matrix of random blocks whose scales make its numbers as large as those of other matrices."""
        blocks = new_blocks(kind, n, k)
        rows = blocks.data.reshape(-1, FORMATS[kind].num_bytes)
        rows[:] = self._bytes.integers(0, 256, rows.shape, np.uint8)
        if kind == MXFP4:  # Its scales are exponents.
            rows[:, 0] = _MXFP4_EXPONENT - self._bytes.integers(0, 4, len(rows))
        if kind == IQ1_M:  # Its scale is split over four places. These hold its first bits, which make it about 2^-7.
            rows[:, 53] &= 15
            rows[:, 55] = rows[:, 55] & 15 | 0x20
        scales = [rows[:, at : at + 2].view(np.float16) for at in _FLOATS[kind]]
        for scale in scales:
            scale[:] = self._bytes.uniform(-1, 1, scale.shape)
        factor = k**-0.5 / float(blocks.expand().std())
        for scale in scales:
            scale *= factor
        return Matrix(blocks, None)

    def _norm(self, width: int = _WIDTH) -> Norm:
        return Norm(1 + 0.3 * self._normal(width), None, 1e-6, subtracts_mean=False)

    def _rotary(self, pairs: int, *, is_interleaved: bool = False) -> RotaryTable:
        angles = torch.arange(POSITIONS)[:, None] * (100.0 ** -torch.linspace(0, 1, pairs))
        return RotaryTable(angles.cos(), angles.sin(), is_interleaved, pairs)

    def _attention(self) -> Attention:
        rows = (_HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM)
        return Attention(
            qkv=[self._matrix(n, _WIDTH, has_bias=True) for n in rows],
            out=self._matrix(_WIDTH, _HEADS * _HEAD_DIM),
            heads=_HEADS,
            shape=KVShape(_KV_HEADS, _HEAD_DIM, _HEAD_DIM),
            query_norm=self._norm(_HEAD_DIM),
            key_norm=self._norm(_HEAD_DIM),
            rotary=self._rotary(_HEAD_DIM // 2),
            parameters=AttentionParameters(_HEAD_DIM**-0.5, None, None),
        )

    def _windowed(self) -> Layer:
        """Return a layer of older kinds: norms that subtract the mean, a window, a softcap, sinks, and no gate."""
        parameters = AttentionParameters(_HEAD_DIM**-0.5, _WINDOW, 20.0)
        attention = replace(
            self._attention(),
            query_norm=None,
            key_norm=None,
            rotary=self._rotary(_HEAD_DIM // 4, is_interleaved=True),
            sinks=self._normal(_HEADS),
            parameters=parameters,
        )
        norm = Norm(1 + 0.3 * self._normal(_WIDTH), self._normal(_WIDTH), 1e-5, subtracts_mean=True)
        mlp = replace(self._mlp("gelu_tanh"), gate=None)
        return Layer(attention_norm=norm, attention=attention, mlp_norm=norm, mlp=mlp, is_parallel=True)

    def _latent(self) -> Attention:
        own = _HEAD_DIM - _SHARED
        projection = LatentProjection(
            query_down=None,
            query_norm=None,
            query=self._matrix(_HEADS * _HEAD_DIM, _WIDTH),
            down=self._matrix(_RANK + _SHARED, _WIDTH),
            norm=self._norm(_RANK),
            up=self._matrix(_HEADS * (own + _HEAD_DIM), _RANK),
        )
        return replace(
            self._attention(),
            qkv=projection,
            shape=KVShape(_HEADS, _HEAD_DIM, _HEAD_DIM, latent_dim=_RANK + _SHARED),
            query_norm=None,
            key_norm=None,
            rotary=self._rotary(_SHARED // 2),
            rotary_offset=own,
        )

    def _mlp(self, activation: str) -> MLP:
        return MLP(self._matrix(_INNER, _WIDTH), self._matrix(_INNER, _WIDTH), self._matrix(_WIDTH, _INNER), activation)

    def _experts(self, activation: str | ClampedGate) -> Experts:
        router = Router(
            weight=self._weights(4, _WIDTH),
            module="",
            logits_bias=None,
            bias=self._normal(4),
            top_k=2,
            groups=1,
            top_groups=1,
            renormalizes=True,
            scale=1.0,
            factors=None,
        )
        experts = []
        for _ in range(4):
            mlp = self._mlp("silu")
            assert mlp.gate is not None
            experts.append(Expert(mlp.gate, mlp.up, mlp.down))
        return Experts(router=router, experts=experts, activation=activation, shared=self._mlp("silu"))

    def _convolution(self, channels: int, activation: str = "silu") -> Convolution:
        return Convolution(0.5 * self._normal(_TAPS, channels), self._normal(channels), activation)

    def _delta_net(self) -> DeltaNet:
        heads = 2
        dim = 64
        keys = heads * dim
        values = 2 * heads * dim
        return DeltaNet(
            projections=[self._matrix(2 * keys + 2 * values, _WIDTH)],
            rates=[self._matrix(4 * heads, _WIDTH)],
            convolution=self._convolution(2 * keys + values),
            key_heads=heads,
            value_heads=2 * heads,
            key_dim=dim,
            value_dim=dim,
            speeds=-self._normal(2 * heads).exp(),
            biases=self._normal(2 * heads),
            norm=self._norm(dim),
            out=self._matrix(_WIDTH, values),
        )

    def _fading_by_row(self) -> DeltaNet:
        """Return a delta net whose decay differs for each row of the state, as in Kimi Linear."""
        net = self._delta_net()
        keys = net.key_heads * net.key_dim
        values = net.value_heads * net.value_dim
        decays = net.value_heads * net.key_dim
        return replace(
            net,
            projections=[self._matrix(2 * keys + values, _WIDTH)],
            gates=LowRank(self._matrix(_RANK, _WIDTH), self._matrix(values, _RANK)),
            has_sigmoid_gates=True,
            rates=[self._matrix(net.value_heads, _WIDTH)],
            decays=LowRank(self._matrix(_RANK, _WIDTH), self._matrix(decays, _RANK)),
            speeds=-self._normal(decays).exp(),
            biases=self._normal(decays),
        )

    def _mamba2(self) -> Mamba2:
        heads = 4
        dim = 64
        states = 64
        channels = heads * dim + 2 * states
        return Mamba2(
            projections=[self._matrix(channels + heads * dim + heads, _WIDTH)],
            convolution=self._convolution(channels),
            heads=heads,
            head_dim=dim,
            groups=1,
            state_dim=states,
            speeds=-self._normal(heads).exp(),
            biases=self._normal(heads),
            skips=self._normal(heads),
            least_time=0.0,
            most_time=float("inf"),
            norm=self._norm(heads * dim),
            out=self._matrix(_WIDTH, heads * dim),
        )

    def _short_convolution(self) -> ShortConvolution:
        return ShortConvolution(
            projections=[self._matrix(3 * _WIDTH, _WIDTH)],
            convolution=self._convolution(_WIDTH, "none"),
            out=self._matrix(_WIDTH, _WIDTH),
        )
