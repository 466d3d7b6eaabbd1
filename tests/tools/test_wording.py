"""The check of words reports what few readers understand at once, in comments, strings and pages."""

import pytest

from tools import wording


@pytest.mark.parametrize(
    "line",
    [
        "# The lock, for whoever writes.",
        "# Runs so many steps.",
        "# Of streams, marks are removed.",
        "SIZE = 3  # of a block",
        "SIZE = 3  # that are kept",
        "SIZE = 3  # by which it grows",
        "text = 'made anew each time'",
        'def f():\n    """Return what is wrong."""',
    ],
)
def test_odd_words_of_code_are_reported_with_their_line(line: str) -> None:
    (fault,) = wording.faults({"a.py": f"\n{line}\n"})
    assert fault[:2] == ("a.py", 2 + line.count("\n"))


@pytest.mark.parametrize(
    "line",
    [
        "SIZE = 3  # rows of a block",
        "# So many clients wait that the queue is full.",
        "# Of three ways, the first is the fastest.",
        "# The number of rows, most\n# of which are empty.",
        "anew = whoever = 1",
        "text = 'anew'",
    ],
)
def test_plain_words_are_not_reported(line: str) -> None:
    assert list(wording.faults({"a.py": f"{line}\n"})) == []


def test_pages_are_checked_line_by_line() -> None:
    page = "# Title\n\nOf images, only the first is read, whoever sends it.\n"
    assert [line for _, line, _ in wording.faults({"docs/a.md": page})] == [3, 3]
