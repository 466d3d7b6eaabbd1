"""Reads a tokenizer from the files of a folder, with transformers."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from oaiserve.engine.text.stored_tokenizer import StoredTokenizer, stored
from oaiserve.errors import StartupError


def load_tokenizer(folder: Path) -> StoredTokenizer:
    """Load a tokenizer. Raises what transformers raises, and StartupError for one without a Rust form, or with a
    tokenizer.json that can't be read."""
    from transformers import AutoTokenizer  # This takes seconds to import.

    kind: Any = AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        _refuse_unreadable(folder / "tokenizer.json")
        models = [path.name for path in folder.glob("*.model")]
        of_tiktoken = isinstance(error, ValueError) and "tiktoken" in str(error)
        if not of_tiktoken or not models or find_spec("sentencepiece") is not None:
            raise
        raise ImportError(  # transformers takes a file that it can't read for one of tiktoken's
            f"it is only in sentencepiece's format ({models[0]}). Add the tokenizer.json of the model, or install the "
            "package that reads this format: pip install sentencepiece"
        ) from error
    path = folder / "chat_template.json"  # older multimodal checkpoints have this file
    if getattr(tokenizer, "chat_template", None) is None and path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            tokenizer.chat_template = content.get("chat_template")
        else:
            tokenizer.chat_template = None
    return stored(tokenizer)


def _refuse_unreadable(path: Path) -> None:
    """Raise StartupError for a tokenizer.json that the tokenizers library can't read, with the position that it
    names."""
    if not path.is_file():
        return
    try:
        RustTokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself for all its errors.
        raise StartupError(f"'{path}' cannot be used: {error}.") from error
