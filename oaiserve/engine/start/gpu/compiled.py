"""Compiles the model's layers: Inductor fuses the operations between matrix products and attention into a few kernels.

Layers of the same class share compiled code. There is code for one token, which the compiler treats as a constant, and
code for any other number of tokens. Both are compiled at the start, and their outputs are compared with those of the
uncompiled layers. After that nothing is compiled: a call that fits neither, which should not happen, runs uncompiled.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch._dynamo
from transformers import AttentionInterface

from oaiserve.engine.model.attention import Scoring
from oaiserve.engine.model.attention.hook import ATTENTION, AttentionCall
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.compare import compare, tolerance
from oaiserve.facts.times import monotonic_ns
from oaiserve.files.load_errors import named

COMPILED_ATTENTION = "oaiserve_paged_compiled"
USUAL_TOKENS = 256  # tokens of the step that kernels are tuned for; they are right for any number
# The limit for one process: each class of layers needs two. The compiler's own limit of 8 is meant to keep code from
# being compiled over and over.
MAX_COMPILATIONS = 64

log = logging.getLogger(__name__)


class _CurrentLayer(threading.local):
    """The attention and the index of the layer that the thread is running.

    This state is not passed as an argument, since the compiled code would then be compiled again for each step.
    """

    call: AttentionCall | None = None
    layer: int


_current = _CurrentLayer()


@torch.library.custom_op(
    "oaiserve::attend",
    mutates_args=(),  # the caches, which it writes, are not among its arguments
    schema="(Tensor query, Tensor key, Tensor value, float scaling, int? sliding_window, float? softcap, "
    "Tensor? sinks) -> Tensor",
)
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention in one operation that the compiler does not look into; see `StepAttention` for arguments."""
    call = _current.call
    assert call is not None
    cache = call.caches[_current.layer]
    out = call.attention(query, key, value, cache, Scoring(scaling, sliding_window, softcap, sinks))
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
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention in the form of transformers' attention functions, for layers that are compiled."""
    out = _attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
        None if s_aux is None else s_aux.float(),
    )
    return out.unsqueeze(0), None


AttentionInterface.register(COMPILED_ATTENTION, _attention)


@torch.inference_mode()
def compile_layers(executor: Executor, loaded: LoadedModel, *, num_blocks: int, block_size: int) -> bool:
    """Compile the layers of the model that `executor` runs, and return whether that was possible.

    If they cannot be compiled, or if compiled layers compute something else, the reason is logged and they stay as they
    were. This function writes into the first blocks of the KV cache.
    """
    layers = _layers(loaded)
    if layers is None:
        log.warning("The model's layers are not compiled: they are not in one list.")
        return False
    restore_layers(loaded)
    most = min(USUAL_TOKENS, num_blocks * block_size, loaded.max_model_len)
    steps = [prompt(num_tokens, loaded.vocab_size, block_size) for num_tokens in sorted({1, most})]
    batches = [build_batch(step, block_size, loaded.device) for step in steps]
    expected = [executor.forward(batch).clone() for batch in batches]
    log.info("Compiling the model's layers")
    began_ns = monotonic_ns()
    loaded.model.set_attn_implementation(COMPILED_ATTENTION)
    problem: object = None
    try:
        _install(
            layers, lambda forward: torch.compile(forward, fullgraph=True, dynamic=True, options={"compile_threads": 1})
        )
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILATIONS):
            problem = compare(
                lambda pair: executor.forward(pair[0]),
                lambda pair: pair[1],
                (("the outputs", pair) for pair in zip(batches, expected, strict=True)),
                tolerance(loaded.dtype),
            )
    except Exception as error:  # the compiler can raise anything, and the model runs without it
        problem = named(error)
    if problem is not None:
        restore_layers(loaded)
        log.warning("The model's layers are not compiled: %s", problem)
        return False
    _install(layers, torch._dynamo.run)
    log.info("The model's layers are compiled, in %.1f s", (monotonic_ns() - began_ns) / 1e9)
    return True


def runs_compiled(loaded: LoadedModel, run: Callable[[], object]) -> bool:
    """Decide whether the layers run as compiled code in `run`, on this thread: then none of their parts runs as
    Python."""
    layers = _layers(loaded) or []
    parts = {part for layer in layers for part in layer.modules() if part is not layer}
    others = {type(module) for module in loaded.model.modules() if module not in parts}
    codes = {kind.forward.__code__ for kind in {type(part) for part in parts} - others}
    num_calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code in codes

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return num_calls == 0


def restore_layers(loaded: LoadedModel) -> None:
    """Undo `compile_layers`, so that another executor can use the model."""
    for layer in _layers(loaded) or ():
        layer.__dict__.pop("forward", None)
    loaded.model.set_attn_implementation(ATTENTION)


def _layers(loaded: LoadedModel) -> list[torch.nn.Module] | None:
    """Return the model's layers in the order of their KV caches, or None if they are not in one list."""
    num_layers = len(loaded.kv_shapes)
    assert list(loaded.kv_shapes) == list(range(num_layers))
    lists = [m for m in loaded.model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers]
    return list(lists[0]) if len(lists) == 1 else None


def _install(layers: list[torch.nn.Module], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the forward of each layer by the wrapped forward of its class."""
    wrapped = {kind: wrap(kind.forward) for kind in {type(layer) for layer in layers}}
    for index, layer in enumerate(layers):
        layer.forward = _forward(layer, index, wrapped[type(layer)])


def _forward(layer: torch.nn.Module, index: int, wrapped: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, call: AttentionCall, **kwargs: Any) -> Any:
        _current.call, _current.layer = call, index
        try:
            return wrapped(layer, *args, **kwargs)
        finally:
            _current.call = None  # so that the thread does not keep the cache

    return forward
