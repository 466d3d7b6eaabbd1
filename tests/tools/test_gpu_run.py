"""Sections of the GPU check run as processes: the end of each is reported, and none disturbs the others."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.gpu.pack import FOLDER_OF_KERNELS, SCRIPT, install, packages
from tools.gpu.run import LAST_LINES, run_all, run_one
from tools.gpu.section import parts
from tools.gpu.sections import NOT_ON_CPU, SECTIONS, Section

FIRST = Section("first", "none:run", 60)
WRITES = "import sys; open(sys.argv[1], 'w').write('{\"found\": 7}');"
HANGS = "import threading; threading.Event().wait()"


def command(code: str, *words: Path | str) -> list[str]:
    return [sys.executable, "-c", code, *map(str, words)]


def ended(code: str, folder: Path, limit_seconds: float = 60) -> dict[str, object]:
    return run_one(FIRST, lambda _section, out, _limit: command(code, out), folder, limit_seconds)


@pytest.mark.parametrize(
    ("code", "limit_seconds", "expected"),
    [
        (WRITES, 60, {"status": "done", "found": 7}),
        (WRITES + "import os; os.kill(os.getpid(), 9)", 60, {"status": "broke with exit code -9", "found": 7}),
        ("raise SystemExit(3)", 60, {"status": "broke with exit code 3"}),  # what was found before does not count
        (HANGS, 0.2, {"status": "ended after 0 s, its limit"}),
    ],
)
def test_the_result_of_a_section_is_what_it_has_found_and_how_it_ended(
    code: str, limit_seconds: float, expected: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "first.json").write_text('{"found": 1}')
    result = ended(code, tmp_path, limit_seconds)
    assert result.pop("seconds") == pytest.approx(0, abs=60)
    result.pop("problem", None)
    assert result == expected


def test_a_section_that_raises_keeps_its_results_and_reports_its_last_lines(tmp_path: Path) -> None:
    result = ended(WRITES + "print('x\\n' * 50); raise ValueError('the reason')", tmp_path)
    assert (result["status"], result["found"]) == ("broke with exit code 1", 7)
    assert str(result["problem"]).endswith("ValueError: the reason")
    assert len(str(result["problem"]).splitlines()) == LAST_LINES


def test_processes_that_a_section_has_started_end_with_it(tmp_path: Path) -> None:
    # The child holds the log open, as it would hold a device.
    ended(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {HANGS!r}])", tmp_path)
    began = time.monotonic()
    log = str(tmp_path / "first.log")
    while any(_has_open(process, log) for process in Path("/proc").iterdir() if process.name.isdigit()):
        assert time.monotonic() < began + 30


def _has_open(process: Path, name: str) -> bool:
    try:
        return any(str(file.readlink()) == name for file in (process / "fd").iterdir())
    except OSError:  # it is gone, or not ours
        return False


def test_other_sections_run_after_one_that_fails_and_none_for_longer_than_is_left(tmp_path: Path) -> None:
    codes = {"first": "raise SystemExit(2)", "second": WRITES}
    limits = []

    def run(section: Section, out: Path, limit_seconds: float) -> list[str]:
        limits.append(limit_seconds)
        return command(codes[section.name], out)

    results = dict(run_all([FIRST, Section("second", "none:run", 1000)], run, tmp_path, 100, at_once=1))
    assert [result["status"] for result in results.values()] == ["broke with exit code 2", "done"]
    assert limits[0] == 60
    assert 30 < limits[1] <= 100


def test_what_travels_is_all_that_the_device_machine_lacks() -> None:
    names = {one.partition("==")[0] for one in packages()}
    assert {"cyclopts", "starlette", "llguidance", "protobuf", "psutil", "transformers", "tokenizers"} <= names
    assert not {"torch", "numpy", "triton", "pip", "hf-xet"} & names
    words = install("3.12", Path("packages"))
    for platform in ("manylinux_2_24_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64", "any"):
        assert words[words.index(platform) - 1] == "--platform"


def test_a_section_says_why_it_does_not_run() -> None:
    gpu_section = Section("a", "none:run", 60, needs_gpu=True)
    assert list(parts(gpu_section, "cpu", quick=True)) == [{"problem": NOT_ON_CPU}]


def test_section_names_are_unique_and_checks_are_answers() -> None:
    names = [section.name for section in SECTIONS]
    assert len(set(names)) == len(names)
    assert all(section.call == "answers" for section in SECTIONS if section.is_check)


def test_sections_run_side_by_side(tmp_path: Path) -> None:
    """Each ends once the other has begun."""
    waits = """
import os, sys, time
open(sys.argv[1], "w")
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
"""
    others = {"a": "b", "b": "a"}

    def run(section: Section, out: Path, limit_seconds: float) -> list[str]:
        return command(waits, tmp_path / section.name, tmp_path / others[section.name])

    sections = [Section(name, "none:run", 60) for name in others]
    results = dict(run_all(sections, run, tmp_path, 100, at_once=2))
    assert [result["status"] for result in results.values()] == ["done", "done"]


# Writes results as the check does, and notes its arguments and what surrounds it.
PYTHON = """#!/bin/sh
case "$1" in -c) exit;; esac
echo "$2 $8" >> calls
cat COMMIT $TRITON_CACHE_DIR/*/__grp__* >> calls
results=$4
echo log > "$results/a.log"
echo '{"sections": {}}' > "$results/gpu_check.json"
echo text > "$results/gpu_check.md"
exit 1
"""


def test_the_packed_check_unpacks_once_and_returns_few_files(tmp_path: Path) -> None:
    script = tmp_path / "sources/tools/gpu/check.sh"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT.read_text())
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    pack = tmp_path / "sources/.pack"
    pack.mkdir()
    (pack / "COMMIT").write_text("a commit\n")
    (tmp_path / "packages").mkdir()
    (tmp_path / "kernels/KEY").mkdir(parents=True)
    (tmp_path / "kernels/KEY/__grp__write_kernel.json").write_text(f"{FOLDER_OF_KERNELS}/KEY\n")
    for name in ("packages", "kernels"):
        subprocess.run(["tar", "czf", pack / f"{name}.tar.gz", "-C", tmp_path, name], check=True)
    there = tmp_path / "there"
    out = tmp_path / "out"
    environment = {"PATH": os.environ["PATH"], "OUT": str(out), "PYTHON": str(python), "THERE": str(there)}
    for _ in range(2):
        done = subprocess.run(["sh", script, "figures"], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        assert {file.name for file in out.iterdir()} == {"gpu_check.json", "gpu_check.md", "logs.tar.gz"}
        assert done.stdout.splitlines()[-1].startswith("1 compiled kernels, of which 1 were packed")
        shutil.rmtree(out)
        (pack / "packages.tar.gz").unlink(missing_ok=True)  # so that a second unpacking would fail
    call = ["tools.gpu_check figures", "a commit", f"{there}/kernels/KEY"]
    assert (tmp_path / "sources/calls").read_text().splitlines() == call * 2
