"""Runs the tests that a change can break, for at most 60 seconds: python -m tools.quick

A test file can break if it imports a changed file, directly or through other files. The files that differ from main
count as changed, or those that are named. The nearest tests run first: the fewer imports lead from a test to a change,
the nearer it is. What there is no time for is left out and named at the end; `make test` runs everything.

Imports do not show the servers and tools that tests start as processes. For a file that is not Python, a test is near
if it names that file or its folder.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import pytest

from tools import style
from tools.changes import ROOT, changed_files

MAX_SECONDS = 60.0
LAST_TESTS_SECONDS = 15.0  # time to finish the tests that have begun
MAX_FILES = 50  # each costs time when tests are collected, also if there is none left to run it
NUM_NAMED = 8  # names printed of the files left out
MAX_PROCESSES = 4
UNTIL = "QUICK_UNTIL"  # the variable with the time, on the monotonic clock, at which the last test may begin
NO_TIME = "no time was left"
NO_TESTS = 5  # pytest's exit status if markers leave no test
READERS_OF_PAGES = ("tests/pages.py", "tests/test_site.py")  # they read all pages, without their names
# An import of any module of a package: import_module(f"oaiserve.commands.{name}")
_BY_NAME = re.compile(r'import_module\(f"([\w.]+|\{__name__\})\.\{')


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(path: str, source: str) -> Iterator[str]:
    """Yield the names that a file imports. They are modules, packages, and what `from` takes from these."""
    for statement in style.statements(ast.parse(source, path).body):
        names = []
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            names = [f"{statement.module}.{alias.name}" for alias in statement.names]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    for package in _BY_NAME.findall(source):
        yield package.replace("{__name__}", module_name(path)) + ".*"


def importers(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the paths of the files that import each name. Tests import the conftest.py of each folder above them."""
    by_name: defaultdict[str, set[str]] = defaultdict(set)
    for path, source in sources.items():
        for name in imported(path, source):
            by_name[name].add(path)
        if path.startswith("tests/"):
            for folder in PurePosixPath(path).parents:
                by_name[module_name(f"{folder}/conftest.py")].add(path)
    return by_name


def readers(path: str, sources: Mapping[str, str]) -> set[str]:
    """Return the tests, and the files of the same top folder, that name a file or else the nearest of its folders."""
    *folders, file = PurePosixPath(path).parts
    name = file if "." in file else path  # `run` says too little
    patterns = [rf"(?<![\w.-]){re.escape(name)}(?![\w-])"]
    patterns += [rf"[\"'/]{re.escape(folder)}[\"'/]" for folder in reversed(folders)]
    tops = ("tests/", f"{PurePosixPath(path).parts[0]}/")
    texts = {each: source for each, source in sources.items() if each.startswith(tops)}
    for pattern in patterns:
        if named := {each for each, text in texts.items() if re.search(pattern, text)}:
            return named
    return set()


def distances(changed: set[str], sources: Mapping[str, str]) -> dict[str, int]:
    """Return the number of imports from each file to the nearest change."""
    by_name = importers(sources)
    nearest = {path for path in changed if path.endswith(".py")}
    if any(path.endswith(".md") for path in changed):
        nearest |= set(READERS_OF_PAGES) & sources.keys()
    distance_by_path = dict.fromkeys(nearest, 0)
    users = {reader for path in changed - nearest for reader in readers(path, sources)}
    distance = 0
    while nearest or users:
        for path in nearest:
            name = module_name(path)
            package = name.rpartition(".")[0]
            users |= by_name.get(name, set()) | by_name.get(f"{package}.*", set())
        distance += 1
        nearest = users - distance_by_path.keys()
        distance_by_path |= dict.fromkeys(nearest, distance)
        users = set()
    return distance_by_path


def num_shared_folders(path: str, other: str) -> int:
    """Return how many folders below the top two paths share: 2 for tests/a/b/test_c.py and oaiserve/a/b/c.py."""
    number = 0
    for folder, other_folder in zip(PurePosixPath(path).parts[1:-1], PurePosixPath(other).parts[1:-1], strict=False):
        if folder != other_folder:
            break
        number += 1
    return number


def affected(changed: set[str], sources: Mapping[str, str]) -> dict[str, int]:
    """Return the distance of each test file that a change can break, the nearest first."""
    tests = {
        path: distance
        for path, distance in distances(changed, sources).items()
        if path in sources and path.startswith("tests/") and PurePosixPath(path).name.startswith("test_")
    }

    def order(path: str) -> tuple[int, bool, int, str]:
        starts_servers = path.startswith("tests/e2e/")
        return tests[path], starts_servers, -max(num_shared_folders(path, each) for each in changed), path

    return {path: tests[path] for path in sorted(tests, key=order)}


def run_tests(files: Sequence[str], until: float) -> int:
    """Run the tests of these files in this order. None begins after `until`."""
    processes = str(min(MAX_PROCESSES, os.cpu_count() or 1))
    spread = ("--numprocesses", processes, "--dist", "loadfile", "--no-loadscope-reorder")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.quick", "-m", "not kernels and not real", *spread]
    status = subprocess.run([*command, *files], cwd=ROOT, env={**os.environ, UNTIL: str(until)}).returncode
    return 0 if status == NO_TESTS else status


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Keep the order of the files, which tests/conftest.py would change."""
    places = {item: place for place, item in enumerate(items)}
    yield
    items.sort(key=places.__getitem__)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() > float(os.environ[UNTIL]):
        pytest.skip(NO_TIME)  # A test that never ran counts neither as passed nor as failed; the summary reports it.


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """Print no letter for a test that is left out."""
    return ("skipped", "", "") if report.skipped and NO_TIME in str(report.longrepr) else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if NO_TIME in str(report.longrepr)]
    files = dict.fromkeys(report.nodeid.partition("::")[0] for report in skipped)
    if files:
        terminalreporter.write_line(f"Left out, since {NO_TIME}: {len(skipped)} tests of {named(list(files))}")


def named(files: Sequence[str]) -> str:
    more = f" and {len(files) - NUM_NAMED} more" if len(files) > NUM_NAMED else ""
    return f"{len(files)} files: {', '.join(files[:NUM_NAMED])}{more}"


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "changed", nargs="*", metavar="FILE", help="a changed file (default: all that differ from main)"
    )
    arguments = parser.parse_args(argv)
    changed = set(arguments.changed) or changed_files()
    tests = affected(changed, style.read())
    print(f"{len(changed)} changed files, {len(tests)} test files that they can break", flush=True)
    if not tests:
        return 0
    nearest = list(tests)[:MAX_FILES]
    farther = list(tests)[MAX_FILES:]
    status = run_tests(nearest, until=began + MAX_SECONDS - LAST_TESTS_SECONDS)
    if farther:
        print(f"Left out, since {MAX_FILES} files are nearer: {named(farther)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
