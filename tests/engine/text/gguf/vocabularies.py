"""Small vocabularies as the metadata of GGUF files have them."""

from typing import Any

from tokenizers import pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def metadata(model: str, tokens: list[str], architecture: str = "llama", **settings: Any) -> dict[str, Any]:
    values = {"model": model, "tokens": tokens} | settings
    return {"general.architecture": architecture} | {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def byte_level(pre: str | None, merges: tuple[str, ...] = ("h e",), *more: str, **settings: Any) -> dict[str, Any]:
    """Return a byte-level vocabulary with these merges, and then more tokens."""
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in merges), *more]
    named = {} if pre is None else {"pre": pre}
    return metadata("gpt2", tokens, merges=list(merges), **named, **settings)
