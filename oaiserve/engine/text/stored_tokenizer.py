"""Stores a tokenizer in the start cache, so that a later start need not build it again.

The whole definition of the Rust tokenizer is stored, so ids and texts are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import msgspec
from tokenizers import Tokenizer as RustTokenizer

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.errors import StartupError
from oaiserve.storage.private import NotPrivate
from oaiserve.storage.start_cache import Subject, of_record, recall, remember, subject
from oaiserve.storage.start_warnings import Warned, repeat

log = logging.getLogger(__name__)

_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_PACKAGES = ("oaiserve", "transformers", "tokenizers")


@dataclass(slots=True, kw_only=True)
class TokenizerParts:
    """The stored data of a tokenizer, apart from its definition. The attributes are named as in transformers."""

    length: int
    split_special_tokens: bool
    eos_token_ids: list[int]  # end tokens that its files name, the main one first
    special_tokens_map: dict[str, str]
    chat_template: str | dict[str, str] | None
    response_template: Mapping[str, Any] | None
    fill_texts: list[str] = field(default_factory=list)  # only from a GGUF file: see `fill_tokens`


@dataclass(slots=True, kw_only=True)
class StoredTokenizer(TokenizerParts):
    backend_tokenizer: RustTokenizer

    @property
    def parts(self) -> TokenizerParts:
        return TokenizerParts(**{each.name: getattr(self, each.name) for each in fields(TokenizerParts)})


def tokenizer_subject(checkpoint: Checkpoint) -> Subject | None:
    """Return the subject of a tokenizer: its folder or GGUF file, or None if it depends on other files, too."""
    model = checkpoint.path
    if model.suffix == ".gguf" and model.is_file():
        packages = ("oaiserve", "tokenizers")
        return subject("tokenizer", model, (), options={}, packages=packages, digest=checkpoint.head_digest)
    if not model.is_dir() or (model / "additional_chat_templates").exists():
        return None
    return subject("tokenizer", model, _FILES, options={}, packages=_PACKAGES)


def recall_tokenizer(subject: Subject) -> StoredTokenizer:
    """Return the tokenizer as an earlier start loaded it, and repeat the warnings of that start. Raises
    NotRemembered."""
    record = recall(subject)
    with of_record(record.path):
        definition = bytes(record.content[record.start : record.start + record.data["bytes"]])
        parts = msgspec.convert(record.data["parts"], TokenizerParts)
        named = {field.name: getattr(parts, field.name) for field in fields(parts)}
        tokenizer = StoredTokenizer(backend_tokenizer=RustTokenizer.from_buffer(definition), **named)
    repeat(record.warnings)
    return tokenizer


def stored(tokenizer: Any) -> StoredTokenizer:
    """Return the data of a transformers tokenizer. Raises StartupError if it is not a Rust one."""
    if not getattr(tokenizer, "is_fast", False):
        name = type(tokenizer).__name__
        raise StartupError(f"The tokenizer {name} has no Rust form (tokenizer.json), which this server needs.")
    template = getattr(tokenizer, "response_template", None)
    return StoredTokenizer(
        backend_tokenizer=tokenizer.backend_tokenizer,
        length=len(tokenizer),
        split_special_tokens=tokenizer.split_special_tokens,
        eos_token_ids=[] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
        special_tokens_map=tokenizer.special_tokens_map,
        chat_template=tokenizer.chat_template,
        response_template=dict(template) if isinstance(template, Mapping) and template else None,
    )


def remember_tokenizer(subject: Subject, tokenizer: StoredTokenizer, warnings: Sequence[Warned]) -> None:
    """Write a tokenizer to the start cache, if that is writable, along with the warnings of loading it."""
    definition = tokenizer.backend_tokenizer.to_str().encode()
    parts = asdict(tokenizer.parts)
    try:
        remember(subject, lambda: {"parts": parts, "bytes": len(definition)}, definition, warnings)
    except (NotPrivate, OSError, TypeError) as error:
        log.debug("The next start will make the tokenizer again: %s", error)
