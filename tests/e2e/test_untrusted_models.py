"""The real command refuses a model's own code without a question, with and without a terminal, and stops at once."""

import json
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.conftest import clean_environment

LIMIT_SECONDS = 300  # an import of torch on a busy machine


def serve_on_terminal(folder: Path) -> tuple[int, str]:
    """Run `oaiserve serve FOLDER` and return its exit code and all that it wrote. Nothing is ever typed."""
    command = [sys.executable, "-m", "oaiserve", "serve", str(folder), "--port", "0", "--log-level", "error"]
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


def test_a_model_with_its_own_code_is_refused_without_a_question(small_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(small_model, tmp_path / "model")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    code, said = serve_on_terminal(folder)
    assert code == 2, said
    assert "[y/N]" not in said
    last = said.strip().splitlines()[-1]
    assert last.startswith("oaiserve: ")
    assert last.endswith("it needs code that comes with the model (auto_map), and oaiserve never runs such code")
    assert "Traceback" not in said
    assert not (tmp_path / "ran").exists()
