"""Keeps how long each test file takes, so that the next run starts the longest files first.

All tests of a file run in one process, so a long file that starts last runs while the other processes are idle. A run
of the whole suite keeps its seconds in the user's cache, where runs in other checkouts find them. seconds.json has the
slow files for machines without that cache:

    python -m tests.durations

renews it from the last run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from oaiserve.storage.private import cache_folder

ROOT = Path(__file__).parents[1]
COMMITTED = Path(__file__).parent / "seconds.json"
LEAST_SECONDS = 10.0  # files that take less are not in seconds.json
IN_WORKER = "seconds_by_file"

Seconds = dict[str, float]  # by the path of a test file from the root, such as tests/test_cli.py


def cached() -> Path:
    return cache_folder() / "tests/seconds.json"


def known() -> Seconds:
    """Return the seconds of the last run on this machine, and those of seconds.json for other files."""
    found: Seconds = json.loads(COMMITTED.read_text())
    try:
        return found | json.loads(cached().read_text())
    except (OSError, ValueError):  # There has been no run yet, or the file is damaged.
        return found


def keep(measured: Seconds) -> None:
    """Replace the seconds of the measured files that still exist, in the cache."""
    merged = {name: seconds for name, seconds in (known() | measured).items() if (ROOT / name).exists()}
    path = cached()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(as_json(merged))
    unfinished.replace(path)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def as_json(by_file: Seconds) -> str:
    """Return a line for each file, the slowest first."""
    order = sorted(by_file.items(), key=lambda one: (-one[1], one[0]))
    return json.dumps({name: round(seconds, 1) for name, seconds in order}, indent=0) + "\n"


class Durations:
    """A plug-in of pytest that sorts the tests of a run by the seconds of their files, and keeps the new seconds."""

    def __init__(self, config: pytest.Config) -> None:
        # All processes of a run need the same order, so they get the seconds that the first one has read.
        self._known: Seconds = getattr(config, "workerinput", {}).get(IN_WORKER) or known()
        self._measured: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass the seconds to a process of pytest-xdist."""
        node.workerinput[IN_WORKER] = self._known

    @pytest.hookimpl(trylast=True)  # after other plugins have deselected tests
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: -self._known.get(file_of(item.nodeid), 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._measured[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keep the seconds after a run of the whole suite. Others have run parts of files."""
        config = session.config
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
        if is_whole and self._measured and not hasattr(config, "workerinput"):
            keep(self._measured)


if __name__ == "__main__":
    COMMITTED.write_text(as_json({name: one for name, one in known().items() if one >= LEAST_SECONDS}))
