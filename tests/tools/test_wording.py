"""Ordinary English passes the check of words. A few words are errors, and others are advice."""

import pytest

from tools import wording

ORDINARY = [
    "# Of course, the client may retry.",
    "# Of these, only the first is free.",
    "# for which there is no block",
    "# in which case the block is freed",
    "# which is faster",
    "# from which offsets are computed",
    "# that the client may retry",
    "# The share of late answers, and of late ones of each client.",
    "# So many clients wait that the queue is full.",
    "# But for the first block, all are shared.",
    "# The number of rows, most of which are empty; thereby the step is short.",
    "# What of the second choice? It ends, too.",
    '"""Return what the client sent."""',
    "whoever = anew = 1",
    "text = 'anew'",
]
REFUSED = [
    ("whoever", "# The lock, for whoever writes."),
    ("Whomever", "# Whomever it concerns."),
    ("of late", "# The answers of late, by client."),
    ("anew", "text = 'made anew each time'"),
    ("a further one", "# Waits for a further one."),
    ("further ones", "# It needs no further ones."),
    ("such a one", 'f"The name of such a one: {name}"'),
    ("askers", "SIZE = 3  # askers that wait"),
    ("hitherto", "# The steps hitherto."),
    ("whence", "# The place whence it came."),
    ("thereof", "# A block and the tokens thereof."),
    ("no use any more", '"""Return whether it is of no use any more."""'),
]


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_sentences_are_no_errors(line: str) -> None:
    assert list(wording.errors({"a.py": f"{line}\n"})) == []


@pytest.mark.parametrize(("word", "line"), REFUSED)
def test_words_that_are_always_wrong_are_errors_with_their_line(word: str, line: str) -> None:
    (error,) = wording.errors({"a.py": f"\n{line}\n"})

    path, number, text = error
    assert (path, number) == ("a.py", 2)
    assert text.startswith(f"'{word}': ")


def test_each_error_is_tested() -> None:
    lines = "\n".join(line for _, line in REFUSED)

    assert [pattern.pattern for pattern in wording.ERRORS if not pattern.search(lines)] == []


@pytest.mark.parametrize(
    "line",
    [
        "# Runs so many steps.",
        "# Of streams, marks are removed.",
        "SIZE = 3  # of a block",
        "SIZE = 3  # that are kept",
        "SIZE = 3  # by which it grows",
        'def f():\n    """Return what is wrong."""',
    ],
)
def test_odd_words_are_advice_with_their_line(line: str) -> None:
    (advice,) = wording.advice({"a.py": f"\n{line}\n"})

    assert advice[:2] == ("a.py", 2 + line.count("\n"))


@pytest.mark.parametrize(
    "line",
    [
        "SIZE = 3  # rows of a block",
        "# Of course, the client may retry.",
        "# So many clients wait that the queue is full.",
        "# Of three ways, the first is the fastest.",
        "# The number of rows, most\n# of which are empty.",
    ],
)
def test_plain_words_are_no_advice(line: str) -> None:
    assert list(wording.advice({"a.py": f"{line}\n"})) == []


def test_lines_of_a_long_string_have_their_own_numbers() -> None:
    source = 'text = """The first line,\nmade anew\nthree times."""\n'

    assert [line for _, line, _ in wording.errors({"a.py": source})] == [2]


def test_pages_are_checked_line_by_line() -> None:
    page = {"docs/a.md": "# Title\n\nOf images, only the first is read, whoever sends it.\n"}

    assert [line for _, line, _ in wording.errors(page)] == [3]
    assert [line for _, line, _ in wording.advice(page)] == [3]
