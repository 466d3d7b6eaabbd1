"""Prints the test files that take the most CPU time: make test ARGS="-p tests.cpu"

On a busy machine a test lasts longer, but takes few more CPU seconds. They include those of child processes, which
count once they have ended: a server that several files share counts for the file in which it ends.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests import forking

MOST_FILES = 40


class CpuSeconds:
    """A plug-in of pytest. Reports carry the seconds from the worker processes of pytest-xdist."""

    def __init__(self) -> None:
        self._before = (0.0, 0.0)  # CPU seconds of this process and of its children, at the last report
        self._by_file: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def _passed(self) -> list[float]:
        """Return the seconds since the last call."""
        times = os.times()
        now = (times.user + times.system, times.children_user + times.children_system + forking.cpu_seconds)
        passed = [after - before for before, after in zip(self._before, now, strict=True)]
        self._before = now
        return passed

    def pytest_collection_finish(self) -> None:
        self._passed()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        report = yield
        report.cpu_seconds = self._passed()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        total = self._by_file[report.nodeid.partition("::")[0]]
        # If a worker process crashes, pytest-xdist makes the report.
        for place, seconds in enumerate(getattr(report, "cpu_seconds", ())):
            total[place] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds of tests and of their child processes")
        rows = sorted(self._by_file.items(), key=lambda row: -sum(row[1]))
        totals = [sum(seconds[place] for _, seconds in rows) for place in range(2)]
        for name, (own, of_children) in [("all", totals), *rows[:MOST_FILES]]:
            terminalreporter.write_line(f"{own:8.1f} {of_children:8.1f}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuSeconds())
