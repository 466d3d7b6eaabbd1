"""The programs of llama.cpp that benchmarks compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench import prepare


def test_programs_are_compiled_again_where_their_options_or_what_they_include_have_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    header, commands = tmp_path / "included.h", []
    header.write_text("// first\n")
    monkeypatch.setattr(prepare, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(prepare, "TILES_HEADER", header)
    monkeypatch.setattr(prepare, "_llama_source", lambda: tmp_path)
    monkeypatch.setattr(prepare.shutil, "which", lambda name: name)
    monkeypatch.setattr(prepare, "_run", lambda *command: commands.append(command))
    (tmp_path / "cache/llama-build").mkdir(parents=True)

    def times() -> int:
        prepare.llama_cpp()
        return len(commands) // 2

    assert (times(), times()) == (1, 1)
    assert (tmp_path / "cache/included.h").read_text() == "// first\n"
    header.write_text("// second\n")
    assert (times(), times()) == (2, 2)
    assert (tmp_path / "cache/included.h").read_text() == "// second\n"
    monkeypatch.setitem(prepare.LLAMA_OPTIONS, "GGML_NATIVE", "OFF")
    assert (times(), times()) == (3, 3)
