"""The check of style reports statements that are hard to read, and only these."""

import ast

import pytest

from tools import style


@pytest.mark.parametrize("statement", ["a, b = x, y", "a, self.b = 1, []", "(a, b), c = x, y", "a, b = b, a + b"])
def test_several_assignments_in_a_statement_are_reported(statement: str) -> None:
    fault = f"one assignment per statement, but this has several: {ast.unparse(ast.parse(statement))}"
    assert list(style.packed({"a.py": f"\n{statement}\n"})) == [("a.py", 2, fault)]


@pytest.mark.parametrize(
    "statement", ["a, b = b, a", "a[0], a[1] = a[1], a[0]", "a, b = x", "a = x, y", "a, *b = f(x, y)"]
)
def test_swap_and_unpacking_are_no_faults(statement: str) -> None:
    assert list(style.packed({"a.py": statement})) == []


@pytest.mark.parametrize(
    "block",
    [
        "class A:\n    def f(self):\n        {}",
        "if a:\n    pass\nelse:\n    {}",
        "try:\n    pass\nexcept OSError:\n    pass\nfinally:\n    {}",
        "try:\n    pass\nexcept OSError:\n    {}",
        "match a:\n    case 1:\n        {}",
        "async def f():\n    async with a:\n        async for b in c:\n            {}",
    ],
)
def test_assignments_within_other_statements_are_reported(block: str) -> None:
    assert len(list(style.packed({"a.py": block.format("a, b = x, y")}))) == 1


@pytest.mark.parametrize(
    ("source", "status", "printed"),
    [
        ("# Runs so many steps.\n", 0, "a.py:1: advice: 'so many': a number, this many, or the parameter's name\n"),
        ("# Runs anew.\n", 1, "a.py:1: 'anew': again\n"),
        ("a, b = 1, 2\n", 1, "a.py:1: one assignment per statement, but this has several: a, b = (1, 2)\n"),
    ],
)
def test_errors_fail_and_advice_does_not(
    source: str, status: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(style, "read", lambda: {"a.py": source})
    monkeypatch.setattr(style, "pages", dict)
    monkeypatch.setattr(style, "changed_files", lambda: {"a.py"})

    assert style.main() == status

    assert capsys.readouterr().out == printed


def test_advice_is_for_changed_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(style, "read", lambda: {"a.py": "# Runs so many steps.\n"})
    monkeypatch.setattr(style, "pages", dict)
    monkeypatch.setattr(style, "changed_files", set)

    style.main()

    assert capsys.readouterr().out == ""


def test_sources_are_read_from_all_folders() -> None:
    paths = style.read().keys()
    assert {path.split("/")[0] for path in paths} == set(style.FOLDERS)
    assert "oaiserve/app.py" in paths
