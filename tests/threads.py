"""Count the test functions beside which threads run, in each folder. These may depend on the pace of threads:

    make test ARGS="-p tests.threads"

Python's threads count, except for those that were there before the first test. Threads of native pools don't count.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from threading import Thread

import pytest

STARTED = "it or its fixtures started threads"
BESIDE = "threads of earlier tests are still there"
NONE = "there are no threads"
KINDS = (STARTED, BESIDE, NONE)


class Threads:
    """A plug-in of pytest. Each process counts its own tests, and the first process adds them up."""

    def __init__(self) -> None:
        self._start = Thread.start
        self._num_started = 0
        self._before_tests: set[Thread] = set()
        self._kinds: dict[str, str] = {}  # by test function

    def start(self, thread: Thread) -> None:
        self._num_started += 1
        self._start(thread)

    def pytest_sessionstart(self) -> None:
        Thread.start = lambda thread: self.start(thread)

    def pytest_sessionfinish(self) -> None:
        Thread.start = self._start

    def pytest_collection_finish(self) -> None:
        self._before_tests = set(threading.enumerate())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[NUM_STARTED] = self._num_started
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        is_beside = bool(set(threading.enumerate()) - self._before_tests)
        try:
            return (yield)
        finally:
            has_started = self._num_started > item.stash[NUM_STARTED]
            item.user_properties.append(("threads", STARTED if has_started else BESIDE if is_beside else NONE))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the kind of a test function, whose parameters may differ in it."""
        kinds = [str(kind) for name, kind in report.user_properties if name == "threads"]
        if report.when == "call" and kinds:
            function = report.nodeid.partition("[")[0]
            self._kinds[function] = min(*kinds, self._kinds.get(function, NONE), key=KINDS.index)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: dict[str, Counter[str]] = {}
        for function, kind in self._kinds.items():
            folder = str(PurePath(function.partition("::")[0]).parent)
            folders.setdefault(folder, Counter())[kind] += 1
        totals = Counter(self._kinds.values())
        terminalreporter.section("test functions with threads")
        terminalreporter.write_line(f"{'started':>8} {'beside':>8} {'of':>8}")
        for folder, kinds in [*sorted(folders.items()), ("all", totals)]:
            terminalreporter.write_line(f"{kinds[STARTED]:8} {kinds[BESIDE]:8} {kinds.total():8} {folder}")


NUM_STARTED = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Threads())
