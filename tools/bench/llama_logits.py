"""Takes from llama.cpp what it computes for a text: the logits of the second half of each chunk of its tokens."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from tools.bench import prepare


def llama_logits(path: Path, text: str, chunk_tokens: int, num_chunks: int) -> dict[tuple[int, ...], Tensor]:
    """Return what llama.cpp makes of a text with a GGUF file, by the token ids of each chunk.

    Logits are float32 [tokens, vocab], as `read_logits` says.
    """
    with TemporaryDirectory() as folder:
        given, found = Path(folder) / "text", Path(folder) / "logits"
        given.write_text(text, encoding="utf-8")
        sizes = ("-c", str(chunk_tokens), "-b", str(chunk_tokens), "--chunks", str(num_chunks))
        command = [str(prepare.llama_cpp() / "llama-perplexity"), "-m", str(path), "-f", str(given), *sizes]
        subprocess.run([*command, "--save-all-logits", str(found)], check=True, capture_output=True)
        return read_logits(found.read_bytes())


def read_logits(content: bytes) -> dict[tuple[int, ...], Tensor]:
    """Return the logits of each chunk in a file of llama-perplexity, by its token ids.

    They are log-probabilities. Rows of the first half are zeros, and so is the last row, because the file has none.
    """
    chunk_tokens, vocab, num_chunks = struct.unpack_from("<3i", content, 8)
    ids = np.frombuffer(content, "<i4", num_chunks * chunk_tokens, 20).reshape(num_chunks, chunk_tokens)
    first = chunk_tokens // 2
    # A row is its scale and its least log-probability, and then a number of 16 bits for each token.
    width = 4 + vocab + vocab % 2
    start = 20 + ids.nbytes
    rows = np.frombuffer(content, "<u2", offset=start).reshape(num_chunks, chunk_tokens - 1 - first, width)
    found = {}
    for of_chunk, chunk in zip(rows, ids, strict=True):
        scales, least = np.ascontiguousarray(of_chunk[:, :4]).view("<f4").T[:, :, None]
        logits = torch.zeros(chunk_tokens, vocab)
        logits[first:-1] = torch.from_numpy(of_chunk[:, 4 : 4 + vocab] * scales + least)
        found[tuple(chunk.tolist())] = logits
    return found
