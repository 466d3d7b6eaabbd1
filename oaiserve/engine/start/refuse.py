"""Refuses what the options ask for in vain on a model's device, before anything is measured or compiled."""

from __future__ import annotations

from oaiserve.config import EngineOptions
from oaiserve.engine.model.adapted_modules import adaptable
from oaiserve.engine.model.adapters import refuse_unless_they_fit
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.errors import StartupError


def refuse_unless_possible(loaded: LoadedModel, options: EngineOptions) -> None:
    """Raise StartupError for the first option that the device, or the model, cannot obey."""
    on_cpu = loaded.is_on_cpu
    if options.quantize != "none" and not on_cpu:
        raise StartupError(f"--quantize {options.quantize} is for --device cpu; the model is on {loaded.device}.")
    if options.kv_cache_dtype != "auto" and (options.kv_cache_dtype == "int8") != on_cpu:
        setting, device = f"--kv-cache-dtype {options.kv_cache_dtype}", "cuda" if on_cpu else "cpu"
        raise StartupError(f"{setting} is for --device {device}; the model is on {loaded.device}.")
    if options.nvtx and on_cpu:
        raise StartupError(f"--nvtx is for --device cuda; the model is on {loaded.device}.")
    if options.draft_model is not None and not on_cpu:
        raise StartupError(f"--draft-model is for --device cpu; the model is on {loaded.device}.")
    if options.has_adapters and loaded.state_shapes:
        flag = "--lora" if options.lora else "--lora-dir"
        raise StartupError(f"{flag} is not for '{loaded.name}', which has layers that keep a state.")
    if options.adapters:
        refuse_unless_they_fit(options.adapters, adaptable(loaded.model))
