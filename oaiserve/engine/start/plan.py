"""Makes the parts of a model's engine: finds and loads its weights and its tokenizer, and starts what runs it.

A model that an earlier start has checked is loaded without transformers' code. That is the fast way, and it is taken
wherever the check is remembered.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from oaiserve.config import EngineOptions
from oaiserve.engine.adapters import AdapterTable
from oaiserve.engine.drafting.draft_model import DraftModel
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.model.cpu.cores import usable_cpus
from oaiserve.engine.model.cpu.reserved import ReservedMemory, reserve
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.draft import load_draft
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from oaiserve.facts.start_times import StartTimes
from oaiserve.files import demo
from oaiserve.files.adapters import BadAdapter, read_adapter
from oaiserve.files.checkpoint import refuse_unless_sound, refuse_without_tokenizer
from oaiserve.files.gguf import shard_paths
from oaiserve.files.hub_download import fetched
from oaiserve.files.source import ModelSource, find_model
from oaiserve.files.start_cache import NoRecord, NotRemembered, Subject

if TYPE_CHECKING:
    from oaiserve.engine.model.parallel.workers import Workers
    from oaiserve.engine.model.pooling.pooler import LoadedPooler
    from oaiserve.engine.model.spec import LoadedModel, ModelSpec
    from oaiserve.engine.start.draft_weights import DraftWeights
    from oaiserve.engine.start.started import Started

log = logging.getLogger(__name__)

# What the first answer need not wait for, and would: most of it keeps the interpreter.
AFTER_FIRST_ANSWER_SECONDS = 0.5
# What takes longer, and new memory. The next start needs it.
REMEMBER_AFTER_SECONDS = 3.0


def load_parts(
    model: str | Path, options: EngineOptions, times: StartTimes, meanwhile: Callable[[], object]
) -> ServedModel:
    """Load a model and return the parts of its engine. `Engine.from_pretrained` says what the arguments are."""
    if options.device != "cuda" and (options.cpu_threads or 0) > usable_cpus():
        log.warning(
            "--cpu-threads is %d, but this process may run on %d CPUs only. Threads that share one wait for each "
            "other, so steps take longer",
            options.cpu_threads,
            usable_cpus(),
        )
    if model != "demo":
        return _load(model, options, times, meanwhile)
    folder = demo.fetched()
    # Its digests are computed beside the imports, which leave a core idle.
    with ThreadPoolExecutor(1, thread_name_prefix="digests") as beside:
        unchanged = beside.submit(times.run, "digests", demo.refuse_unless_unchanged, folder)
        try:
            return _load(folder, options, times, meanwhile)
        finally:
            unchanged.result()  # its error says why another one was raised


def _load(model: str | Path, options: EngineOptions, times: StartTimes, meanwhile: Callable[[], object]) -> ServedModel:
    source = find_model(model)
    if not source.is_local:
        source = times.run("files of the hub", fetched, source)
    model = source.path
    refuse_unless_sound(source)
    refuse_without_tokenizer(source)
    template = options.chat_template.read_text(encoding="utf-8") if options.chat_template else None
    compiling: Thread | None = None
    # The system finds the memory for weights beside the imports, which leave a core idle. Packed, blocks take as much.
    reserved = (
        None if source.gguf_file is None else reserve(sum(path.stat().st_size for path in shard_paths(source.path)))
    )
    with times.part("import of torch"):
        from oaiserve.engine.model.cpu.build import build_beside
        from oaiserve.engine.start.cache import block_dtype, checked_subject

    dtype = block_dtype(source.path, options)
    if reserved is not None and dtype is None:
        reserved.keep(0)
        reserved = None
    asked = checked_subject(source.path, options)
    if asked is not None and not options.recheck:
        try:
            return _of_checked(asked, source.path, template, options, times, meanwhile, reserved)
        except NotRemembered as reason:
            level = logging.DEBUG if isinstance(reason, NoRecord) else logging.INFO
            text = "The check of this model is not remembered, so transformers' code is loaded: %s"
            log.log(level, text, reason)
    if dtype is not None:  # before the imports, which leave a core idle
        compiling = build_beside(dtype, "blocks", native_build=options.native_build)
    with times.part("import of transformers"):  # takes seconds
        from oaiserve.engine.start.load import load_model
        from oaiserve.engine.start.load_pooler import find_model_task, load_pooler
        from oaiserve.engine.start.native import with_native_cache
    if not gc.isenabled():  # in a server that starts, which collects once, when the model is loaded
        gc.freeze()  # so that it looks only at what the load leaves, not at a million objects that stay

    task = find_model_task(model, options)
    # The model is loaded in a thread that ends. Each thread that computes gets a pool of OpenMP workers. Once these
    # outnumber the cores, all of them sleep between operations instead of spinning, and a decode step on a CPU
    # takes two thirds longer. Afterwards only the engine thread computes.
    with ThreadPoolExecutor(1, thread_name_prefix="load") as loader:
        starting = None
        if task == "generate":
            starting = _start_kept(source, options, times, loader, asked, compiling, reserved)
        with times.part("tokenizer"):  # beside the weights, most of which are packed in native code
            tokenizer = Tokenizer.from_pretrained(model, template, recheck=options.recheck)
        if starting is not None:
            meanwhile()
            if (kept := _of_kept(source, tokenizer, options, starting)) is not None:
                return kept
        if source.gguf_file is not None:
            asked = None  # expanded weights are in no file
        if task != "generate":
            if options.has_adapters:
                flag = "--lora" if options.lora else "--lora-dir"
                raise StartupError(f"{flag} is for models that generate text, and '{model}' is for --task {task}.")
            if options.draft_model is not None:
                raise StartupError(f"--draft-model is for models that generate text; the task of '{model}' is {task}.")
            pooler = loader.submit(load_pooler, model, task, options).result()
            return parts_of_pooler(pooler, tokenizer, options)
        if options.tensor_parallel > 1:
            from oaiserve.engine.start.ways.split import load_parallel

            loaded, workers = loader.submit(load_parallel, model, options).result()
            try:
                with workers.explained():
                    return parts_of_loaded(loaded, tokenizer, options, workers)
            except BaseException:
                workers.stop()
                raise
        loaded = loader.submit(
            times.run,
            "weights",
            load_model,
            model,
            device=options.device,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
        ).result()
    loaded = with_native_cache(loaded, options)
    draft = None if options.draft_model is None else load_draft(options.draft_model, tokenizer, options, times)
    with times.part("native step"):
        return parts_of_loaded(loaded, tokenizer, options, asked=asked, draft=draft)


def _of_checked(
    asked: Subject,
    model: Path,
    template: str | None,
    options: EngineOptions,
    times: StartTimes,
    meanwhile: Callable[[], object],
    reserved: ReservedMemory | None,
) -> ServedModel:
    """Return the parts of a model that an earlier start has checked. Raises NotRemembered."""
    with times.part("what is remembered"):
        from oaiserve.engine.start.cache import recall_model
        from oaiserve.engine.start.ways.remembered import restart_runner

        checked = recall_model(asked, options)
    draft: DraftWeights | None = None
    if options.draft_model is not None:
        with times.part("tokenizer"):
            tokenizer = Tokenizer.from_pretrained(model, template)
        draft = load_draft(options.draft_model, tokenizer, options, times)
    # Weights are packed in native code, in a thread that ends, while Python makes the tables of the tokenizer.
    with ThreadPoolExecutor(1, thread_name_prefix="load") as loader:
        started = loader.submit(times.run, "weights and check", restart_runner, checked, options, draft, reserved)
        if draft is None:
            with times.part("tokenizer"):
                tokenizer = Tokenizer.from_pretrained(model, template)
        grammars = _grammars(checked.spec, tokenizer)
        meanwhile()
        parts = _of_started(checked.spec, started.result(), tokenizer, grammars, options, draft=draft)
    grammars.prepare(AFTER_FIRST_ANSWER_SECONDS)
    log.info(
        "The native step is ready: it computes what transformers' code did on %s, with the same files, versions "
        "and CPU (--recheck asks that code again)",
        checked.day,
    )
    return parts


def _start_kept(
    source: ModelSource,
    options: EngineOptions,
    times: StartTimes,
    loader: ThreadPoolExecutor,
    asked: Subject | None,
    compiling: Thread | None,
    reserved: ReservedMemory | None,
) -> Future[tuple[ModelSpec, Started]] | None:
    """Start a model whose weights may be in blocks, in the loader's thread; return None if they are in none."""
    from oaiserve.engine.start.ways.quantized import is_kept, start_kept

    if not is_kept(source, options):
        return None

    def start() -> tuple[ModelSpec, Started]:
        if compiling is not None:
            with times.part("native code"):
                compiling.join()
        return times.run(
            "weights and check",
            start_kept,
            *(source, options, asked),
            reserved=reserved,
            remember_after_seconds=REMEMBER_AFTER_SECONDS,
        )

    return loader.submit(start)


