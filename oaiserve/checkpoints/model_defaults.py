"""Reads the defaults for requests from a model's own files. Stdlib only. The values are not checked here."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from oaiserve.checkpoints import gguf
from oaiserve.checkpoints.source import ModelSource

log = logging.getLogger(__name__)

LENGTHS = ("max_new_tokens", "max_length")
# Sampling parameters that have another name in GGUF files, where llama.cpp's converter writes them.
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_GGUF = "general.sampling."


def stated_defaults(source: ModelSource, names: Iterable[str]) -> dict[str, Any]:
    """Return the sampling parameters of these names, and the limits of answers, that the files of a local model state.

    A generation_config.json in a GGUF file's folder takes precedence over the file's metadata. As in vLLM, `do_sample`
    is ignored: it is meant for transformers' `generate`, and clients of a server expect sampling.
    """
    if source.gguf_file is not None:
        file_names = ["generation_config.json"]
    else:
        file_names = ["generation_config.json", "config.json"]
    paths = [path for name in file_names if (path := source.folder / name).is_file()]
    try:
        if paths:
            settings = json.loads(paths[0].read_text(encoding="utf-8"))
        else:
            settings = {}
    except (OSError, ValueError) as error:
        log.warning("The defaults in %s are not used, because it cannot be read: %s", paths[0], error)
        settings = {}
    settings = settings if isinstance(settings, dict) else {}
    stated = {name: settings[name] for name in names if settings.get(name) is not None}
    limits = {name: settings[name] for name in LENGTHS if type(settings.get(name)) is int and settings[name] > 0}
    return _in_metadata(source, names) | stated | limits


def _in_metadata(source: ModelSource, names: Iterable[str]) -> dict[str, Any]:
    """Return the sampling parameters in a GGUF file's metadata. 32-bit floats are rounded to the intended decimals."""
    if source.gguf_file is None:
        return {}
    values = gguf.read_values(source.path)
    keys = {name: _GGUF + _GGUF_NAMES.get(name, name) for name in names}
    defaults = {name: values[key] for name, key in keys.items() if values.get(key) is not None}
    if values.get(f"{_GGUF}penalty_last_n") == 0:  # llama.cpp looks back at no token, so it penalizes nothing.
        defaults.pop("repetition_penalty", None)
    return {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in defaults.items()}
