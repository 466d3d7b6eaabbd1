"""The model's layers, compiled by Inductor: what lies between matrix products and attention becomes a few kernels.

Layers are alike, so what is compiled for one of a kind serves all of them. There is code for one token, which the
compiler takes for a constant, and code for any other number. Both are made at the start and compared with the layers as
they were. From then on nothing is compiled: what no code fits, which should not happen, runs as it is written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from transformers import AttentionInterface

from oaiserve.engine.model.attention import ATTENTION, AttentionCall
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.load import LoadedModel
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step
from oaiserve.times import monotonic_ns

COMPILED_ATTENTION = "oaiserve_paged_compiled"
USUAL_TOKENS = 256  # of a step; the kernels' work is cut for so many, and right for any number
# In one process: kinds of layers, times two. The compiler's own limit is 8, for code that is compiled over and over.
MAX_COMPILATIONS = 64

log = logging.getLogger(__name__)


class _UnderWay(threading.local):
    """What the layer that this thread runs attends with. Were it an argument, each step would be compiled anew."""

    call: AttentionCall | None = None
    layer: int


_under_way = _UnderWay()


@torch.library.custom_op(
    "oaiserve::attend",
    mutates_args=(),  # of its arguments; the caches that it writes are none
    schema="(Tensor query, Tensor key, Tensor value, float scaling, int? sliding_window, float? softcap) -> Tensor",
)
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention as one operation that the compiler does not look into. Arguments are those of `attention.Backend`."""
    call = _under_way.call
    assert call is not None
    cache = call.caches[_under_way.layer]
    out = call.backend(
        query, key, value, cache, call.batch, scaling=scaling, sliding_window=sliding_window, softcap=softcap
    )
    return out.contiguous()


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As `attention.paged_attention`, for layers that are compiled."""
    out = _attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(COMPILED_ATTENTION, _attention)


@torch.inference_mode()
def compile_layers(runner: ModelRunner, loaded: LoadedModel, *, num_blocks: int, block_size: int) -> bool:
    """Whether the layers are compiled from now on. Where they cannot be, or compute something else then, the log says
    why, and they stay as they were. Writes into the first blocks of the KV cache, which nobody may use yet."""
    layers = _layers(loaded)
    if layers is None:
        log.warning("The model's layers are not compiled: they are not in one list.")
        return False
    restore_layers(loaded)
    most = min(USUAL_TOKENS, num_blocks * block_size, loaded.max_model_len)
    batches = [_prompt(num_tokens, block_size, loaded) for num_tokens in sorted({1, most})]
    expected = [runner.forward(batch).to(torch.float32, copy=True) for batch in batches]
    log.info("Compiling the model's layers")
    began_ns = monotonic_ns()
    loaded.model.set_attn_implementation(COMPILED_ATTENTION)
    _install(
        layers, lambda forward: torch.compile(forward, fullgraph=True, dynamic=True, options={"compile_threads": 1})
    )
    problem = None
    try:
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILATIONS):
            logits = [runner.forward(batch).to(torch.float32, copy=True) for batch in batches]
    except Exception as error:  # whatever the compiler finds in somebody else's code, the model can do without
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        limit = 1e-3 if loaded.dtype == torch.float32 else 0.1
        pairs = zip(logits, expected, strict=True)
        differences = [float((got - want).norm() / want.norm()) for got, want in pairs]
        if not all(difference <= limit for difference in differences):  # NaN is not
            shown = " and ".join(f"{difference:.1%}" for difference in differences)
            problem = f"the outputs would differ by {shown} (allowed: {limit:.1%})"
    if problem is not None:
        restore_layers(loaded)
        log.warning("The model's layers are not compiled: %s", problem)
        return False
    _install(layers, torch._dynamo.run)
    log.info("The model's layers are compiled, in %.1f s", (monotonic_ns() - began_ns) / 1e9)
    return True


def restore_layers(loaded: LoadedModel) -> None:
    """As they were before anybody compiled them, for whoever has other uses for the model."""
    for layer in _layers(loaded) or ():
        layer.__dict__.pop("forward", None)
    loaded.model.set_attn_implementation(ATTENTION)


def _layers(loaded: LoadedModel) -> list[torch.nn.Module] | None:
    """In order, as the layers of the KV cache."""
    num_layers = len(loaded.kv_shapes)
    assert list(loaded.kv_shapes) == list(range(num_layers))
    lists = [m for m in loaded.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers]
    return list(lists[0]) if len(lists) == 1 else None


def _install(layers: list[torch.nn.Module], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Lets each layer run its class's own forward, wrapped."""
    wrapped = {kind: wrap(kind.forward) for kind in {type(layer) for layer in layers}}
    for index, layer in enumerate(layers):
        layer.forward = _forward(layer, index, wrapped[type(layer)])


def _forward(layer: torch.nn.Module, index: int, wrapped: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, call: AttentionCall, **kwargs: Any) -> Any:
        _under_way.call, _under_way.layer = call, index
        try:
            return wrapped(layer, *args, **kwargs)
        finally:
            _under_way.call = None  # nor does the thread keep the cache

    return forward


def _prompt(num_tokens: int, block_size: int, loaded: LoadedModel) -> Batch:
    """A step with one sequence, in the first blocks."""
    ids = [(7 * position + 3) % loaded.vocab_size for position in range(num_tokens)]
    sequence = Sequence("compile", 0, ids, SamplingParams(), max_len=num_tokens + 1)
    sequence.blocks = list(range(-(-num_tokens // block_size)))
    return build_batch(Step([Chunk(sequence, 0, num_tokens)]), block_size, loaded.device)
