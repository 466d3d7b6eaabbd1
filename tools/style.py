"""Checks that the code reads easily: one assignment per statement, and plain words.

python -m tools style prints each fault with its file and line, and exits with 1 if there are any. It also prints advice
on the words of changed files, which is no fault. `make check` runs it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tools import wording
from tools.changes import changed_files

ROOT = Path(__file__).parents[1]
FOLDERS = ("oaiserve", "loadtest", "tests", "tools", "deploy")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields of statements that hold other statements
ODD_WORDS = ("tests/tools/test_style.py", "tests/tools/test_wording.py")  # have them on purpose


class Fault(NamedTuple):
    path: str
    line: int
    text: str


def statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the statements of a block and those within them, without their expressions, which are most of a tree."""
    for statement in body:
        yield statement
        for block in BLOCKS:
            yield from statements(getattr(statement, block, ()))


def packed_assignments(tree: ast.Module) -> Iterator[ast.Assign]:
    """Yield the tuple assignments that neither swap values nor unpack one value: `a, b = x, y`."""
    for node in statements(tree.body):
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
    worded = {path: source for path, source in (sources | pages()).items() if path not in ODD_WORDS}
    changed = changed_files()
    for path, line, text in wording.advice({path: source for path, source in worded.items() if path in changed}):
        print(f"{path}:{line}: advice: {text}")
    faults = [*packed(sources), *wording.errors(worded)]
    for path, line, text in faults:
        print(f"{path}:{line}: {text}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
