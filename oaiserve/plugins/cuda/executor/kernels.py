"""The parts of a step that a GPU has kernels for, and the same parts in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import RotaryTable
from oaiserve.engine.executors.reference.attention import PagedAttention, PlainAttention
from oaiserve.engine.executors.reference.heads import rotated
from oaiserve.engine.executors.reference.mixers import Recurrence, recurrence
from oaiserve.engine.model import layer_operations
from oaiserve.engine.model.attention import Angles, Backend, LayerCache, Scoring
from oaiserve.engine.model.batch import Batch
from oaiserve.plugins.cuda.executor.device_matrices import Multiply, plain_product
from oaiserve.plugins.cuda.executor.product_ways import UNMEASURED, ProductWays

if TYPE_CHECKING:  # The import needs Triton.
    from oaiserve.plugins.cuda.executor.triton_adapters import TritonAdapters
    from oaiserve.plugins.cuda.executor.triton_latent import TritonLatentAttention


class PlainLatentAttention:
    """The attention of one step over latent vectors, in plain torch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._paged = PagedAttention(batch)

    def write(
        self, query: Tensor, latent: Tensor, shared: Tensor, cache: Tensor, rotary: RotaryTable | None, angles: Angles
    ) -> Tensor:
        """Write latent vectors [T, rank] and rotated shared numbers [T, shared] into the cache.

        Return queries [T, heads, rank + shared]. Their last `shared` numbers are the last ones of `query` [T, heads,
        own + shared], rotated. Their first `rank` numbers are uninitialised.
        """
        key, turned = (
            rotated(rotary, numbers.float(), 0, self._batch).to(query.dtype)
            for numbers in (shared[:, None], query[..., -shared.shape[1] :])
        )
        self._paged.write(cache, torch.cat([latent[:, None], key], dim=-1))
        return torch.cat([turned.new_empty(*turned.shape[:2], latent.shape[1]), turned], dim=-1)

    def attend(self, query: Tensor, cache: Tensor, rank: int, scoring: Scoring) -> Tensor:
        """Return the attention [T, heads, rank] of queries [T, heads, rank + shared] to a cache of such keys."""
        of_keys = LayerCache(cache, cache[..., :rank])
        return self._paged.attend(query, of_keys, scoring.parameters, scoring.sinks).to(query.dtype)


class Kernels(NamedTuple):
    """The kernels of one executor, or plain torch instead of each.

    Without any kernels, the host waits for the device in mixtures of experts.
    """

    attention: Backend = PlainAttention
    operations: ModuleType = layer_operations  # or `triton_layers`
    experts: ModuleType | None = None  # `triton_products`; None: in plain torch
    multiply: Multiply = plain_product  # with matrices in quantized blocks
    ways: ProductWays = UNMEASURED  # passed to `multiply`
    recurrence: Recurrence = recurrence
    sampling: ModuleType | None = None  # `triton_sampling`; None: on the host
    adapters: TritonAdapters | None = None  # None: in plain torch
    latent_attention: Callable[[Batch], PlainLatentAttention | TritonLatentAttention] = PlainLatentAttention


def triton_kernels() -> Kernels:
    """Return all Triton kernels. Raises ImportError if Triton isn't installed."""
    from oaiserve.plugins.cuda.executor import triton_layers, triton_products, triton_sampling, triton_states
    from oaiserve.plugins.cuda.executor.triton_attention import TritonAttention
    from oaiserve.plugins.cuda.executor.triton_latent import TritonLatentAttention

    return Kernels(
        TritonAttention,
        triton_layers,
        triton_products,
        triton_products.multiply,
        recurrence=triton_states.recurrence,
        sampling=triton_sampling,
        latent_attention=TritonLatentAttention,
    )
