"""Assembles a started model, its tokenizer and its grammars into the one value that the engine is made of."""

from __future__ import annotations

import logging
from pathlib import Path

from oaiserve.config import EngineOptions
from oaiserve.engine.adapters import AdapterTable
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.model.adapters import load_adapter
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.started import Started
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from oaiserve.files.adapters import BadAdapter, read_adapter

log = logging.getLogger(__name__)

# The grammars' tokens are not needed for the first answer, and would keep the interpreter from it.
AFTER_FIRST_ANSWER_SECONDS = 0.5


def assemble(started: Started, tokenizer: Tokenizer, options: EngineOptions) -> ServedModel:
    """Make the value that the engine takes. Raises StartupError if an adapter cannot be used."""
    spec = started.spec
    default_params = spec.default_params if options.generation_config else {}
    form = " of latent vectors" if spec.has_latent_cache else ""
    if options.kv_cache_dtype != "auto":
        form = f" in {options.kv_cache_dtype}"
    dtype = str(spec.dtype).removeprefix("torch.")
    log.info(
        "%s on %s in %s: %d KV blocks of %d tokens (%.2f GiB%s), up to %d tokens a request",
        spec.name,
        spec.device,
        dtype,
        started.num_blocks,
        options.block_size,
        started.num_blocks * options.block_size * spec.kv_bytes_per_token / 2**30,
        form,
        started.max_model_len,
    )
    if default_params:
        log.info("Defaults from the model's generation_config.json: %s", default_params)
    eos_token_id = tokenizer.eos_token_id
    eos_token_ids = spec.eos_token_ids | (frozenset() if eos_token_id is None else {eos_token_id})
    grammars = Grammars(tokenizer.backend, vocab_size=spec.vocab_size, eos_token_ids=eos_token_ids)
    grammars.prepare(AFTER_FIRST_ANSWER_SECONDS)
    return ServedModel(
        tokenizer=tokenizer,
        runner=started.runner,
        num_blocks=started.num_blocks,
        max_model_len=started.max_model_len,
        vocab_size=spec.vocab_size,
        max_step_tokens_default=started.max_step_tokens_default,
        device=str(spec.device),
        dtype=dtype,
        eos_token_ids=eos_token_ids,
        grammars=grammars,
        default_params=default_params,
        ranges=started.ranges,
        profiler=started.profiler,
        processes=started.workers,
        adapters=_adapters(started, options),
        draft_model=started.draft,
        num_states=started.num_states,
        warm_up=started.warm_up,
        features=started.features,
    )


def _adapters(started: Started, options: EngineOptions) -> AdapterTable:
    """Make the table of adapters, with those that the options name."""

    def add(number: int, name: str, path: Path) -> None:
        spec = started.spec
        adapter = load_adapter(name, read_adapter(path), started.adaptable, spec.dtype, spec.device)
        started.runner.add_adapter(number, adapter)

    table = AdapterTable(add, started.runner.drop_adapter, started.adaptable)
    for name, path in options.adapters.items():
        try:
            table.load(name, path)
        except BadAdapter as error:
            raise StartupError(f"--lora {name}={path} cannot be used: {error}.") from error
        log.info("The adapter '%s' is loaded from %s", name, path)
    return table
