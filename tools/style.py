"""Checks that the code reads easily: one assignment per statement, few conditional expressions, and plain words.

python -m tools style prints each fault with its file and line, and exits with 1 if there are any. It also prints advice
on the words of changed files, which is no fault. `make check` runs it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tools import wording
from tools.changes import changed_files

ROOT = Path(__file__).parents[1]
FOLDERS = ("oaiserve", "loadtest", "tests", "tools", "deploy")
MOST_CONDITIONALS = 15  # per 1,000 lines of oaiserve/
ODD_WORDS = "tests/tools/test_wording.py"  # has them on purpose


class Fault(NamedTuple):
    path: str
    line: int
    text: str


def packed_assignments(tree: ast.Module) -> Iterator[ast.Assign]:
    """Yield the tuple assignments that neither swap values nor unpack one value: `a, b = x, y`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            values = sorted(map(ast.unparse, node.value.elts))
            for target in node.targets:
                if isinstance(target, ast.Tuple | ast.List) and sorted(map(ast.unparse, target.elts)) != values:
                    yield node


def packed(sources: Mapping[str, str]) -> Iterator[Fault]:
    """Yield the packed assignments in these files, whose sources are given by their paths."""
    for path, source in sources.items():
        for node in packed_assignments(ast.parse(source)):
            yield Fault(path, node.lineno, f"one assignment per statement, but this has several: {ast.unparse(node)}")


def conditional(sources: Mapping[str, str]) -> list[Fault]:
    """Return the longest conditional expressions of these files, as many as there are too many."""
    expressions: list[tuple[int, Fault]] = []
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.IfExp):
                text = ast.unparse(node)
                expressions.append((len(text), Fault(path, node.lineno, f"write it as an if statement: {text}")))
    num_lines = sum(source.count("\n") for source in sources.values())
    num_too_many = max(0, len(expressions) - num_lines * MOST_CONDITIONALS // 1000)
    return [fault for _, fault in sorted(expressions, reverse=True)[:num_too_many]]


def read() -> dict[str, str]:
    """Return the sources that are checked, by their paths from the root."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def pages() -> dict[str, str]:
    """Return the pages of documentation, by their paths from the root."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def main() -> int:
    sources = read()
    product = {path: source for path, source in sources.items() if path.startswith("oaiserve/")}
    worded = {path: source for path, source in (sources | pages()).items() if path != ODD_WORDS}
    changed = changed_files()
    for path, line, text in wording.advice({path: source for path, source in worded.items() if path in changed}):
        print(f"{path}:{line}: advice: {text}")
    faults = [*packed(sources), *conditional(product), *wording.errors(worded)]
    for path, line, text in faults:
        print(f"{path}:{line}: {text}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
