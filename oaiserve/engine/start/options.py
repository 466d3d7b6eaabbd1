"""Refuses options that a device or a model doesn't support."""

from __future__ import annotations

from collections.abc import Mapping

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.adapters import refuse_unless_they_fit
from oaiserve.engine.model.memory import gib
from oaiserve.errors import StartupError
from oaiserve.system_memory import available_bytes


def refuse_unless_possible(spec: ModelSpec, options: EngineOptions, adaptable: Mapping[str, tuple[int, int]]) -> None:
    """Raise StartupError for the first option that the device or the model doesn't support.

    `adaptable` has the number of rows and columns of each module that adapters may name.
    """
    refuse_on_device(options, str(spec.device))
    if options.has_adapters and spec.state_shapes:
        raise StartupError(f"{options.adapters_flag} is not for '{spec.name}', which has layers that keep a state.")
    if options.adapters:
        refuse_unless_they_fit(options.adapters, adaptable)


def refuse_on_device(options: EngineOptions, device: str) -> None:
    """Raise StartupError for the first option that the device doesn't support."""
    is_on_cpu = device == "cpu"
    if options.kv_cache_dtype != "auto" and (options.kv_cache_dtype == "int8") != is_on_cpu:
        setting = f"--kv-cache-dtype {options.kv_cache_dtype}"
        raise StartupError(f"{setting} is for --device {'cuda' if is_on_cpu else 'cpu'}; the model is on {device}.")
    quantize = options.quantize
    for flag, other_device in (
        ("--exact", "cpu" if options.exact else ""),
        (f"--quantize {quantize}", {"none": "", "fp8": "cuda"}.get(quantize, "cpu")),
    ):
        if other_device and (other_device == "cpu") != is_on_cpu:
            raise StartupError(f"{flag} is for --device {other_device}; the model is on {device}.")
    if is_on_cpu and options.kv_cache_memory is not None and options.kv_cache_memory > (free := available_bytes()):
        raise StartupError(
            f"--kv-cache-memory is {options.kv_cache_memory}, but only {gib(free)} GiB are free on {device}."
        )
