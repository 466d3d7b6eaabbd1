"""Switches a loaded model to paged attention and to our states, after checking that it still computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from oaiserve.engine.decoder.spec import KVShape, LayerStateShapes
from oaiserve.engine.model.attention import LayerCache, Scoring, StepAttention
from oaiserve.engine.model.attention.hook import ATTENTION, AttentionCall, run_model
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.families import family_of
from oaiserve.engine.model.foreign_layers import bring_paged_attention, bring_states, share_caches, state_shapes
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.model_config import (
    LENGTH_DEPENDENT_ROPE,
    context_length,
    has_attention,
    refuse_unless_decoder_only,
)
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.model.states import StateChunk, States
from oaiserve.engine.start.compare import Difference, ModuleOutputs, difference, tolerance
from oaiserve.errors import StartupError

SHORT_WINDOW = 4  # tokens
_PROBE_TOKENS = 8
_PROBE_PARTS = (3, 4, 8)  # the end of a chunk that begins, of a decode, and of a chunk that goes on from a state


def prepare(model: PreTrainedModel, name: str = "the model") -> LoadedModel:
    """Switch a loaded model to paged attention, after checking that it still computes the same logits."""
    model.eval()
    refuse_unless_decoder_only(model.config, name)
    _fix_rotary_frequencies(model)
    config = model.config
    outputs = ModuleOutputs(model, family_of(config.model_type).mixer)
    with short_windows(model):
        kv_shapes, states = _probe_attention(model, name, _rows(model.get_input_embeddings()), outputs)
    loaded = LoadedModel(
        name=type(model).__name__,
        model=model,
        device=model.device,
        dtype=model.dtype,
        vocab_size=_rows(model.get_output_embeddings()),
        max_model_len=context_length(config),
        eos_token_ids=_ids(config.eos_token_id) | _ids(getattr(model.generation_config, "eos_token_id", None)),
        kv_shapes=kv_shapes,
        state_shapes=states,
    )
    if states:
        _refuse_unless_equal_in_parts(loaded, name, outputs)
    return loaded


@contextmanager
def short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Let sliding windows be so short, in the forwards within, that a few tokens are more than a window.

    The model's own masks take the window from its configuration, and paged attention from the modules. The difference
    between the two stays as it is, so that a window that is off by one is found.
    """
    configured = getattr(model.config, "sliding_window", None)
    if not isinstance(configured, int) or configured <= SHORT_WINDOW:
        yield
        return
    holders: list[Any] = [
        one for one in (model.config, *model.modules()) if isinstance(vars(one).get("sliding_window"), int)
    ]
    windows = [one.sliding_window for one in holders]
    try:
        for one, window in zip(holders, windows, strict=True):
            one.sliding_window = window - configured + SHORT_WINDOW
        yield
    finally:
        for one, window in zip(holders, windows, strict=True):
            one.sliding_window = window


def _fix_rotary_frequencies(model: PreTrainedModel) -> None:
    """Let rotary embeddings keep their frequencies.

    Those of some types look at the positions of each step, on the device, to choose frequencies by the longest. The
    host would wait for that, and a step that waits cannot be captured. `context_length` allows no length with others.
    """
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # by the type of layer
            module.rope_type = {layer: _fixed(of_layer) for layer, of_layer in kind.items()}  # type: ignore[assignment]
        elif isinstance(kind, str):
            module.rope_type = _fixed(kind)  # type: ignore[assignment]


def _fixed(rope_type: str) -> str:
    return "default" if rope_type in LENGTH_DEPENDENT_ROPE else rope_type


