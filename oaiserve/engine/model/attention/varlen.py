"""The varlen backend for NVIDIA GPUs: torch's FlashAttention kernels compute prefills, Triton kernels compute decodes.

torch can read a paged cache only with FlashAttention 3, a separate package. The keys and values of a whole prompt are
contiguous anyway. If the cache holds the beginning of a prompt, its keys and values are first copied together.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from oaiserve.engine.model.attention import LayerCache, Scoring, triton
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.errors import StartupError

# The copy takes some hundred MiB for most models, in addition to the cache. Longer contexts are left to the Triton
# kernel, which reads them in place.
MAX_COPIED_TOKENS = 65536
MAX_DIM = 256

# Since torch 2.12 an argument must say that query heads share key heads; earlier versions infer it.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


class PackedKeys(NamedTuple):
    """The places of the keys of a batch's P prefills, in one contiguous tensor and in the cache."""

    query_start: torch.Tensor  # [P + 1] int32, offsets into the tokens after the decodes
    start: torch.Tensor  # [P + 1] int32, offsets into the contiguous keys
    slots: torch.Tensor  # [start[-1]] int64, places in the cache


def refuse_unless_supported(loaded: LoadedModel) -> None:
    """Raise StartupError for a GPU or a model without support by FlashAttention."""
    dims = {(shape.key_dim, shape.value_dim) for shape in loaded.kv_shapes.values()}
    problem = None
    if torch.cuda.get_device_capability(loaded.device) < (8, 0):
        problem = f"compute capability 8.0 or higher; {torch.cuda.get_device_name(loaded.device)} is older"
    elif loaded.dtype not in (torch.float16, torch.bfloat16):
        problem = f"--dtype float16 or bfloat16, not {str(loaded.dtype).removeprefix('torch.')}"
    elif any(key_dim != value_dim or key_dim % 8 or key_dim > MAX_DIM for key_dim, value_dim in dims):
        shown = ", ".join(f"{key_dim} and {value_dim}" for key_dim, value_dim in sorted(dims))
        problem = f"keys and values of one size, a multiple of 8 up to {MAX_DIM}; this model's have {shown}"
    elif getattr(loaded.model.config, "attn_logit_softcapping", None):
        problem = "attention without softcap, which this model has"
    if problem:
        raise StartupError(f"--attention varlen needs {problem}. Use --attention triton.")


class VarlenAttention:
    """The attention of one step by FlashAttention and Triton, in bfloat16 or float16, without softcap."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._triton = triton.TritonAttention(batch)
        self._packed_keys: PackedKeys | None = None  # made in the first layer, on the device

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, scoring: Scoring
    ) -> torch.Tensor:
        assert scoring.softcap is None
        batch, num_decodes, window = self._batch, self._batch.num_decodes, scoring.sliding_window
        query_lens, context_lens = batch.query_lens[num_decodes:], batch.context_lens[num_decodes:]
        is_whole = query_lens == context_lens
        is_plain = scoring.sinks is None and scoring.slopes is None
        if not query_lens or not is_plain or (not is_whole and sum(context_lens) > MAX_COPIED_TOKENS):
            return self._triton(query, key, value, cache, scoring)
        query, key, value = (
            tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value)
        )
        triton.write(key, value, cache, batch.slots, first_token=num_decodes)
        if self._packed_keys is None:
            self._packed_keys = _packed_keys(batch, cache.keys.shape[1], sum(context_lens))
        packed = self._packed_keys
        keys, values = key[num_decodes:], value[num_decodes:]
        if not is_whole:
            keys, values = (blocks.flatten(0, 1).index_select(0, packed.slots) for blocks in cache)
        prefills = varlen_attn(
            query[num_decodes:],
            keys,
            values,
            packed.query_start,
            packed.start,
            max(query_lens),
            max(context_lens),
            scale=scoring.scaling,
            # A token sees so many tokens before and after itself; the last query is at the position of the last key.
            window_size=(-1 if window is None else window - 1, 0),
            **_GROUPED,
        )
        assert isinstance(prefills, torch.Tensor)
        if not num_decodes:
            return prefills
        out = query.new_empty(query.shape)
        self._triton.decode(query, key, value, cache, out, scoring)
        out[num_decodes:] = prefills
        return out


def _packed_keys(batch: Batch, block_size: int, num_tokens: int) -> PackedKeys:
    """Compute where the keys of the prefills are. Only tensors on the device are read, so the host does not wait."""
    device, first = batch.seq_lens.device, batch.num_decodes
    lengths = batch.seq_lens[first:]
    start = pad(lengths.cumsum(0), (1, 0))
    row = torch.arange(len(lengths), device=device).repeat_interleave(lengths, output_size=num_tokens)
    position = torch.arange(num_tokens, device=device) - start[row]
    blocks = batch.own_tables()[first:][row, position // block_size]
    return PackedKeys(
        query_start=(batch.query_start[first:] - first).to(torch.int32),
        start=start.to(torch.int32),
        slots=blocks * block_size + position % block_size,
    )
