"""Rewrites the assertions of test files before a run of all tests, each file in one of the processes.

pytest keeps what it has rewritten. But in a fresh checkout, all processes of a run would rewrite the same files at the
same time, because they collect them in the same order.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

TESTS = Path(__file__).parent
OF_ALL_TESTS = "of_all_tests"


class Rewriting:
    """A plug-in of pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._of_all_tests = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        process: dict[str, Any] = getattr(config, "workerinput", {})
        if process.get(OF_ALL_TESTS) and not sys.dont_write_bytecode:
            number = int(process["workerid"].removeprefix("gw"))
            for file in sorted(TESTS.rglob("test_*.py"))[number :: process["workercount"]]:
                rewrite_file(file, config)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a process of pytest-xdist whether it runs all tests."""
        node.workerinput[OF_ALL_TESTS] = self._of_all_tests


def rewrite_file(file: Path, config: pytest.Config) -> None:
    """Rewrite a file where the import of the file will look for it, unless there is something already."""
    folder = rewrite.get_cache_dir(file)
    path = folder / f"{file.stem}{rewrite.PYC_TAIL}"
    if not path.exists():
        source_hash, code = rewrite._rewrite_test(file, config)
        folder.mkdir(parents=True, exist_ok=True)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, path)
