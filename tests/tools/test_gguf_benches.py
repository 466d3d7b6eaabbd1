"""The GGUF files that benchmarks make, and the programs that they compile."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig

from tools.bench import prepare
from tools.bench.gguf_files import q4_k_m


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
