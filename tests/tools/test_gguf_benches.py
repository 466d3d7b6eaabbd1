"""What the benchmarks of GGUF files read of other programs, and the files that they make."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig

from tools.bench import prepare
from tools.bench.gguf_files import q4_k_m
from tools.bench.gguf_in_process import LOADS, rates_in
from tools.bench.llama_logits import read_logits

TABLES = """
main: n_kv_max = 3072, n_batch = 2048, n_ubatch = 512, flash_attn = 1, n_threads = 2, n_threads_batch = 2

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   512 |      1 |    1 |    513 |    1.600 |   320.00 |    0.025 |    40.00 |    1.625 |   315.69 |
|    16 |     32 |    1 |     96 |    0.200 |   319.00 |    0.800 |    41.00 |    1.000 |    96.00 |
|    16 |     32 |    8 |    768 |    1.600 |   318.00 |    3.000 |    85.33 |    4.600 |   166.96 |
|    16 |     32 |   32 |   3072 |    6.400 |   317.00 |   10.000 |   102.40 |   16.400 |   187.32 |
"""


def test_rates_are_read_from_the_tables_of_llama_batched_bench() -> None:
    assert rates_in(TABLES) == dict(zip(LOADS, (41.0, 85.33, 102.4, 320.0), strict=True))


def test_logits_are_read_from_the_file_of_llama_perplexity() -> None:
    chunk_tokens, vocab, num_chunks = 6, 3, 2
    ids = np.arange(12, dtype="<i4")
    content = b"_logits_" + struct.pack("<3i", chunk_tokens, vocab, num_chunks) + ids.tobytes()
    for row in range(num_chunks * 2):
        content += struct.pack("<2f4H", 0.5, -4.0, row, 1, 2, 0)
    found = read_logits(content)
    assert list(found) == [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)]
    second = torch.zeros(6, 3)
    second[3], second[4] = torch.tensor([-3.0, -3.5, -3.0]), torch.tensor([-2.5, -3.5, -3.0])
    assert torch.equal(found[6, 7, 8, 9, 10, 11], second)


def test_matrices_have_the_formats_that_llama_cpp_gives_them() -> None:
    kind_of = q4_k_m(LlamaConfig(num_hidden_layers=16, tie_word_embeddings=True))
    more = {layer for layer in range(16) if kind_of(f"blk.{layer}.ffn_down.weight") is Kind.Q6_K}
    assert more == {layer for layer in range(16) if kind_of(f"blk.{layer}.attn_v.weight") is Kind.Q6_K}
    assert more == {0, 1, 4, 7, 10, 13, 14, 15}
    assert kind_of("blk.0.attn_q.weight") is Kind.Q4_K
    assert kind_of("token_embd.weight") is Kind.Q6_K
    untied = q4_k_m(LlamaConfig(num_hidden_layers=16, tie_word_embeddings=False))
    assert (untied("token_embd.weight"), untied("output.weight")) == (Kind.Q4_K, Kind.Q6_K)


def test_programs_are_compiled_again_where_their_options_or_what_they_include_have_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    header, commands = tmp_path / "included.h", []
    header.write_text("// first\n")
    monkeypatch.setattr(prepare, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(prepare, "TILES_HEADER", header)
    monkeypatch.setattr(prepare, "IK_SOURCE", str(tmp_path))
    monkeypatch.setattr(prepare.shutil, "which", lambda name: name)
    monkeypatch.setattr(prepare, "_run", lambda *command: commands.append(command))
    (tmp_path / "cache/ik-llama-build").mkdir(parents=True)

    def times() -> int:
        prepare.ik_llama_cpp()
        return len(commands) // 2

    assert (times(), times()) == (1, 1)
    assert (tmp_path / "cache/included.h").read_text() == "// first\n"
    header.write_text("// second\n")
    assert (times(), times()) == (2, 2)
    assert (tmp_path / "cache/included.h").read_text() == "// second\n"
    monkeypatch.setitem(prepare.LLAMA_OPTIONS, "GGML_NATIVE", "OFF")
    assert (times(), times()) == (3, 3)
