"""The list of the laboratory's commands has each of its programs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.__main__ import COMMANDS
from tools.markdown import write_json

ROOT = Path(__file__).parents[2]
# Programs that others of these start, or that run in environments of their own.
PARTS = {
    "tools",
    "tools.arm.answers",
    "tools.attack.neighbour",
    "tools.bench.engine_figures",
    "tools.gpu.resources",
    "tools.gpu.section",
    "tools.gpu.worker",
}


def test_the_list_has_the_commands_that_there_are() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for path in (ROOT / "tools").rglob("*.py")
        if 'if __name__ == "__main__"' in path.read_text() and "scripts" not in path.parts
    }
    assert modules - PARTS == {f"tools.{name}" for name in COMMANDS}


def test_a_command_runs_by_its_name_in_the_list() -> None:
    command = [sys.executable, "-m", "tools", "clients", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Runs the first examples of real clients" in done.stdout


def test_results_are_written_with_what_they_are_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--quick"])
    write_json(tmp_path / "a/results.json", {"rows": [1], "machine": "another"})
    record = json.loads((tmp_path / "a/results.json").read_text())
    assert record.keys() == {"name", "command", "created", "machine", "version", "rows"}
    assert (record["machine"], record["rows"]) == ("another", [1])
    assert record["command"].endswith(" --quick")


def test_the_first_page_of_the_gpu_check_names_each_of_its_files() -> None:
    page = (ROOT / "tools/gpu/__init__.py").read_text()
    files = [path.stem for path in (ROOT / "tools/gpu").glob("[!_]*.*")]
    assert [name for name in files if not re.search(rf"\b{name}\b", page)] == []
