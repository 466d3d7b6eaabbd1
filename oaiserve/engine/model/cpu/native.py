"""The native executor: a step of the decoder, with all its layers, is one native call without the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oaiserve.engine.model.attention import LayerCache
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.cpu.blocks import Blocks
from oaiserve.engine.model.cpu.describe import Attention, Decoder, Layer, Matrix, Norm, NotKnown
from oaiserve.engine.model.cpu.kv_layout import LANES, adopt, new_cache
from oaiserve.engine.model.cpu.library import ACTIVATIONS, Library, Normalize, Rotary, StepInput
from oaiserve.engine.model.kv_cache import copy_blocks

PANEL = 32  # rows of a matrix that native code packs together; those of one panel have one format


class NativeDecoder:
    """Runs one decoder in native code, and owns its KV cache, in the layout of `kv_layout.py`."""

    # The decoder has threads of its own. Torch has little left to do, and its threads would only compete with these.
    torch_threads = 1
    is_exact = True

    def __init__(
        self, library: Library, decoder: Decoder, *, num_threads: int, num_blocks: int, block_size: int
    ) -> None:
        """Copy the weights, except for the embeddings.

        Raises NotKnown for sizes that the native code does not support, and MemoryError.
        """
        self._library = library
        self._kept: list[Tensor] = []  # tensors that native code has pointers to
        self.caches: list[LayerCache] = []
        self._num_blocks, self._block_size = num_blocks, block_size
        self._vocab = decoder.head.weight.shape[0]
        self._logits = torch.empty(0, self._vocab)
        self._widths: dict[int, int] = {}  # of the input of weights that are in blocks, by their index
        self._packed: dict[int, int] = {}  # the index of such weights, by the id() of the matrix
        self._groups = -1  # the buffer of what these read
        self._operations: list[str] = []  # the kind of each operation, in order
        self._handle = library.decoder()
        self._pool = library.pool(num_threads)
        if self._handle is None or self._pool is None:
            raise MemoryError(f"The system has no memory for a decoder, or does not start {num_threads} threads.")
        self._build(decoder)

    def __del__(self) -> None:
        self._library.free_decoder(self._handle)
        self._library.free_pool(self._pool)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float32 [R, vocab] of `batch.logits_rows`, which the next call overwrites."""
        num_logits = len(batch.logits_rows)
        if len(self._logits) < num_logits:
            self._logits = torch.empty(num_logits, self._vocab)
        logits = self._logits[:num_logits]
        arrays = [
            tensor.numpy().astype(np.int32)
            for tensor in (
                batch.input_ids,
                batch.positions,
                batch.slots,
                batch.query_start,
                batch.seq_lens,
                batch.block_tables,
                batch.logits_rows,
            )
        ]
        step = StepInput(
            len(batch.input_ids),
            len(batch.seq_lens),
            batch.block_tables.shape[1],
            num_logits,
            *(array.ctypes.data for array in arrays),
            logits.data_ptr(),
        )
        if self._library.step(self._handle, self._pool, ctypes.byref(step)):
            raise MemoryError(f"No memory for a step of {len(batch.input_ids)} tokens.")
        return logits

    def durations_seconds(self) -> dict[str, float]:
        """Return the seconds that the operations of each kind have taken in all steps so far."""
        durations_ns = np.zeros(len(self._operations), np.int64)
        self._library.durations(self._handle, durations_ns.ctypes.data)
        totals = dict.fromkeys(self._operations, 0.0)
        for name, duration_ns in zip(self._operations, durations_ns.tolist(), strict=True):
            totals[name] += duration_ns / 1e9
        return totals

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        copy_blocks(self.caches, copies)

    def adopt(self, caches: list[LayerCache], num_blocks: int) -> None:
        """Copy the first blocks of another executor's cache, given by layer, which has the plain layout."""
        adopt(self.caches, caches, num_blocks)

    def _build(self, decoder: Decoder) -> None:
        add = self._library
        width = self._width = decoder.embedding.shape[1]
        attention = [layer.attention for layer in decoder.layers]
        self._hidden = self._floats(width)
        self._branch = self._floats(width)
        self._qkv = self._floats(max(sum(len(m.weight) for m in layer.qkv) for layer in attention))
        self._normed = self._elements(width)
        self._queries = self._elements(max(sum(len(m.weight) for m in layer.qkv) for layer in attention))
        self._attended = self._elements(max(layer.out.weight.shape[1] for layer in attention))
        self._mlp = self._elements(max(len(layer.mlp.up.weight) for layer in decoder.layers))
        matrices = [matrix.weight for layer in decoder.layers for matrix in _matrices(layer)]
        inputs = [m.shape[1] for m in (*matrices, decoder.head.weight, decoder.embedding) if isinstance(m, Blocks)]
        if inputs:
            self._groups = add.add_groups(self._handle, max(inputs))
        self._embed(decoder)
        for layer in decoder.layers:
            self._layer(layer, decoder.residual_scale)
        last = self._elements(width)
        self._operation("norm", add.norm, self._hidden, last, self._normalize(decoder.final_norm), True)
        head = self._weights([decoder.head])
        x = self._input(last, head, of_logits_rows=True)
        self._operation("logits", add.logits, x, head, decoder.logits_scale, decoder.logits_softcap)

    def _embed(self, decoder: Decoder) -> None:
        add, table, position = self._library, decoder.embedding, decoder.position_embedding
        if isinstance(table, Blocks):
            if position is not None:
                raise NotKnown("it has an embedding of positions beside one in blocks")
            weights = self._block_weights(table, [table], None)
            self._operation("embed", add.embed_blocks, self._hidden, weights, decoder.embedding_scale)
            return
        positions = None if position is None else self._keep(position)
        arguments = (self._hidden, self._keep(table), positions, self._width, decoder.embedding_scale)
        self._operation("embed", add.embed, *arguments)

    def _input(self, x: int, weights: int, *, of_logits_rows: bool = False) -> int:
        """Return what a product with these weights reads: x, or x in eight bits, for which it adds an operation."""
        if weights not in self._widths:
            return x
        self._operation("quantize", self._library.quantize, x, self._groups, self._widths[weights], of_logits_rows)
        return self._groups

    def _layer(self, layer: Layer, residual_scale: float) -> None:
        add = self._library
        self._norm(layer.attention_norm)
        self._attention(layer.attention)
        if layer.is_parallel and layer.mlp_norm is not layer.attention_norm:
            self._norm(layer.mlp_norm)
        self._add("output", self._attended, layer.attention.out, layer.attention_out_norm, residual_scale)
        if not layer.is_parallel:
            self._norm(layer.mlp_norm)
        activation = ACTIVATIONS.index(layer.mlp.activation)
        if layer.mlp.gate is None:
            weights = self._weights([layer.mlp.up])
            x = self._input(self._normed, weights)
            self._operation("up", add.activate, x, self._mlp, weights, activation)
        else:
            weights = self._gated_weights(layer.mlp.gate, layer.mlp.up)
            x = self._input(self._normed, weights)
            self._operation("gate and up", add.gate, x, self._mlp, weights, activation)
        self._add("down", self._mlp, layer.mlp.down, layer.mlp_out_norm, residual_scale)

    def _norm(self, norm: Norm | None) -> None:
        """Add the operation that norms the hidden state for the matrices. Without a norm it only converts the state."""
        normalize = Normalize(width=self._width) if norm is None else self._normalize(norm)
        self._operation("norm", self._library.norm, self._hidden, self._normed, normalize, False)

    def _attention(self, attention: Attention) -> None:
        add, parameters = self._library, attention.parameters
        cache = self._cache(attention)
        weights = self._weights(attention.qkv)
        self._operation("qkv", add.project, self._input(self._normed, weights), self._qkv, weights, False, 1.0)
        rotary = Rotary()
        if (table := attention.rotary) is not None:
            pairs = table.cosines.shape[1]
            rotary = Rotary(self._keep(table.cosines), self._keep(table.sines), 2 * pairs, table.is_interleaved)
        norms = [Normalize() if n is None else self._normalize(n) for n in (attention.query_norm, attention.key_norm)]
        self._operation("rotary", add.prepare, self._qkv, self._queries, cache, attention.heads, rotary, *norms)
        window, softcap = parameters.sliding_window or 0, parameters.softcap or 0.0
        arguments = (self._queries, self._attended, cache, attention.heads, parameters.scaling, window, softcap)
        self._operation("attention", add.attend, *arguments)

    def _cache(self, attention: Attention) -> int:
        shape, size = attention.shape, self._block_size
        cache = new_cache(shape, self._library.dtype, num_blocks=self._num_blocks, block_size=size)
        self.caches.append(cache)
        pointers = (cache.keys.data_ptr(), cache.values.data_ptr())
        return self._library.add_cache(self._handle, *pointers, shape.kv_heads, shape.key_dim, shape.value_dim, size)  # type: ignore[no-any-return]

    def _operation(self, name: str, add: Callable[..., int], *arguments: Any) -> None:
        add(self._handle, *arguments)
        self._operations.append(name)

    def _add(self, name: str, x: int, matrix: Matrix, norm: Norm | None, scale: float) -> None:
        """Add the operations that multiply with `matrix`, norm the product, and add it to the hidden state."""
        weights = self._weights([matrix])
        x = self._input(x, weights)
        if norm is None:
            self._operation(name, self._library.project, x, self._hidden, weights, True, scale)
        else:
            self._operation(name, self._library.project, x, self._branch, weights, False, 1.0)
            arguments = (self._branch, self._hidden, self._normalize(norm), scale)
            self._operation("norm", self._library.add_norm, *arguments)

    def _weights(self, matrices: list[Matrix]) -> int:
        """Pack the rows of all `matrices` as one matrix, and return its index."""
        bias = None
        if any(m.bias is not None for m in matrices):
            biases = [torch.zeros(len(m.weight)) if m.bias is None else m.bias.float() for m in matrices]
            bias = torch.cat(biases).contiguous()
        blocks = [m.weight for m in matrices if isinstance(m.weight, Blocks)]
        if len(blocks) == len(matrices) and all(len(rows) % PANEL == 0 for rows in blocks[:-1]):
            return self._block_weights(matrices[0].weight, blocks, bias)
        tensors = [self._tensor(m.weight) for m in matrices]
        weight = torch.cat(tensors) if len(tensors) > 1 else tensors[0].contiguous()
        n, k = weight.shape
        bias_pointer = None if bias is None else bias.data_ptr()
        return self._library.add_weights(self._handle, weight.data_ptr(), n, k, bias_pointer)  # type: ignore[no-any-return]

    def _gated_weights(self, gate: Matrix, up: Matrix) -> int:
        if gate.bias is not None or up.bias is not None:
            raise NotKnown("its gated MLP has biases")
        n, k = gate.weight.shape
        if isinstance(gate.weight, Blocks) and isinstance(up.weight, Blocks) and gate.weight.kind == up.weight.kind:
            # A panel has sixteen rows of each.
            halves = [_padded(matrix.addresses(), LANES).reshape(-1, 1, LANES) for matrix in (gate.weight, up.weight)]
            rows = np.concatenate(halves, axis=1).reshape(-1)
            index = self._pack(rows, np.full(len(rows) // PANEL, gate.weight.kind, np.int32), len(rows), k, None)
            gate.weight.give_back()
            up.weight.give_back()
            return index
        both = [self._tensor(matrix.weight).contiguous() for matrix in (gate, up)]
        return self._library.add_gated_weights(self._handle, *(weight.data_ptr() for weight in both), n, k)  # type: ignore[no-any-return]

    def _block_weights(self, whole: Tensor | Blocks, parts: list[Blocks], bias: Tensor | None) -> int:
        """Pack the rows of all parts, whose formats may differ. `whole` is what other parts of the model may share."""
        if len(parts) == 1 and bias is None and id(whole) in self._packed:
            return self._packed[id(whole)]
        rows = _padded(np.concatenate([part.addresses() for part in parts]), PANEL)
        kinds = np.concatenate([np.full(-(-len(part) // PANEL), part.kind, np.int32) for part in parts])
        index = self._pack(rows, kinds, sum(len(part) for part in parts), parts[0].shape[1], bias)
        for part in parts:
            part.give_back()
        if len(parts) == 1 and bias is None:
            self._packed[id(whole)] = index
        return index

    def _pack(self, rows: NDArray[np.uintp], kinds: NDArray[np.int32], n: int, k: int, bias: Tensor | None) -> int:
        bias_pointer = None if bias is None else bias.data_ptr()
        index: int = self._library.add_blocks(
            self._handle, self._pool, rows.ctypes.data, kinds.ctypes.data, n, k, bias_pointer
        )
        self._widths[index] = k
        return index

    def _tensor(self, weight: Tensor | Blocks) -> Tensor:
        """Return a matrix in the dtype of the step, for which blocks are expanded."""
        return weight.expand().to(self._library.dtype) if isinstance(weight, Blocks) else weight

    def _normalize(self, norm: Norm) -> Normalize:
        bias = None if norm.bias is None else self._keep(norm.bias)
        return Normalize(self._keep(norm.weight), bias, len(norm.weight), norm.epsilon, norm.subtracts_mean)

    def _floats(self, width: int) -> int:
        return self._library.add_floats(self._handle, _whole(width))  # type: ignore[no-any-return]

    def _elements(self, width: int) -> int:
        return self._library.add_elements(self._handle, _whole(width))  # type: ignore[no-any-return]

    def _keep(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _whole(width: int) -> int:
    """Return `width`. Raises NotKnown unless it is a multiple of LANES."""
    if width % LANES:
        raise NotKnown(f"a row of {width} numbers is no multiple of {LANES}")
    return width


def _matrices(layer: Layer) -> list[Matrix]:
    attention, mlp = layer.attention, layer.mlp
    return [matrix for matrix in (*attention.qkv, attention.out, mlp.gate, mlp.up, mlp.down) if matrix is not None]


def _padded(addresses: NDArray[np.uintp], multiple: int) -> NDArray[np.uintp]:
    """Return the addresses, and nulls up to a multiple."""
    return np.append(addresses, np.zeros(-len(addresses) % multiple, np.uintp))
