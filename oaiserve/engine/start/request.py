"""A model to start, in the form that all ways to start it receive. Imports no torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.progress import show_transformers_progress
from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import EngineOptions
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.engine.text.builtin_templates import template_file
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.engine.types.pooling import Task
from oaiserve.errors import StartupError
from oaiserve.runtime import Queue, Runtime

if TYPE_CHECKING:
    from oaiserve.engine.encoder import Media
    from oaiserve.engine.executors.native.reserved import ReservedMemory
    from oaiserve.engine.served_model import ServedModel

T = TypeVar("T")

ON_GPU = "from a description of its files, on a GPU"  # the name of the way of the plug-in 'cuda'

# Loads what reads a model's images and sounds, given a GGUF file's mmproj. Returns None if the model reads neither.
LoadMedia: TypeAlias = "Callable[[StartRequest, Path | None], Media | None]"


def needing_native(options: EngineOptions) -> str | None:
    """Return the flag that only the native step supports, or None."""
    if options.kv_cache_dtype != "auto":
        return f"--kv-cache-dtype {options.kv_cache_dtype}"
    if options.exact:
        return "--exact"
    if options.quantize != "none":
        return f"--quantize {options.quantize}"
    if options.prefix_cache_dir is None:
        return None
    return "--prefix-cache-dir"


def refuse_if_native_is_needed(options: EngineOptions, reason: Exception) -> None:
    """Raise StartupError if a flag needs the native step, which can't be used for this reason."""
    if (needed_by := needing_native(options)) is not None:
        raise StartupError(f"{needed_by} needs the native step, which cannot be used: {reason}.") from reason


_OF_GENERATION = {"kv_cache_dtype", "kv_cache_memory", "kv_offload", "prefix_cache_dir", "quantize"}


def without_generation(options: EngineOptions) -> EngineOptions:
    """Return the options for a model of vectors or scores, without options for generation that apply to all models of
    its server."""
    defaults = EngineOptions()
    return replace(options, **{name: getattr(defaults, name) for name in _OF_GENERATION & options.inherited})


class Declined(Exception):
    """A way cannot start a model. The message is the reason, without a full stop."""


class Way(Protocol):
    """A way to start a model. Each way is tried once."""

    name: str

    def accepts(self, request: StartRequest) -> str | None:
        """Decide whether to start this model. Return the reason against it, or None."""

    def start(self, request: StartRequest) -> ServedModel:
        """Start the model. Raises StartupError for the user, and Declined if the next way should be tried."""


@dataclass
class StartRequest:
    """A model to start: its files and options, and what the parts of the start share until it runs."""

    source: ModelSource  # a local copy
    options: EngineOptions
    runtime: Runtime
    times: StartTimes = field(default_factory=StartTimes)
    meanwhile: Callable[[], object] = lambda: None  # called while a library of torch is loaded
    # Parameters of requests, if the model's files state none.
    default_params: Mapping[str, float] = field(default_factory=dict)
    task: Task = "generate"
    reserved: ReservedMemory | None = None  # memory for quantized weights
    compiling: Thread | None = None  # compiles the native library, unless it is there
    # Gets an item when the load of a GGUF file starts to compile or pack, which doesn't need the GIL.
    went_native: Queue[None] = field(init=False)

    def __post_init__(self) -> None:
        self.went_native = self.runtime.queue()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        with self.times.part("tokenizer"):
            return tokenizer_of(self.source.checkpoint, self.options, self.runtime)

    def load(self, part: str, load: Callable[[], T], *, packs_blocks: bool = False) -> T:
        """Load weights in a short-lived thread, while this thread makes the tokenizer.

        A load that `packs_blocks` puts an item into `went_native` before it does so, or before it waits for the
        compiler. This thread waits until then and leaves the GIL to the load, so that both threads work in parallel for
        as long as possible.

        Each thread that computes with torch gets a pool of OpenMP workers. Once these outnumber the cores, all of them
        sleep between operations instead of spinning, and a decode step on a CPU takes two thirds longer. Afterwards
        only the engine thread computes.
        """
        with self.runtime.executor("load") as loader:
            loading = loader.submit(self.times.run, part, load)
            if packs_blocks:
                loading.add_done_callback(lambda _: self.went_native.put(None))
                self.went_native.get()
            try:
                _ = self.tokenizer
            except StartupError:
                loading.result()  # A model of the wrong kind often has no tokenizer either.
                raise
            return loading.result()

    @contextmanager
    def importing_transformers(self) -> Iterator[None]:
        """Run a block that imports transformers, which takes seconds, for a way that needs it."""
        with self.times.part("import of transformers"):
            yield
        show_transformers_progress()
        if not gc.isenabled():  # A server collects garbage only once while it starts, after the model is loaded.
            gc.freeze()  # Later collections then skip the million objects that remain.
        self.drop_reserved()  # Only native code writes to it.

    def drop_reserved(self) -> None:
        """Give the reserved memory back to the system."""
        if self.reserved is not None:
            self.reserved.keep(0)
            self.reserved = None


def tokenizer_of(checkpoint: Checkpoint, options: EngineOptions, runtime: Runtime) -> Tokenizer:
    """Load the tokenizer of a checkpoint, with the chat template of the options. Raises StartupError."""
    if options.chat_template:
        template = template_file(options.chat_template).read_text(encoding="utf-8")
    else:
        template = None
    return Tokenizer.of(checkpoint, template, recheck=options.recheck, runtime=runtime)
