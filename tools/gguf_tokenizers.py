"""Compares tokenizers of GGUF files with those of the models: python -m tools.gguf_tokenizers LLAMA_CPP

LLAMA_CPP is a folder of llama.cpp's sources. Its `models` are GGUF files that have a vocabulary alone, and beside some
there are texts, and the ids that the model's own tokenizer has for them. Prints one line per vocabulary, and exits with
1 if a tokenizer has other ids.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import gguf
from transformers import PreTrainedTokenizerFast

from oaiserve.engine.text.gguf_splits import split_as_named

_BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"


def main(llama_cpp: Path) -> int:
    logging.disable(logging.WARNING)
    differs = False
    for path in sorted((llama_cpp / "models").glob("ggml-vocab-*.gguf")):
        if Path(f"{path}.out").exists():
            result = _compare(path)
            differs |= "differ" in result
            print(f"{path.stem.removeprefix('ggml-vocab-'):16} {result}", flush=True)
    return int(differs)


def _compare(path: Path) -> str:
    fields = gguf.GGUFReader(path).fields
    kind, name = (
        fields[f"tokenizer.ggml.{key}"].contents() if f"tokenizer.ggml.{key}" in fields else None
        for key in ("model", "pre")
    )
    if kind not in ("gpt2", "gemma4"):
        return f"not compared: its tokenizer is of the kind '{kind}'"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    if kind == "gpt2":
        split_as_named(tokenizer, name)
    texts = Path(f"{path}.inp").read_text().split(_BETWEEN_TEXTS)
    expected = [[int(number) for number in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    found = [tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in texts[: len(expected)]]
    differing = [text for text, own, other in zip(texts, found, expected, strict=False) if own != other]
    return (
        f"{len(differing)} of {len(expected)} texts differ, such as {differing[0]!r}"
        if differing
        else (f"equal in {len(expected)} texts")
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
