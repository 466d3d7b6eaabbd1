"""Finds and loads a draft model, which must have the vocabulary of the model that it guesses for."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from oaiserve.config import EngineOptions
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from oaiserve.facts.start_times import StartTimes
from oaiserve.files import demo
from oaiserve.files.checkpoint import refuse_unless_sound
from oaiserve.files.hub_download import local_source
from oaiserve.files.start_cache import NotRemembered

if TYPE_CHECKING:
    from oaiserve.engine.start.draft_weights import DraftWeights

log = logging.getLogger(__name__)


def load_draft(name: str, tokenizer: Tokenizer, options: EngineOptions, times: StartTimes) -> DraftWeights:
    """Load a draft model with the same checks as a model, for a model with this tokenizer.

    What an earlier start has found out of it is taken from there. Raises StartupError if it cannot be loaded, or has
    another vocabulary.
    """
    from oaiserve.engine.start.cache import checked_subject, recall_model, remember_checked, start_checked
    from oaiserve.engine.start.draft_weights import DraftWeights

    options = replace(options, draft_model=None, max_model_len=None)
    model: str | Path = name
    if name == "demo":
        model = demo.fetched()
        times.run("digests of the draft model", demo.refuse_unless_unchanged, model)
    source = local_source(model)
    model = source.path
    refuse_unless_sound(source)
    with times.part("tokenizer of the draft model"):
        own = Tokenizer.from_pretrained(model, recheck=options.recheck)
    refuse_unless_same_vocabulary(name, own, tokenizer)
    asked = None
    if source.gguf_file is None:
        asked = checked_subject(Path(source.location), options)
    if asked is not None and not options.recheck:
        try:
            checked = recall_model(asked, options)
            return DraftWeights(name, checked.spec, partial(start_checked, checked, options))
        except NotRemembered as reason:
            log.info("The check of the draft model is not remembered, so transformers' code is loaded: %s", reason)
    from oaiserve.engine.start.load import load_model
    from oaiserve.engine.start.native import native_decoder, with_native_cache

    with ThreadPoolExecutor(1, thread_name_prefix="load") as loader:  # see plan.py
        loaded = loader.submit(
            times.run,
            "weights of the draft model",
            load_model,
            model,
            device="cpu",
            dtype=options.dtype,
        ).result()
    loaded = with_native_cache(loaded, options)
    when_checked = None if asked is None else partial(remember_checked, asked, loaded, options=options)
    make = partial(
        native_decoder,
        loaded,
        block_size=options.block_size,
        quantize=options.quantize,
        native_build=options.native_build,
        when_checked=when_checked,
    )
    return DraftWeights(name, loaded, make)


def refuse_unless_same_vocabulary(name: str, draft: Tokenizer, model: Tokenizer) -> None:
    """Raise StartupError, which says what differs, unless each id is the same token for both models."""
    of_draft, of_model = (
        {token_id: token for token, token_id in one.backend.get_vocab(with_added_tokens=True).items()}
        for one in (draft, model)
    )
    if of_draft == of_model:
        return
    differs = min(i for i in of_draft.keys() | of_model.keys() if of_draft.get(i) != of_model.get(i))
    tokens = [f"'{of_one[differs]}'" if differs in of_one else "no token" for of_one in (of_draft, of_model)]
    raise StartupError(
        f"--draft-model {name} has another vocabulary than the model, {len(of_draft)} tokens and {len(of_model)}: "
        f"id {differs} is {tokens[0]} of the draft model and {tokens[1]} of the model. Both must have the same."
    )
