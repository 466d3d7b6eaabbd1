"""Warns of tokens that a model's files name and that its vocabulary lacks, such as an end token. Stdlib only."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.checkpoint import CONFIG, GENERATION
from oaiserve.checkpoints.source import ModelSource

log = logging.getLogger(__name__)

_IN_GGUF = "tokenizer.ggml."
_ROLES = ("bos", "eos", "pad", "eot", "eom", "padding", "unknown", "unk", "seperator", "sep", "cls", "mask")
_ENDS = ("eos", "eot")
_NONE = (-1, 2**32 - 1)  # values that files have for a missing token; the second is -1 read as unsigned


def warn_of_missing_tokens(source: ModelSource, vocab_size: int, end_ids: Collection[int]) -> None:
    """Log a line for each token that the files of a local model name but a vocabulary of this size doesn't have.

    `end_ids` are the tokens that end an answer. If there are none, the line for an end token says that answers don't
    end.
    """
    for file, key, role, value in _named(source):
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None or token_id in _NONE or (type(token_id) is int and 0 <= token_id < vocab_size):
                continue
            effect = "it is ignored"
            if role in _ENDS and not end_ids:
                effect += ", and no other token ends an answer, so each goes on to its limit of tokens"
            log.warning(
                "%s in %s is %s, but must be the id of a token, from 0 to %d: %s",
                key,
                file,
                str(token_id)[:100],
                vocab_size - 1,
                effect,
            )


def _named(source: ModelSource) -> Iterator[tuple[str, str, str, Any]]:
    """Yield the file, key, role and value of each setting that names one or more tokens."""
    if source.gguf_file is not None:
        yield from _in_settings(source.path.name, source.checkpoint.head.values, _IN_GGUF)
    else:
        config = _object(source, CONFIG)
        text = config.get("text_config")
        of_text = {key: value for key, value in text.items() if key not in config} if isinstance(text, Mapping) else {}
        yield from _in_settings(CONFIG, {**of_text, **config}, "")
    yield from _in_settings(GENERATION, _object(source, GENERATION), "")


def _in_settings(file: str, settings: Mapping[str, Any], beginning: str) -> Iterator[tuple[str, str, str, Any]]:
    for role in _ROLES:
        for ending in ("_token_id", "_token_ids"):
            key = f"{beginning}{role}{ending}"
            if key in settings:
                yield file, key, role, settings[key]


def _object(source: ModelSource, name: str) -> Mapping[str, Any]:
    """Return the object in a file of a model's folder, or an empty one if it can't be read. Other code reports that."""
    try:
        return source.checkpoint.object(name)
    except (BadFile, OSError):
        return {}
