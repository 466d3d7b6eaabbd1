"""Reads sentence-transformers' files, which say how to make a model's vectors, and finds the model's task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oaiserve.checkpoints.source import ModelSource
from oaiserve.errors import StartupError

MODES = ("cls", "mean", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")
# The names of the file with the length at which sentence-transformers cuts texts.
_LENGTH_FILES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


@dataclass(frozen=True, slots=True)
class PoolingFiles:
    """The settings of an embedding model in sentence-transformers' files."""

    mode: str | None = None  # one of MODES, or None if the files name none
    dense_folders: tuple[str, ...] = ()  # folders of the linear layers after the pooling
    max_tokens: int | None = None  # tokens of a text
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    activation: str | None = None  # function from a cross-encoder's logit to its score


def read_score_files(source: ModelSource) -> PoolingFiles:
    """Read what sentence-transformers writes for a cross-encoder in newer versions. Raises StartupError."""
    settings = read_json(source, "config_sentence_transformers.json") or {}
    prompts, default = _prompts(source, settings)
    return PoolingFiles(prompts=prompts, default_prompt=default, activation=settings.get("activation_fn"))


def read_files(source: ModelSource) -> PoolingFiles:
    """Read all present files. Raises StartupError for unsupported settings."""
    modules = read_json(source, "modules.json")
    if modules is None:
        return PoolingFiles()
    settings = read_json(source, "config_sentence_transformers.json") or {}
    kind_of_model = settings.get("model_type") or "SentenceTransformer"
    if kind_of_model in ("MultiVectorEncoder", "SparseEncoder"):
        raise _unfit(source, f"it makes several vectors of a text, or sparse ones (a {kind_of_model})")
    mode = None
    dense_folders = []
    is_normalized = False
    for module in modules:
        package, _, kind = str(module["type"]).rpartition(".")
        folder = str(module.get("path", ""))
        if kind == "Transformer" and folder:
            raise _unfit(source, f"its transformer lies in the folder {folder!r}")
        if kind == "Pooling":
            mode = _pooling_mode(source, read_json(source, f"{folder}/config.json") or {})
        elif kind == "Dense" and not package.startswith("pylate."):
            if is_normalized:
                raise _unfit(source, "it has a linear layer after vectors got length 1 (Dense after Normalize)")
            dense_folders.append(folder)
        elif kind in ("Dense", "MLMTransformer", "SpladePooling"):
            raise _unfit(source, f"it makes several vectors of a text, or sparse ones (a module {module['type']})")
        elif kind == "LogitScore":
            raise _unfit(
                source,
                "it scores texts by the logits of two tokens (a module LogitScore), which --task generate serves by "
                "/v1/completions with logprobs",
            )
        elif kind == "Normalize":  # All vectors get length 1 anyway.
            is_normalized = True
        elif kind not in ("Transformer", "Dropout"):
            raise _unfit(
                source,
                f"its modules.json has a module {kind!r}; these are known: Transformer, Pooling, Dense, Normalize",
            )
    max_tokens = None
    for name in _LENGTH_FILES:
        if (length := read_json(source, f"sentence_{name}_config.json")) is not None:
            if length.get("do_lower_case"):
                raise _unfit(source, "its texts are to be lowercased first (do_lower_case), which is for its tokenizer")
            max_tokens = length.get("max_seq_length")
            break
    if max_tokens is None:  # newer versions write it here
        max_tokens = (read_json(source, "tokenizer_config.json") or {}).get("model_max_length")
    return PoolingFiles(mode, tuple(dense_folders), max_tokens, *_prompts(source, settings))


def _prompts(source: ModelSource, settings: dict[str, Any]) -> tuple[dict[str, str], str]:
    """Return the prompts by name, and the text of the default one. Raises StartupError."""
    prompts = {name: text for name, text in (settings.get("prompts") or {}).items() if isinstance(text, str)}
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise _unfit(source, f"its default prompt is {default!r}, which is none of its prompts")
    return prompts, prompts.get(default, "")


def read_json(source: ModelSource, name: str) -> Any:
    """Return the content of a JSON file of the model, or None without the file. Raises StartupError."""
    path = find_file(source, name)
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"The file {name} of '{source.location}' cannot be read: {error}") from error


def find_file(source: ModelSource, name: str) -> Path | None:
    """Return the path of a file of the model on this machine, or None without one."""
    path = Path(source.location) / name
    if path.is_file():
        return path
    return None


def _pooling_mode(source: ModelSource, config: dict[str, Any]) -> str:
    """Return the mode that turns the hidden states of a text into one vector. The file has its name, or a switch for
    each mode."""
    if not config.get("include_prompt", True):
        raise _unfit(source, "its prompts are left out of the pooling (include_prompt)")
    named = config.get("pooling_mode")
    names = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "weightedmean_tokens": "weightedmean"}
    switched = [name.removeprefix("pooling_mode_") for name, is_on in config.items() if is_on is True]
    if isinstance(named, str):
        modes = [named]
    else:
        modes = named or [names.get(name, name) for name in switched]
    modes = [mode for mode in modes if mode != "include_prompt"]
    if len(modes) != 1 or modes[0] not in MODES:
        shown = ", ".join(map(str, modes)) or "none"
        raise _unfit(source, f"its pooling mode is {shown}; one of these is possible: {', '.join(MODES)}")
    return str(modes[0])


def _unfit(source: ModelSource, reason: str) -> StartupError:
    return StartupError(f"'{source.location}' cannot be served for embeddings or scores: {reason}.")
