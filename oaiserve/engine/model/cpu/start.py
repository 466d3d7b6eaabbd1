"""From a loaded model to its native step, which is known to compute what the model does; or to native attention, where
there is no such step."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from threading import Thread

import torch
from torch import Tensor

from oaiserve.config import Quantize
from oaiserve.engine.model.attention import Backend, LayerCache, reference
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.cpu.attention import NativeAttention
from oaiserve.engine.model.cpu.build import BuildError, library_path
from oaiserve.engine.model.cpu.describe import AttentionOptions, NotKnown, describe
from oaiserve.engine.model.cpu.kv_layout import refuse_unless_it_fits
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.load import LoadedModel
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step
from oaiserve.errors import StartupError
from oaiserve.times import monotonic_ns

log = logging.getLogger(__name__)

_NUM_TOKENS = 9
_SLOWER = "The model runs without its native step, which is slower: %s"


def start_native(
    runner: ModelRunner,
    loaded: LoadedModel,
    *,
    num_blocks: int,
    block_size: int,
    num_threads: int,
    quantize: Quantize = "none",
) -> None:
    """Lets `runner` use the native step: at once where its library is on disk, else when a thread has compiled it.
    Where that cannot be, the log says why, and the model's own code gets native attention, if that can be.

    Quantized weights have no other code that could run: StartupError where these cannot be.
    """
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_threads": num_threads}
    make = partial(native_decoder, loaded, quantize=quantize, **sizes)
    if quantize != "none":
        try:
            runner.use(make())
        except (BuildError, NotKnown) as error:
            raise StartupError(
                f"--quantize {quantize} needs the native step, which cannot be used: {error}."
            ) from error
        return
    try:
        is_built = library_path(loaded.dtype).exists()
    except BuildError as error:
        log.warning(_SLOWER, error)
        return
    started_ns = monotonic_ns()

    def prepare() -> None:
        try:
            runner.use(make())
        except NotKnown as error:  # of the model, which nobody can do anything about
            log.info(_SLOWER, error)
            use_attention()
        except (BuildError, MemoryError) as error:
            log.warning(_SLOWER, error)
        except Exception:  # of transformers' code, which is read and called here in unusual ways
            log.exception(_SLOWER, "its code could not be read")
            use_attention()
        else:
            log.info("The native step is ready after %.1f s", (monotonic_ns() - started_ns) / 1e9)

    def use_attention() -> None:
        try:
            runner.use(native_attention(loaded, **sizes))
        except (BuildError, MemoryError, NotKnown) as error:
            log.info("Its attention is in plain torch: %s", error)
        else:
            log.info("Its attention is native after %.1f s", (monotonic_ns() - started_ns) / 1e9)

    thread = Thread(target=prepare, name="compile", daemon=True)
    thread.start()
    if is_built:
        thread.join()


@torch.inference_mode()
def native_decoder(
    loaded: LoadedModel, *, num_blocks: int, block_size: int, num_threads: int, quantize: Quantize = "none"
) -> NativeDecoder:
    """Compiles the library where that has not been done. Raises BuildError, and NotKnown for a model that the native
    step does not cover, or computes otherwise."""
    refuse_unless_it_fits(loaded.kv_shapes.values(), block_size)
    library = Library(loaded.dtype, quantize)
    batches = _batches(loaded, block_size)
    options: dict[int, AttentionOptions] = {}
    eager = EagerExecutor(loaded, num_blocks=1, block_size=block_size)
    eager.backend = _recording(eager.caches, options)
    expected = [eager.forward(batch) for batch in batches]
    native = NativeDecoder(
        library, describe(loaded, options), num_threads=num_threads, num_blocks=num_blocks, block_size=block_size
    )
    # What was read wrongly differs by more than this, or by nothing.
    limit = 0.3 if quantize != "none" else 1e-3 if loaded.dtype == torch.float32 else 0.1
    for batch, logits in zip(batches, expected, strict=True):
        difference = float((native.forward(batch) - logits).norm() / logits.norm())
        if not difference <= limit:
            raise NotKnown(f"its outputs differ by {difference:.1%} from those of transformers' code")
    return native


def native_attention(loaded: LoadedModel, *, num_blocks: int, block_size: int, num_threads: int) -> NativeAttention:
    """Compiles the library where that has not been done. Raises BuildError, and NotKnown for sizes that it does not
    have."""
    refuse_unless_it_fits(loaded.kv_shapes.values(), block_size)
    return NativeAttention(
        Library(loaded.dtype),
        loaded.kv_shapes,
        loaded.dtype,
        num_threads=num_threads,
        num_blocks=num_blocks,
        block_size=block_size,
    )


def _batches(loaded: LoadedModel, block_size: int) -> list[Batch]:
    """A prompt, the token after it, and that one as if at the last position there is: where rotary tables end, and
    what grows with positions is large."""
    ids = [(7 * i + 3) % loaded.vocab_size for i in range(_NUM_TOKENS)]
    batches = []
    for start, end in ((0, _NUM_TOKENS - 1), (_NUM_TOKENS - 1, _NUM_TOKENS)):
        sequence = Sequence("check", 0, ids[:end], SamplingParams(), max_len=_NUM_TOKENS)
        sequence.blocks = [0]
        batches.append(build_batch(Step([Chunk(sequence, start, end - start)]), block_size, loaded.device))
    batches.append(replace(batches[-1], positions=torch.tensor([loaded.max_model_len - 1])))
    return batches


def _recording(caches: dict[int, LayerCache], options: dict[int, AttentionOptions]) -> Backend:
    """The reference backend, which notes what each layer is called with."""
    layers = {cache.keys.data_ptr(): layer for layer, cache in caches.items()}

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        batch: Batch,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        options[layers[cache.keys.data_ptr()]] = AttentionOptions(scaling, sliding_window, softcap)
        return reference.attend(
            query, key, value, cache, batch, scaling=scaling, sliding_window=sliding_window, softcap=softcap
        )

    return attend
