"""Sections of the GPU check run as processes: the end of each is reported, and none disturbs the others."""

import sys
import time
from pathlib import Path

import pytest

from tools.gpu.pack import packages
from tools.gpu.run import LAST_LINES, run_all, run_one
from tools.gpu.section import parts
from tools.gpu.sections import NO_TRITON, NOT_ON_CPU, SECTIONS, Section

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
    began, log = time.monotonic(), str(tmp_path / "first.log")
    while any(_has_open(process, log) for process in Path("/proc").iterdir() if process.name.isdigit()):
        assert time.monotonic() < began + 30


def _has_open(process: Path, name: str) -> bool:
    try:
        return any(str(file.readlink()) == name for file in (process / "fd").iterdir())
    except OSError:  # it is gone, or not ours
        return False


def test_other_sections_run_after_one_that_fails_and_none_for_longer_than_is_left(tmp_path: Path) -> None:
    codes, limits = {"first": "raise SystemExit(2)", "second": WRITES}, []

    def run(section: Section, out: Path, limit_seconds: float) -> list[str]:
        limits.append(limit_seconds)
        return command(codes[section.name], out)

    results = dict(run_all([FIRST, Section("second", "none:run", 1000)], run, tmp_path, 100))
    assert [result["status"] for result in results.values()] == ["broke with exit code 2", "done"]
    assert limits[0] == 60
    assert 30 < limits[1] <= 100


def test_what_travels_is_all_that_the_device_machine_lacks() -> None:
    names = {one.partition("==")[0] for one in packages()}
    assert {"cyclopts", "starlette", "llguidance", "protobuf", "psutil"} <= names
    assert not {"torch", "numpy", "tokenizers", "transformers", "triton", "pip"} & names


def test_a_section_says_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_section = Section("a", "none:run", 60, needs_gpu=True)
    assert list(parts(gpu_section, "cpu", quick=True)) == [{"problem": NOT_ON_CPU}]
    monkeypatch.setattr("tools.gpu.section.find_spec", lambda _: None)
    kernels = Section("b", "none:run", 60, needs_triton=True)
    assert list(parts(kernels, "cpu", quick=True)) == [{"problem": NO_TRITON, "off": {}}]
    assert list(parts(kernels, "cuda", quick=True)) == [{"problem": NO_TRITON, "off": {"triton": NO_TRITON}}]


def test_section_names_are_unique_and_correctness_comes_before_speed() -> None:
    names = [section.name for section in SECTIONS]
    assert len(set(names)) == len(names)
    kinds = [section.is_check for section in SECTIONS[1:]]
    assert kinds == sorted(kinds, reverse=True)