def _of_kept(
    source: ModelSource, tokenizer: Tokenizer, options: EngineOptions, starting: Future[tuple[ModelSpec, Started]]
) -> ServedModel | None:
    """Return the parts of a model whose weights are in blocks, or None if they have to be expanded."""
    from oaiserve.engine.model.checkpoints.gguf_weights import NotKept

    try:
        spec, started = starting.result()
    except NotKept as reason:
        if options.quantize == "int4":
            raise StartupError(f"--quantize int4 needs the native step, which cannot be used: {reason}.") from reason
        log.info("The weights of %s are expanded: %s", source.gguf_file or source.location, reason)
        return None
    grammars = _grammars(spec, tokenizer)
    grammars.prepare(AFTER_FIRST_ANSWER_SECONDS)
    return _of_started(spec, started, tokenizer, grammars, options)


def parts_of_loaded(
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    options: EngineOptions,
    workers: Workers | None = None,
    asked: Subject | None = None,
    draft: DraftWeights | None = None,
) -> ServedModel:
    """Return the parts of a loaded model. `workers` hold the other parts of a model that is split, and `draft` guesses
    tokens.

    If the native step computes what the model does, that is remembered for `asked`. Raises StartupError where the
    options ask for what the device or its memory does not have.
    """
    from oaiserve.engine.start.cache import remember_checked
    from oaiserve.engine.start.ways.loaded import start_model

    grammars = _grammars(loaded, tokenizer)
    grammars.prepare()  # while the model's code is made ready, most of which is native
    when_checked = None if asked is None else partial(remember_checked, asked, loaded, options=options)
    loaded, started = start_model(loaded, options, workers, when_checked, draft)
    return _of_started(loaded, started, tokenizer, grammars, options, workers, draft)


