"""Loads a draft model, which guesses tokens for a model with the same vocabulary, by the native step alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from oaiserve.config import EngineOptions
from oaiserve.engine.drafting.draft_model import DraftModel
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.cpu.blocks import Blocks
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.description import Features, NotKnown
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import ModelSpec
from oaiserve.engine.start.cache import cache_key, recall_model, start_checked
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from oaiserve.files import demo
from oaiserve.files.checkpoint import json_object, refuse_unless_sound
from oaiserve.files.hub import local_source
from oaiserve.files.start_cache import NotRemembered

log = logging.getLogger(__name__)


class Target(NamedTuple):
    """The model for which tokens are to be guessed."""

    spec: ModelSpec
    embedding: Tensor | Blocks  # [vocab, width]
    num_layers: int


class DraftWeights(NamedTuple):
    """A draft model whose native step has not been made yet, because the size of its KV cache is not known."""

    name: str  # as the user gave it
    spec: ModelSpec
    make: Callable[..., NativeDecoder]  # with `num_blocks` and `num_threads`
    features: Features | None = None  # that the model keeps for it, if it is a head
    ids: Tensor | None = None  # of the model's vocabulary, for each of its own; None: the same

    def start(self, options: EngineOptions, *, num_blocks: int, vocab_size: int) -> DraftModel:
        """Make the native step and its runner, with as many blocks as the model has. Raises StartupError."""
        try:
            native = self.make(num_blocks=num_blocks, num_threads=options.cpu_threads or default_threads())
        except (BuildError, NotKnown) as error:
            raise StartupError(
                f"--draft-model {self.name} needs the native step, which cannot be used: {error}."
            ) from error
        except NotRemembered as error:
            raise StartupError(f"--draft-model {self.name}: {error}. Start once with --recheck.") from error
        torch.set_num_threads(native.torch_threads)
        size = num_blocks * options.block_size * self.spec.kv_bytes_per_token
        log.info("%s guesses tokens; its KV cache takes %.2f GiB", self.spec.name, size / 2**30)
        same = self.spec.vocab_size == vocab_size and self.ids is None
        executor = native if same else _OfVocabulary(native, vocab_size, self.ids)
        return DraftModel(
            ModelRunner(executor, self.spec.device, options.block_size),
            block_size=options.block_size,
            max_len=self.spec.max_model_len,
            vocab_size=vocab_size,
            is_head=self.features is not None,
        )


class _OfVocabulary:
    """Computes a model with more or fewer rows beyond the last token than another model has, or with rows of some ids.

    Rows behind the last token fill a table up to a round number, and mean nothing.
    """

    is_exact = True

    def __init__(self, native: NativeDecoder, vocab_size: int, ids: Tensor | None) -> None:
        self._native = native
        self._vocab_size = vocab_size
        self._ids = ids

    def forward(self, batch: Batch) -> torch.Tensor:
        if self._ids is not None:
            own = self._native.forward(batch)
            return own.new_full((len(own), self._vocab_size), -torch.inf).index_copy_(1, self._ids, own)
        batch.input_ids.clamp_(max=self._native.vocab_size - 1)
        logits = self._native.forward(batch)[:, : self._vocab_size]
        missing = self._vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits.contiguous()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self._native.copy_blocks(copies)

    def prepare(self, adapter: Adapter) -> Adapter:
        return self._native.prepare(adapter)


def _is_head(folder: Path) -> bool:
    names = json_object(folder / "config.json").get("architectures") or []
    return any("eagle3" in str(name).lower() for name in names)


def load_draft(request: StartRequest, target: Target) -> DraftWeights | None:
    """Load the draft model that the options name, with the same checks as a model, from the start cache if it can be.

    It may also be a head of the target. Raises StartupError if it cannot be loaded, or has another vocabulary.
    """
    name, times = request.options.draft_model, request.times
    if name is None:
        return None
    options = replace(request.options, draft_model=None, max_model_len=None)
    if name == "demo":
        folder = demo.fetched()
        times.run("digests of the draft model", demo.refuse_unless_unchanged, folder)
        source = local_source(folder)
    else:
        source = local_source(name)
    refuse_unless_sound(source)
    if target.spec.state_shapes:
        raise StartupError(
            f"--draft-model {name} is not for '{target.spec.name}', whose layers keep a state: a state cannot go back "
            "to the tokens before a draft that does not come true."
        )
    if source.gguf_file is None and _is_head(source.path):
        from oaiserve.engine.start.draft_head import load_head

        with times.part("weights of the draft head"):
            return DraftWeights(name, *load_head(name, source.path, options, **target._asdict()))
    with times.part("tokenizer of the draft model"):
        own = Tokenizer.from_pretrained(source.path, recheck=options.recheck)
    # Each id must be the same token for both models.
    of_draft, of_model = (
        {token_id: token for token, token_id in one.backend.get_vocab(with_added_tokens=True).items()}
        for one in (own, request.tokenizer)
    )
    if of_draft != of_model:
        differs = min(i for i in of_draft.keys() | of_model.keys() if of_draft.get(i) != of_model.get(i))
        tokens = [f"'{of_one[differs]}'" if differs in of_one else "no token" for of_one in (of_draft, of_model)]
        raise StartupError(
            f"--draft-model {name} has another vocabulary than the model, {len(of_draft)} tokens and {len(of_model)}: "
            f"id {differs} is {tokens[0]} of the draft model and {tokens[1]} of the model. Both must have the same."
        )
    key = None if source.gguf_file is not None else cache_key(source.path, options)
    if key is not None and not options.recheck:
        try:
            checked = recall_model(key, options)
            return DraftWeights(name, checked.spec, partial(start_checked, checked, options))
        except NotRemembered as reason:
            log.info("The draft model does not start from the start cache: %s", reason)
    from oaiserve.engine.start.load import load_model
    from oaiserve.engine.start.native import native_step, with_native_cache

    load = partial(load_model, source.path, device="cpu", dtype=options.dtype)
    with ThreadPoolExecutor(1, thread_name_prefix="load") as loader:  # as in `StartRequest.load`
        loaded = loader.submit(times.run, "weights of the draft model", load).result()
    loaded = with_native_cache(loaded, options)
    return DraftWeights(name, loaded, partial(native_step, loaded, replace(options, lora=(), lora_dir=None), key))
