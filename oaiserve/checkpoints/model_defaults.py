"""Decides which defaults for requests come from the model. Stdlib only. The values are not checked here.

The model's own files come first. If they set no sampling parameters, the publisher's recommendation for models of this
name applies.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from oaiserve.checkpoints.bad_file import BadFile, reason_of
from oaiserve.checkpoints.checkpoint import CONFIG, GENERATION
from oaiserve.checkpoints.recommended_sampling import Recommendation, recommended
from oaiserve.checkpoints.source import ModelSource

log = logging.getLogger(__name__)

LENGTHS = ("max_new_tokens", "max_length")
# Sampling parameters that have another name in GGUF files, where llama.cpp's converter writes them.
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_GGUF = "general.sampling."


class ModelDefaults(NamedTuple):
    """The defaults for requests that come from a model, and the recommendation that supplied some of them, if any."""

    values: Mapping[str, Any]
    recommendation: Recommendation | None = None


def model_defaults(source: ModelSource, names: Collection[str], measured: Mapping[str, Any]) -> ModelDefaults:
    """Return the defaults of a local model: the `measured` ones, or else its publisher's. What its files state takes
    precedence.

    A recommendation only works as a whole, so it doesn't apply if the files state any of the parameters in `names`.
    """
    stated = stated_defaults(source, names)
    if measured or not stated.keys().isdisjoint(names):
        recommendation = None
    else:
        recommendation = recommended(_names_of(source))
    if recommendation is not None:
        return ModelDefaults({**recommendation.values, **stated}, recommendation)
    return ModelDefaults({**measured, **stated})


def _names_of(source: ModelSource) -> Iterator[str]:
    """Yield the names of a model, the most reliable first: those in its metadata, then those of its repository and
    file."""
    if source.gguf_file is not None:
        values = source.checkpoint.head.values
        parts = [values.get(f"general.{part}") for part in ("basename", "size_label", "finetune")]
        yield from (name for name in (values.get("general.name"),) if isinstance(name, str))
        yield "-".join(part for part in parts if isinstance(part, str))
        yield source.path.stem
    folder = source.folder.resolve()
    cached = (part.split("--")[-1] for part in folder.parts if part.startswith("models--"))
    yield from (*cached, folder.name)


def stated_defaults(source: ModelSource, names: Iterable[str]) -> dict[str, Any]:
    """Return the sampling parameters with these names, and the length limits, that the files of a local model state.

    A generation_config.json in a GGUF file's folder takes precedence over the file's metadata. As in vLLM, `do_sample`
    is ignored: it is meant for transformers' `generate`, and clients of a server expect sampling.
    """
    if source.gguf_file is not None:
        file_names = [GENERATION]
    else:
        file_names = [GENERATION, CONFIG]
    settings: Mapping[str, Any] = {}
    for name in [name for name in file_names if (source.folder / name).is_file()][:1]:
        try:
            settings = source.checkpoint.object(name)
        except (BadFile, OSError) as error:
            path = source.folder / name
            log.warning("The defaults in %s are not used, because it cannot be read: %s", path, reason_of(error))
    stated = {name: settings[name] for name in names if settings.get(name) is not None}
    limits = {name: settings[name] for name in LENGTHS if type(settings.get(name)) is int and settings[name] > 0}
    return _in_metadata(source, names) | stated | limits


def _in_metadata(source: ModelSource, names: Iterable[str]) -> dict[str, Any]:
    """Return the sampling parameters in a GGUF file's metadata. 32-bit floats are rounded, so that 0.7 is 0.7 again."""
    if source.gguf_file is None:
        return {}
    values = source.checkpoint.head.values
    keys = {name: _GGUF + _GGUF_NAMES.get(name, name) for name in names}
    defaults = {name: values[key] for name, key in keys.items() if values.get(key) is not None}
    if values.get(f"{_GGUF}penalty_last_n") == 0:  # llama.cpp then considers no earlier token, so it penalizes nothing.
        defaults.pop("repetition_penalty", None)
    return {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in defaults.items()}
