"""Rejects bad files of models: sizes that contradict the weights, and files that aren't models. Stdlib only."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST_POSITIONS = 2**24  # Some models allocate a table with a row for each position.
_MOST_COUNT = 2**14  # limit of counts, such as the number of experts, of which Doge's configuration has this many
_MOST_LABELS = 2**17  # transformers makes a name for each label.
_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "block_count"}
_COUNT = re.compile(r"layers?$|experts?$|(layer|expert)_count$")
_SIZE = re.compile(r"(_size|_dim|_rank|_inner|_embd|_model|_heads?|_length|head_count(_kv)?|dimension_count)$")
_NO_SIZE = re.compile(r"(position|context|seq|window|max|chunk|sample|original|block_size|group_size)")
_ID = re.compile(r"(^|_)(id|index)(s|es)?$")
MOST_INTEGER = 2**63 - 1  # Libraries compute with 64-bit integers.
_AT_LEAST_ONE = _LAYERS | {
    *("vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head"),
    *("max_position_embeddings", "n_positions", "context_length"),
}
# The possible names of numbers whose products are the sizes of matrices, or of the matrices of all layers.
_WIDTH = ("hidden_size", "n_embd", "d_model", "embedding_length")
_INNER = ("intermediate_size", "feed_forward_length", "ffn_dim", "n_inner")
_HEADS = ("num_attention_heads", "head_count", "n_head")
_HEAD_WIDTH = ("head_dim", "key_length")
_MATRICES = ((_WIDTH, ("vocab_size",)), (_WIDTH, _INNER, tuple(_LAYERS)), (_WIDTH, _HEADS, _HEAD_WIDTH, tuple(_LAYERS)))
# The first bytes, in lower case, of files that are not models, with what each of them is.
_OTHER_CONTENTS = (
    (
        b"version https://git-lfs.github.com/spec/",
        "it is only a pointer of Git LFS; 'git lfs pull' in its folder fetches the file itself",
    ),
    *(
        (
            start,
            "it is a web page, not the file of a model: the address of a download from the hub has /resolve/ where "
            "that of its page has /blob/",
        )
        for start in (b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--")
    ),
    *(
        (start, f"it is an archive ({kind}): unpack it first")
        for start, kind in ((b"pk\x03\x04", "zip"), (b"\x1f\x8b", "gzip"), (b"\xfd7zxz", "xz"), (b"7z\xbc\xaf", "7z"))
    ),
    *(
        (start, "its format is GGML, which GGUF replaced in 2023: take the GGUF file of the same model")
        for start in (b"lmgg", b"fmgg", b"tjgg", b"algg")
    ),
)
_MOST_START_BYTES = 64
_MOST_PER_BYTE = 4  # most numbers in a byte of a file: the smallest formats use two bits for each


class BadFile(Exception):
    """A file is broken or not supported. The message continues a sentence after the file's name."""


def reason_of(error: BadFile | OSError) -> str:
    """Return the part of the message of an error that follows the file's name."""
    return str(getattr(error, "strerror", error))


def refuse_other_content(path: Path) -> None:
    """Raise BadFile if a file begins like something that isn't part of a model, such as a web page that was saved under
    the model's name, or a pointer of Git LFS in a repository that was cloned without it."""
    with path.open("rb") as file:
        start = file.read(_MOST_START_BYTES).lower().lstrip(b"\xef\xbb\xbf \t\r\n")
    for content, reason in _OTHER_CONTENTS:
        if start.startswith(content):
            raise BadFile(reason)


def check_numbers(config: Mapping[str, Any], num_tensors: int, num_bytes: int, prefix: str = "") -> None:
    """Raise BadFile for a size or count that is too large for the number of tensors or their bytes.

    Sizes, counts and ids are recognized by their names. Any other key may have any value here, as most are notes that
    nobody reads.
    """
    each = [(key, one) for key, value in config.items() for one in (value if isinstance(value, list) else [value])]
    for key, value in each:
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            check_numbers(value, num_tensors, num_bytes, f"{name[:100]}.")
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        last = key.rpartition(".")[2]
        most = None
        if last in _LAYERS:
            most = num_tensors
        elif _COUNT.search(last):
            most = max(_MOST_COUNT, num_tensors)
        elif _SIZE.search(last) and not _NO_SIZE.search(last):
            most = 8 * num_bytes
        elif last.endswith(("_positions", "position_embeddings", "context_length")):
            most = _MOST_POSITIONS
        elif last == "num_labels":
            most = _MOST_LABELS
        elif isinstance(value, int) and _ID.search(last):
            most = MOST_INTEGER
        if most is not None and value > most:
            raise _too_large(name, value, most)
        if last in _AT_LEAST_ONE and value < 1:
            raise BadFile(f"its {name[:100]} is {value}, but must be at least 1")
    _check_products({key.rpartition(".")[2]: value for key, value in config.items()}, num_bytes)


def refuse_too_large(name: str, value: Any) -> None:
    """Raise BadFile for an integer, or a list with one, that libraries can't compute with."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, int) and each > MOST_INTEGER:
            raise _too_large(name, each, MOST_INTEGER)


def _too_large(name: str, value: float, most: int) -> BadFile:
    return BadFile(f"its {name[:100]} is {value:.6g}, but can be at most {most}")


def _check_products(numbers: Mapping[str, Any], num_bytes: int) -> None:
    """Raise BadFile if matrices are larger than the files: each size may be possible, but not their product."""
    for names in _MATRICES:
        factors = [(name, numbers[name]) for of_kind in names for name in of_kind if type(numbers.get(name)) is int]
        if len(factors) == len(names) and math.prod(value for _, value in factors) > _MOST_PER_BYTE * num_bytes:
            shown = " and ".join(f"{name} {value}" for name, value in factors)
            raise BadFile(f"its weights are {num_bytes} bytes, which is too little for {shown[:200]}")
