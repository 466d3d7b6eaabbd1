"""The real command refuses a model's own code without a question, with and without a terminal, and stops at once."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import clean_environment

LIMIT_SECONDS = 300  # an import of torch on a busy machine


def serve(folder: Path, *, on_terminal: bool) -> tuple[int, str]:
    """Run `oaiserve serve FOLDER` and return its exit code and all that it wrote. Nothing is ever typed."""
    command = [sys.executable, "-m", "oaiserve", "serve", str(folder), "--port", "0", "--log-level", "error"]
    if not on_terminal:
        ended = subprocess.run(
            command, env=clean_environment(), capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
        )
        return ended.returncode, ended.stdout + ended.stderr
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, env=clean_environment(), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said, until = b"", time.monotonic() + LIMIT_SECONDS
    try:
        while time.monotonic() < until:
            try:
                said += os.read(ours, 4096)
            except OSError:  # the other end is closed: the process has ended
                break
        return process.wait(LIMIT_SECONDS), said.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(
    ("name", "change", "on_terminal"),
    [
        ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, True),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}, False),
    ],
    ids=["model, on a terminal", "tokenizer, without a terminal"],
)
def test_a_model_with_its_own_code_is_refused_without_a_question(
    name: str, change: dict[str, object], on_terminal: bool, small_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(small_model, tmp_path / "model")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    code, said = serve(folder, on_terminal=on_terminal)
    assert code == 2, said
    assert "[y/N]" not in said
    last = said.strip().splitlines()[-1]
    assert last.startswith("oaiserve: ")
    assert last.endswith("it needs code that comes with the model (auto_map), and oaiserve never runs such code")
    assert "Traceback" not in said
    assert not (tmp_path / "ran").exists()
