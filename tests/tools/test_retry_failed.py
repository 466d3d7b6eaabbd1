"""CI's second try of failed tests: which are tried, and how they are counted."""

import sys
from pathlib import Path

import pytest

from tools import retry_failed

# Fails until it has run as often as its name says.
FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({tests}))
def test_flaky(number):
    runs = Path(f"runs-{{number}}")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert len(runs.read_text()) > {failures}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # Importing Hypothesis takes longer than these tests.
    monkeypatch.setattr(retry_failed, "FAILED", tmp_path / ".pytest_cache/v/cache/lastfailed")
    monkeypatch.setattr(retry_failed, "RETRIED", tmp_path / "build/retried.txt")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def run(project: Path, failures: int, tests: int = 1) -> int:
    (project / "test_flaky.py").write_text(FLAKY.format(failures=failures, tests=tests))
    return retry_failed.run([sys.executable, "-m", "pytest", "-q"])


def test_passing_tests_are_run_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(project, failures=0) == 0
    assert (project / "runs-0").read_text() == "x"
    assert retry_failed.total() == 0
    assert capsys.readouterr().out == "retried: 0\n"


def test_a_test_that_passes_the_second_time_is_counted(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(project, failures=1, tests=2) == 0
    assert retry_failed.total() == 0
    assert capsys.readouterr().out.endswith(
        "retried: 2\n  test_flaky.py::test_flaky[0]\n  test_flaky.py::test_flaky[1]\n"
    )


def test_a_test_that_fails_twice_fails_the_run(project: Path) -> None:
    assert run(project, failures=2) == 1
    assert (project / "runs-0").read_text() == "xx"


def test_more_than_three_failures_are_not_tried_again(project: Path) -> None:
    assert run(project, failures=1, tests=4) == 1
    assert (project / "runs-3").read_text() == "x"


def test_runs_that_did_not_reach_their_end_are_not_tried_again(project: Path) -> None:
    (project / "test_broken.py").write_text("import missing_module\n")
    assert retry_failed.run([sys.executable, "-m", "pytest", "-q"]) == 2
    assert not retry_failed.RETRIED.exists()


def test_more_than_three_retries_of_all_runs_fail(project: Path) -> None:
    for number in range(4):
        assert run(project, failures=1) == 0
        (project / "runs-0").unlink()
        assert retry_failed.total() == (1 if number == 3 else 0)