def parts_of_pooler(pooler: LoadedPooler, tokenizer: Tokenizer, options: EngineOptions) -> ServedModel:
    """Return the parts of a model that turns texts into vectors or scores. It has no KV cache."""
    from oaiserve.engine.start.ways.pooling import start_pooling

    log.info(
        "%s on %s in %s, for --task %s: up to %d tokens a text",
        type(pooler.layers).__name__,
        pooler.device,
        str(pooler.dtype).removeprefix("torch."),
        pooler.pooling.task,
        pooler.max_model_len,
    )
    started = start_pooling(pooler, options)
    return ServedModel(
        tokenizer=tokenizer,
        runner=started.runner,
        num_blocks=0,
        max_model_len=pooler.max_model_len,
        vocab_size=pooler.vocab_size,
        max_step_tokens_default=started.max_step_tokens_default,
        device=str(pooler.device),
        dtype=str(pooler.dtype).removeprefix("torch."),
        profiler=started.profiler,
        pooling=pooler.pooling,
    )


def _of_started(
    spec: ModelSpec,
    started: Started,
    tokenizer: Tokenizer,
    grammars: Grammars,
    options: EngineOptions,
    workers: Workers | None = None,
    draft: DraftWeights | None = None,
) -> ServedModel:
    default_params = spec.default_params if options.generation_config else {}
    form = " of latent vectors" if spec.has_latent_cache else ""
    if options.kv_cache_dtype != "auto":
        form = f" in {options.kv_cache_dtype}"
    log.info(
        "%s on %s in %s: %d KV blocks of %d tokens (%.2f GiB%s), up to %d tokens a request",
        spec.name,
        spec.device,
        str(spec.dtype).removeprefix("torch."),
        started.num_blocks,
        options.block_size,
        started.num_blocks * options.block_size * spec.kv_bytes_per_token / 2**30,
        form,
        started.max_model_len,
    )
    draft_model: DraftModel | None = None
    if started.draft is not None and draft is not None:
        draft_model = DraftModel(
            started.draft,
            block_size=options.block_size,
            max_len=draft.spec.max_model_len,
            vocab_size=spec.vocab_size,
        )
    if default_params:
        log.info("Defaults from the model's generation_config.json: %s", default_params)
    return ServedModel(
        tokenizer=tokenizer,
        runner=started.runner,
        num_blocks=started.num_blocks,
        max_model_len=started.max_model_len,
        vocab_size=spec.vocab_size,
        max_step_tokens_default=started.max_step_tokens_default,
        device=str(spec.device),
        dtype=str(spec.dtype).removeprefix("torch."),
        eos_token_ids=_end_of_sequence(spec, tokenizer),
        grammars=grammars,
        default_params=default_params,
        ranges=started.ranges,
        profiler=started.profiler,
        processes=workers,
        adapters=_adapters(spec, started, options),
        draft_model=draft_model,
        num_states=started.num_states,
        warm_up=started.warm_up,
        features=started.features,
    )


def _adapters(spec: ModelSpec, started: Started, options: EngineOptions) -> AdapterTable:
    """Return the table of adapters, with those that the options name. Raises StartupError if one cannot be used."""
    from oaiserve.engine.model.adapter_weights import load_adapter

    def add(number: int, name: str, path: Path) -> None:
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


def _grammars(spec: ModelSpec, tokenizer: Tokenizer) -> Grammars:
    eos_token_ids = _end_of_sequence(spec, tokenizer)
    return Grammars(tokenizer.backend, vocab_size=spec.vocab_size, eos_token_ids=eos_token_ids)


def _end_of_sequence(spec: ModelSpec, tokenizer: Tokenizer) -> frozenset[int]:
    eos_token_id = tokenizer.eos_token_id
    return spec.eos_token_ids | (frozenset() if eos_token_id is None else {eos_token_id})
