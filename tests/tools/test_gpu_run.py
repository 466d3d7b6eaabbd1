"""Sections of the GPU check run as processes: the end of each is reported, and none disturbs the others."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.gpu.run import LAST_LINES, run_all, run_one
from tools.gpu.section import write
from tools.gpu.sections import SECTIONS, Section

FIRST, SECOND = (Section(name, "no.module", 60) for name in ("first", "second"))
WRITES = "import sys; open(sys.argv[1], 'w').write('{\"found\": 7}');"
HANGS = "import threading; threading.Event().wait()"


def running(code: str) -> Sequence[str]:
    return (sys.executable, "-c", code)


def ended(code: str, folder: Path, limit_seconds: float = 60) -> dict[str, object]:
    return run_one(FIRST, lambda _section, out, _limit: [*running(code), str(out)], folder, limit_seconds)


def test_the_result_of_a_section_is_what_it_has_found(tmp_path: Path) -> None:
    result = ended(WRITES, tmp_path)
    assert result.pop("seconds") == pytest.approx(0, abs=60)
    assert result == {"status": "done", "found": 7}


def test_a_section_that_raises_keeps_its_results_and_reports_its_last_lines(tmp_path: Path) -> None:
    result = ended(WRITES + "print('x\\n' * 50); raise ValueError('the reason')", tmp_path)
    assert result["status"] == "broke with exit code 1"
    assert result["found"] == 7
    assert str(result["problem"]).endswith("ValueError: the reason")
    assert len(str(result["problem"]).splitlines()) == LAST_LINES


def test_a_section_that_dies_keeps_its_results(tmp_path: Path) -> None:
    result = ended(WRITES + "sys.stdout.close(); import os; os.kill(os.getpid(), 9)", tmp_path)
    assert (result["status"], result["found"]) == ("broke with exit code -9", 7)


def test_a_section_that_hangs_is_killed_at_its_limit(tmp_path: Path) -> None:
    assert ended(HANGS, tmp_path, 0.2)["status"] == "ended after 0 s, its limit"


def test_processes_that_a_section_has_started_end_with_it(tmp_path: Path) -> None:
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {HANGS!r}])"
    # The child holds the log open, as it would hold a device.
    began = time.monotonic()
    ended(code, tmp_path)
    log = str(tmp_path / "first.log")
    while any(_has_open(process, log) for process in Path("/proc").iterdir() if process.name.isdigit()):
        assert time.monotonic() < began + 30


def _has_open(process: Path, name: str) -> bool:
    try:
        return any(str(file.readlink()) == name for file in (process / "fd").iterdir())
    except OSError:  # it is gone, or not ours
        return False


def test_the_result_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "first.json").write_text('{"found": 1}')
    assert "found" not in ended("raise SystemExit(3)", tmp_path)


def test_other_sections_run_after_one_that_fails(tmp_path: Path) -> None:
    codes = {"first": "raise SystemExit(2)", "second": WRITES}
    results = run_all([FIRST, SECOND], lambda section, out, _: [*running(codes[section.name]), str(out)], tmp_path, 60)
    assert {name: result["status"] for name, result in results} == {
        "first": "broke with exit code 2",
        "second": "done",
    }


def test_sections_that_measure_no_time_run_side_by_side(tmp_path: Path) -> None:
    """Each section waits for the other, so that they would hang one after the other."""
    code = """
import pathlib, sys
mine, other = (pathlib.Path(sys.argv[2]) / name for name in sys.argv[3:])
mine.touch()
while not other.exists(): pass
"""
    sections = [Section(name, "no.module", 30, side_by_side=True) for name in ("first", "second")]
    names = {"first": ("a", "b"), "second": ("b", "a")}
    results = run_all(
        sections,
        lambda section, out, _: [*running(code), str(out), str(tmp_path), *names[section.name]],
        tmp_path,
        30,
    )
    assert [result["status"] for _, result in results] == ["done", "done"]


def test_sections_for_which_the_budget_has_no_time_are_reported_as_left_out(tmp_path: Path) -> None:
    results = dict(run_all([FIRST, SECOND], lambda *_: running("raise SystemExit(9)"), tmp_path, 5))
    assert [result["status"] for result in results.values()] == ["left out", "left out"]
    assert "5 s were left of the 5 s" in results["first"]["problem"]


def test_a_section_gets_no_more_time_than_is_left(tmp_path: Path) -> None:
    limits = []

    def command(_section: Section, _out: Path, limit_seconds: float) -> Sequence[str]:
        limits.append(limit_seconds)
        return running("")

    list(run_all([FIRST, Section("second", "no.module", 1000)], command, tmp_path, 100))
    assert limits[0] == 60
    assert 30 < limits[1] <= 100


def test_a_result_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    write(path, {"found": [1, 2]})
    assert json.loads(path.read_text()) == {"found": [1, 2]}
    assert [file.name for file in tmp_path.iterdir()] == ["first.json"]


def test_section_names_are_unique_and_correctness_comes_before_speed() -> None:
    names = [section.name for section in SECTIONS]
    assert len(set(names)) == len(names)
    kinds = [section.side_by_side for section in SECTIONS[1:]]
    assert kinds == sorted(kinds, reverse=True)
