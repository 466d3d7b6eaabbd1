"""Count the test functions beside which threads run, in each folder. These may depend on the pace of threads:

    make test ARGS="-p tests.threads"

Python's threads count, except for those that were there before the first test. Threads of native pools don't count.

Polls and time limits in the code of tests are counted, too, also without a run:

    python -m tests.threads
"""

from __future__ import annotations

import ast
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath
from threading import Thread

import pytest

STARTED = "it or its fixtures started threads"
BESIDE = "threads of earlier tests are still there"
NONE = "there are no threads"
KINDS = (STARTED, BESIDE, NONE)
LIMITS = ("timeout", "timeout_seconds", "limit_seconds")  # parameters
WAITS = (
    "wait",
    "join",
    "result",
    "settimeout",
    "communicate",
    "create_connection",
)  # methods, with a limit by position


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
        terminalreporter.write_line(polls_and_limits())


def polls_and_limits() -> str:
    """Return how often tests poll, and set a time limit, as text.

    Limits are times of the real clock: a number, or a constant in seconds, that a call gets as `timeout`, or that
    something is waited for.
    """
    texts = [path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py"))]
    calls = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    num_polls = sum(isinstance(call.func, ast.Name) and call.func.id == "wait_until" for call in calls)
    num_lines = sum(text.count("\n") for text in texts)
    return f"{num_polls} polls, {sum(map(_has_limit, calls))} time limits, {num_lines:,} lines of tests"


def _has_limit(call: ast.Call) -> bool:
    if any(keyword.arg in LIMITS and _is_time(keyword.value) for keyword in call.keywords):
        return True
    return isinstance(call.func, ast.Attribute) and call.func.attr in WAITS and any(map(_is_time, call.args))


def _is_time(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_time(node.left) and _is_time(node.right)
    if isinstance(node, ast.Name | ast.Attribute):
        return (node.id if isinstance(node, ast.Name) else node.attr).endswith("SECONDS")
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


NUM_STARTED = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Threads())


if __name__ == "__main__":
    print(polls_and_limits())
