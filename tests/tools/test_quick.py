"""`make quick` runs the tests that import what changed, the nearest first, and says what it left out."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import quick

SOURCES = {
    "oaiserve/__init__.py": "",
    "oaiserve/blocks.py": "",
    "oaiserve/scheduler.py": "def f():\n    from oaiserve import blocks",
    "oaiserve/loop.py": "import oaiserve.scheduler",
    "oaiserve/other.py": "",
    "oaiserve/families/__init__.py": 'import_module(f"{__name__}.{name}")',
    "oaiserve/families/llama.py": "",
    "oaiserve/pages.py": 'FOLDER = "static"',
    "tests/conftest.py": "from oaiserve.other import a",
    "tests/pages.py": "",
    "tests/engines.py": "from oaiserve.loop import Loop",
    "tests/test_blocks.py": "from oaiserve.blocks import Block",
    "tests/test_engine.py": "from tests.engines import engine",
    "tests/test_families.py": "from oaiserve import families",
    "tests/test_features.py": 'PAGE = "docs/features.md"',
    "tests/test_links.py": "from tests.pages import PAGES",
    "tests/test_pages.py": "import oaiserve.pages",
}


def affected(*changed: str) -> dict[str, int]:
    return quick.affected(set(changed), SOURCES)


def test_tests_that_import_a_changed_file_come_by_their_distance() -> None:
    assert affected("oaiserve/blocks.py") == {"tests/test_blocks.py": 1, "tests/test_engine.py": 4}
    assert list(affected("oaiserve/blocks.py")) == ["tests/test_blocks.py", "tests/test_engine.py"]


def test_the_distance_is_that_to_the_nearest_change() -> None:
    assert affected("oaiserve/blocks.py", "tests/engines.py") == {"tests/test_blocks.py": 1, "tests/test_engine.py": 1}


def test_a_changed_test_runs_first() -> None:
    assert list(affected("oaiserve/blocks.py", "tests/test_engine.py")) == [
        "tests/test_engine.py",
        "tests/test_blocks.py",
    ]


def test_importers_of_a_deleted_file_are_affected() -> None:
    sources = {"tests/test_gone.py": "from oaiserve.gone import a"}

    assert quick.affected({"oaiserve/gone.py", "tests/test_old.py"}, sources) == {"tests/test_gone.py": 1}


def test_a_package_runs_with_each_of_its_modules() -> None:
    assert affected("oaiserve/families/__init__.py") == {"tests/test_families.py": 1}
    assert affected("oaiserve/__init__.py").keys() >= {"tests/test_blocks.py", "tests/test_pages.py"}


def test_a_package_that_imports_modules_by_name_imports_all_of_its_own() -> None:
    assert affected("oaiserve/families/llama.py") == {"tests/test_families.py": 2}


def test_tests_import_the_conftest_above_them() -> None:
    assert affected("tests/conftest.py") == dict.fromkeys(
        (path for path in SOURCES if path.startswith("tests/test_")), 1
    )
    assert set(affected("oaiserve/other.py").values()) == {2}


def test_a_page_has_the_tests_of_all_pages_and_those_that_name_it() -> None:
    assert affected("docs/features.md") == {"tests/test_features.py": 1, "tests/test_links.py": 1}


def test_another_file_is_read_by_code_that_names_its_folder() -> None:
    assert affected("oaiserve/static/base.css") == {"tests/test_pages.py": 2}


def test_words_of_code_do_not_name_a_file_without_an_extension() -> None:
    sources = {"tests/test_ci.py": 'FILE = ".ci/run"', "tests/test_run.py": "def run():\n    run()"}

    assert quick.affected({".ci/run"}, sources) == {"tests/test_ci.py": 1}


def test_tests_in_the_folder_of_the_change_come_first_among_equals() -> None:
    sources = dict.fromkeys(("tests/a/test_b.py", "tests/engine/test_a.py"), "import oaiserve.engine.blocks")

    assert list(quick.affected({"oaiserve/engine/blocks.py"}, sources)) == [
        "tests/engine/test_a.py",
        "tests/a/test_b.py",
    ]


def test_tests_that_start_servers_come_last_among_equals() -> None:
    sources = dict.fromkeys(("tests/e2e/test_a.py", "tests/test_b.py"), "import oaiserve.blocks")

    assert list(quick.affected({"oaiserve/blocks.py"}, sources)) == ["tests/test_b.py", "tests/e2e/test_a.py"]


def run_in(folder: Path, seconds: float) -> str:
    """Run the tests of a folder with the plug-in, in the order b, a, and return what pytest prints."""
    (folder / "pytest.ini").touch()  # so that pytest looks for none further up
    for name in ("a", "b"):
        (folder / f"test_{name}.py").write_text(f"def test_{name}() -> None:\n    pass\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-p",
        "tools.quick",
        "test_b.py",
        "test_a.py",
    ]
    environment = {**os.environ, "PYTHONPATH": str(quick.ROOT), quick.UNTIL: str(time.monotonic() + seconds)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_tests_run_in_the_order_of_their_files(tmp_path: Path) -> None:
    output = run_in(tmp_path, seconds=60)

    assert "2 passed" in output
    assert output.index("test_b PASSED") < output.index("test_a PASSED")
    assert "Left out" not in output


def test_tests_that_there_is_no_time_for_are_named(tmp_path: Path) -> None:
    output = run_in(tmp_path, seconds=-1)

    assert "2 skipped" in output
    assert "Left out, since no time was left: 2 tests of 2 files: test_b.py, test_a.py" in output


def test_only_the_nearest_files_run_and_farther_ones_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run_tests(files: Sequence[str], until: float) -> int:
        ran.extend(files)
        return 1

    monkeypatch.setattr(quick.style, "read", lambda: SOURCES)
    monkeypatch.setattr(quick, "MAX_FILES", 1)
    monkeypatch.setattr(quick, "run_tests", run_tests)

    assert quick.main(["oaiserve/blocks.py"]) == 1

    assert ran == ["tests/test_blocks.py"]
    assert "Left out, since 1 files are nearer: 1 files: tests/test_engine.py" in capsys.readouterr().out


def test_without_a_change_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quick, "changed_files", set)

    assert quick.main([]) == 0

    assert "0 changed files" in capsys.readouterr().out
