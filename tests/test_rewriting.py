"""Test files are rewritten before they are collected, by one of the processes of a run."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.assertion import rewrite

from tests import rewriting


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with five test files and another one, in place of the tests."""
    for number in range(5):
        (tmp_path / f"test_{number}.py").write_text(f"def test_number():\n    assert {number} == 5\n")
    (tmp_path / "helpers.py").write_text("assert False")
    monkeypatch.setattr(rewriting, "TESTS", tmp_path)
    return tmp_path


def process(config: pytest.Config, **workerinput: object) -> Any:
    """Return the settings of a process of pytest-xdist, with which the plug-in begins."""
    return SimpleNamespace(stash=config.stash, getini=config.getini, args_source=None, workerinput=workerinput)


def test_each_file_is_rewritten_by_one_process(
    written: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_process: list[list[str]] = []
    monkeypatch.setattr(rewriting, "rewrite_file", lambda file, _: by_process[-1].append(file.name))
    for number in range(2):
        by_process.append([])
        rewriting.Rewriting(process(request.config, workerid=f"gw{number}", workercount=2, of_all_tests=True))
    assert by_process == [["test_0.py", "test_2.py", "test_4.py"], ["test_1.py", "test_3.py"]]
    rewriting.Rewriting(process(request.config, workerid="gw0", workercount=2, of_all_tests=False))
    assert len(by_process[-1]) == 2, "a run of some tests rewrites what it collects"


def test_a_file_that_was_rewritten_is_not_rewritten_when_it_is_imported(
    written: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written / "test_0.py"
    rewriting.rewrite_file(file, request.config)
    monkeypatch.setattr(rewrite, "_rewrite_test", None)
    rewriting.rewrite_file(file, request.config)
    hook = request.config.pluginmanager.rewrite_hook
    spec = importlib.util.spec_from_file_location("test_0", file, loader=hook)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    hook.exec_module(module)
    with pytest.raises(AssertionError, match="assert 0 == 5"):
        module.test_number()
