"""Native steps of decoders that have one layer of attention and nothing else, and what the layer must compute."""

from typing import NamedTuple

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import Attention, AttentionParameters, Decoder, Matrix, Norm
from oaiserve.engine.decoder.description import Layer as DecoderLayer
from oaiserve.engine.decoder.spec import KVShape
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.model.attention import LayerCache, Scoring, StepAttention
from oaiserve.engine.model.batch import Batch, BatchMedia
from tests.engine.model.steps import BLOCK_SIZE

NUM_BLOCKS = 48
_OUTPUTS = 64
_SCALING = 0.2
_OUTLIER_FACTOR = 32.0
_INFINITE = 2.0**127  # times the number of such a column


class Layer(NamedTuple):
    heads: int
    shape: KVShape
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def sinks(self) -> Tensor | None:
        return torch.linspace(0.06, 6.0, self.heads) if self.has_sinks else None


class QKV(NamedTuple):
    query: Tensor  # [T, heads, key_dim]
    key: Tensor  # [T, kv_heads, key_dim]
    value: Tensor  # [T, kv_heads, value_dim]


class NativeLayer:
    """The native step of one layer. Its logits are those of the attention alone, up to the last norm.

    Each number of queries, keys and values is a number of the token's vector times a power of two, so it has no
    rounding. Some numbers of all keys are 32 times as large as the others, as in some families.
    """

    def __init__(
        self, layer: Layer, dtype: torch.dtype, num_threads: int = 2, *, norm_of_heads: Norm | None = None
    ) -> None:
        """Make the step. What has not been written into its cache is NaN.

        `norm_of_heads` is of all queries, keys and values; `qkv` returns their numbers before it.
        """
        self.layer = layer
        self.dtype = dtype
        heads = layer.heads
        shape = layer.shape
        self._num_keys = shape.kv_heads * shape.key_dim
        self.num_inputs = self._num_keys + shape.kv_heads * shape.value_dim
        # For each of queries, keys and values, one more column makes all of its numbers infinite.
        self.width = self.num_inputs + 16 + _OUTPUTS
        generator = torch.Generator().manual_seed(0)
        own = torch.arange(self.num_inputs)
        picked = torch.randint(self.num_inputs, (heads * shape.key_dim,), generator=generator)
        factors = torch.ones(shape.key_dim)
        factors[3::48] = _OUTLIER_FACTOR
        self._qkv = [
            self._picks(0, picked, 1 / factors.repeat(heads)),
            self._picks(1, own[: self._num_keys], factors.repeat(shape.kv_heads)),
            self._picks(2, own[self._num_keys :], torch.ones(shape.kv_heads * shape.value_dim)),
        ]
        columns = heads * shape.value_dim
        out = torch.zeros(self.width, columns)
        out[-_OUTPUTS:] = torch.randn(_OUTPUTS, columns, generator=generator) * columns**-0.5
        self._out = out.to(torch.bfloat16).to(dtype)
        self._norm = Norm(torch.ones(self.width), None, 1e-6, subtracts_mean=False)
        sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_threads": num_threads}
        self._native = NativeDecoder(Library(dtype), self._decoder(norm_of_heads), **sizes)
        (self.cache,) = self._native.caches
        for blocks in self.cache:
            blocks.fill_(torch.nan if blocks.is_floating_point() else -1)  # scales whose bytes are -1 are NaN

    def _picks(self, kind: int, columns: Tensor, factors: Tensor) -> Tensor:
        """Return a matrix each of whose rows picks one number of a token's vector, times a factor."""
        weight = torch.zeros(len(columns), self.width, dtype=self.dtype)
        weight[torch.arange(len(columns)), columns] = factors.to(self.dtype)
        weight[:, self.num_inputs + kind] = _INFINITE
        return weight

    def _decoder(self, norm_of_heads: Norm | None) -> Decoder:
        layer = self.layer
        attention = Attention(
            qkv=[Matrix(weight, None) for weight in self._qkv],
            out=Matrix(self._out, None),
            heads=layer.heads,
            shape=layer.shape,
            query_norm=norm_of_heads,
            key_norm=norm_of_heads,
            value_norm=norm_of_heads,
            sinks=layer.sinks(),
            parameters=AttentionParameters(_SCALING, layer.sliding_window, layer.softcap),
        )
        return Decoder(
            embedding=torch.zeros(1, self.width, dtype=self.dtype),
            layers=[DecoderLayer(attention=attention)],
            final_norm=self._norm,
            head=Matrix(torch.eye(self.width, dtype=self.dtype)[-_OUTPUTS:], None),
        )

    def inputs(self, num_tokens: int, generator: torch.Generator) -> Tensor:
        """Return random vectors float32 [T, width] of tokens, whose numbers have the precision of bfloat16."""
        x = torch.zeros(num_tokens, self.width)
        x[:, : self.num_inputs] = torch.randn(num_tokens, self.num_inputs, generator=generator)
        return x.to(torch.bfloat16).float()

    def make_infinite(self, x: Tensor, kind: int) -> None:
        """Make all numbers of the query (0), the key (1) or the value (2) of a vector infinite."""
        x[self.num_inputs + kind] = 4.0

    def forward(self, batch: Batch, x: Tensor) -> Tensor:
        """Return the logits float32 [T, 64] of all tokens of a batch, given their vectors."""
        batch.media = BatchMedia(torch.arange(len(x)), x.to(self.dtype))
        batch.logits_rows = torch.arange(len(x))
        with torch.inference_mode():
            return self._native.forward(batch).clone()

    def qkv(self, x: Tensor) -> QKV:
        dims = (self.layer.shape.key_dim, self.layer.shape.key_dim, self.layer.shape.value_dim)
        products = ((x @ weight.float().T).unflatten(1, (-1, d)) for weight, d in zip(self._qkv, dims, strict=True))
        return QKV(*products)

    def expected(self, x: Tensor, qkv: QKV, attend: StepAttention, cache: LayerCache) -> Tensor:
        """Return the logits where `attend` computes the attention, with this cache."""
        layer = self.layer
        scoring = Scoring(_SCALING, layer.sliding_window, layer.softcap, layer.sinks())
        attended = attend(*qkv, cache, scoring).float().flatten(1)
        return self._norm(x + attended @ self._out.float().T)[:, -_OUTPUTS:]

    def plain_cache(self, dtype: torch.dtype = torch.float32) -> LayerCache:
        """Return an empty cache for the reference."""
        shape = self.layer.shape
        sizes = ((NUM_BLOCKS, BLOCK_SIZE, shape.kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
        return LayerCache(*(torch.zeros(size, dtype=dtype) for size in sizes))
