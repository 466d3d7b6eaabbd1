"""Starts a loaded model: on a CPU, on a GPU, or split over several processes.

What the options ask for in vain on this device is refused here, before anything is measured or compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.adapter_weights import refuse_unless_they_fit
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.draft_weights import DraftWeights
from oaiserve.engine.start.native import WhenChecked
from oaiserve.engine.start.started import Started
from oaiserve.engine.start.ways.expanded import start_on_cpu, start_with_latent_cache
from oaiserve.errors import StartupError

if TYPE_CHECKING:
    from oaiserve.engine.model.parallel.workers import Workers


def start_model(
    loaded: LoadedModel,
    options: EngineOptions,
    workers: Workers | None = None,
    when_checked: WhenChecked | None = None,
    draft: DraftWeights | None = None,
) -> tuple[LoadedModel, Started]:
    """Start a model as `start_runner` does, and return it with the form of KV cache that it got."""
    if not loaded.has_latent_cache:
        return loaded, start_runner(loaded, options, workers, when_checked, draft)
    _refuse_unless_possible(loaded, options, is_split=False)
    return start_with_latent_cache(loaded, options, when_checked, draft)


def start_runner(
    loaded: LoadedModel,
    options: EngineOptions,
    workers: Workers | None = None,
    when_checked: WhenChecked | None = None,
    draft: DraftWeights | None = None,
) -> Started:
    """Make the runner of a model, and get it ready for requests.

    `workers` hold the other parts of a model that is split. `when_checked` is called when the native step has been
    compared with transformers' code, which can be after this returns. `draft` guesses tokens for the model. Raises
    StartupError if the device, or its memory, does not allow what the options ask for.
    """
    _refuse_unless_possible(loaded, options, is_split=workers is not None)
    if workers is not None:
        from oaiserve.engine.start.ways.split import start_split

        return start_split(loaded, options, workers)
    if loaded.is_on_cpu:
        return start_on_cpu(loaded, options, when_checked, draft)
    from oaiserve.engine.start.ways.gpu import start_on_gpu

    return start_on_gpu(loaded, options)


def _refuse_unless_possible(loaded: LoadedModel, options: EngineOptions, *, is_split: bool) -> None:
    on_cpu = loaded.is_on_cpu
    if options.quantize != "none" and not on_cpu:
        raise StartupError(f"--quantize {options.quantize} is for --device cpu; the model is on {loaded.device}.")
    if options.kv_cache_dtype != "auto" and (options.kv_cache_dtype == "int8") != on_cpu:
        asked, device = f"--kv-cache-dtype {options.kv_cache_dtype}", "cuda" if on_cpu else "cpu"
        raise StartupError(f"{asked} is for --device {device}; the model is on {loaded.device}.")
    if options.nvtx and on_cpu:
        raise StartupError(f"--nvtx is for --device cuda; the model is on {loaded.device}.")
    if options.draft_model is not None and not on_cpu:
        raise StartupError(f"--draft-model is for --device cpu; the model is on {loaded.device}.")
    if options.has_adapters and loaded.state_shapes:
        flag = "--lora" if options.lora else "--lora-dir"
        raise StartupError(f"{flag} is not for '{loaded.name}', which has layers that keep a state.")
    if options.tensor_parallel > 1 and not is_split:
        raise StartupError(f"--tensor-parallel is {options.tensor_parallel}, but the model is loaded as a whole.")
    if options.adapters:
        refuse_unless_they_fit(options.adapters, adaptable(loaded.model))