def _probe_attention(
    model: PreTrainedModel, name: str, vocab_size: int, outputs: ModuleOutputs
) -> tuple[dict[int, KVShape], dict[int, LayerStateShapes]]:
    """Switch the model to paged attention and our pool of states, and return the shapes of what its layers keep.

    In a short run, each module that attends or keeps a state must give what it gives in the model's own code, and so
    must the model. That excludes what paged attention does not support, and layers that do not use it. Raises
    StartupError for such a model.
    """
    keeps_states = family_of(model.config.model_type).mixer is not None
    kept: dict[int, LayerStateShapes] = {}
    batch = build_batch(prompt(_PROBE_TOKENS, vocab_size, _PROBE_TOKENS), _PROBE_TOKENS, model.device)
    probe = _Probe(ReferenceAttention(batch), outputs)
    with torch.inference_mode():
        if keeps_states:
            kept = kept_states(model)
        with outputs.recorded():
            # Of all tokens: for the last one's logits alone, layers of Gemma 4 would compute nothing else.
            output = model(input_ids=batch.input_ids[None], use_cache=keeps_states)
        expected = output.logits[0, -1:]
        if keeps_states:
            bring_states(model)
            batch.states = States(kept, 1, model.device).of_step([StateChunk(0, 0, _PROBE_TOKENS)])
        num_sharing = share_caches(model)
        bring_paged_attention(model)
        if has_attention(model.config):
            model.set_attn_implementation(ATTENTION)
            if model.config._attn_implementation != ATTENTION:
                raise StartupError(
                    f"'{name}' cannot be served: its code does not use transformers' attention interface."
                )
        try:
            with outputs.compared():
                logits = run_model(model, batch, call=AttentionCall(probe, probe, batch.states))
        except TypeError as error:  # the model's code does not pass an argument on, or does not accept it
            raise StartupError(
                f"'{name}' cannot be served: its code does not hand the arguments of paged attention on to its layers."
            ) from error
    shapes = probe.shapes
    num_layers = model.config.num_hidden_layers - num_sharing
    if not keeps_states and len(shapes) != num_layers:
        raise StartupError(
            f"'{name}' cannot be served: only {len(shapes)} of its {num_layers} layers use transformers' attention "
            "interface."
        )
    if probe.is_overwritten:
        raise StartupError(
            f"'{name}' cannot be served: a layer of it keeps keys and values twice, and the cache holds them once."
        )
    outputs.found.append(Difference("", difference(logits, expected), tolerance(model.dtype)))
    if differing := outputs.beyond_rounding():
        raise StartupError(
            f"'{name}' cannot be served: with paged attention its outputs differ {differing} from its own, so its "
            "attention does something that the interface does not carry."
        )
    return shapes, kept


@torch.inference_mode()
def _refuse_unless_equal_in_parts(loaded: LoadedModel, name: str, outputs: ModuleOutputs) -> None:
    """Raise StartupError unless the modules, and the model, give the same for a prompt at once and in parts."""
    logits: list[torch.Tensor] = []
    for ends in ((_PROBE_TOKENS,), _PROBE_PARTS):
        # What is kept between the parts is as precise as the modules that are compared.
        precise = replace(loaded, dtype=torch.float32)
        eager = EagerExecutor.with_cache(precise, num_blocks=1, block_size=_PROBE_TOKENS)
        shapes = {layer: _in_float32(of_layer) for layer, of_layer in loaded.state_shapes.items()}
        states = States(shapes, 1, loaded.device)
        start = 0
        for end in ends:
            step = prompt(end, loaded.vocab_size, _PROBE_TOKENS, start=start)
            batch = build_batch(step, _PROBE_TOKENS, loaded.device)
            batch.states = states.of_step([StateChunk(0, start, end - start)])
            with outputs.compared(start) if logits else outputs.recorded():
                computed = eager.forward(batch)
            start = end
        logits.append(computed)
    outputs.found.append(Difference("", difference(logits[1], logits[0]), tolerance(loaded.dtype)))
    if differing := outputs.beyond_rounding():
        raise StartupError(
            f"'{name}' cannot be served: computed in parts, its outputs differ {differing}, so a layer of it needs "
            "more of the tokens before than its keys and values, or its state."
        )


def _in_float32(shapes: LayerStateShapes) -> LayerStateShapes:
    parts = (shapes.conv, shapes.recurrent)
    return LayerStateShapes(*(None if part is None else replace(part, dtype=torch.float32) for part in parts))


@torch.inference_mode()
def kept_states(model: PreTrainedModel) -> dict[int, LayerStateShapes]:
    """Return the shapes of the states that the layers of a model keep in its own code, in their dtypes."""
    if family_of(model.config.model_type).mixer is None:
        return {}
    return state_shapes(model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=True))


class _Probe(dict[int, LayerCache]):
    """The attention of a step that records the KV shape of each layer, and its caches, of one block each."""

    def __init__(self, attention: StepAttention, outputs: ModuleOutputs) -> None:
        self.shapes: dict[int, KVShape] = {}
        self.is_overwritten = False  # whether a layer has called attention with other keys or values than before
        self._attention = attention
        self._outputs = outputs  # which are told what attends
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __missing__(self, layer: int) -> LayerCache:
        """Return no cache yet: its shape is known when attention is called, which is next."""
        self._layer = layer
        return LayerCache(torch.empty(0), torch.empty(0))

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, scoring: Scoring
    ) -> torch.Tensor:
        before = self._written.setdefault(self._layer, (key, value))
        self.is_overwritten |= not all(torch.equal(*pair) for pair in zip(before, (key, value), strict=True))
        shape = self.shapes[self._layer] = KVShape(key.shape[1], key.shape[2], value.shape[2])
        cache = LayerCache(
            key.new_zeros(1, _PROBE_TOKENS, shape.kv_heads, shape.key_dim),
            value.new_zeros(1, _PROBE_TOKENS, shape.kv_heads, shape.value_dim),
        )
        self._outputs.attends()
        return self._attention(query, key, value, cache, scoring)


def _rows(embedding: torch.nn.Module) -> int:
    weight = embedding.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[0]


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
