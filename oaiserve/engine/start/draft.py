"""Loads a draft model, which guesses tokens for a model with the same vocabulary, by the native step alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.drafting.draft_model import DraftModel
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.cpu.build import BuildError
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.description import NotKnown
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import ModelSpec
from oaiserve.engine.start.cache import cache_key, recall_model, start_checked
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from oaiserve.files import demo
from oaiserve.files.checkpoint import refuse_unless_sound
from oaiserve.files.hub import local_source
from oaiserve.files.start_cache import NotRemembered

log = logging.getLogger(__name__)


class DraftWeights(NamedTuple):
    """A draft model whose native step has not been made yet, because the size of its KV cache is not known."""

    name: str  # as the user gave it
    spec: ModelSpec
    make: Callable[..., NativeDecoder]  # with `num_blocks` and `num_threads`

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
        same = self.spec.vocab_size == vocab_size
        executor = native if same else _OfVocabulary(native, vocab_size)
        return DraftModel(
            ModelRunner(executor, self.spec.device, options.block_size),
            block_size=options.block_size,
            max_len=self.spec.max_model_len,
            vocab_size=vocab_size,
        )


class _OfVocabulary:
    """Computes a model with more or fewer rows beyond the last token than another model has.

    Such rows fill a table up to a round number, and mean nothing.
    """

    is_exact = True

    def __init__(self, native: NativeDecoder, vocab_size: int) -> None:
        self._native = native
        self._vocab_size = vocab_size

    def forward(self, batch: Batch) -> torch.Tensor:
        batch.input_ids.clamp_(max=self._native.vocab_size - 1)
        logits = self._native.forward(batch)[:, : self._vocab_size]
        missing = self._vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits.contiguous()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self._native.copy_blocks(copies)

    def prepare(self, adapter: Adapter) -> Adapter:
        return self._native.prepare(adapter)


def load_draft(request: StartRequest) -> DraftWeights | None:
    """Load the draft model that the options name, with the same checks as a model, from the start cache if it can be.

    Raises StartupError if it cannot be loaded, or has another vocabulary.
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
