"""Finds words in comments, strings and pages that few readers understand at once. `tools.style` reports them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# What to write instead, by the pattern of what is wrong almost everywhere.
ANYWHERE = {
    r"\b[Ww]hoever\b": "name the thing, or write 'anyone who'",
    r"\bof late\b": "recently",
    r"\banew\b": "again",
    r"\ba further one\b": "another",
    r"\b[Bb]ut for\b": "except, or apart from",
    r"\b[Ww]hat of\b": "name the thing: 'the part of'",
    r"\bReturn what\b": "name the result",
    r"\bso many\b(?![^.]*\bthat\b)": "a number, this many, or the parameter's name",
    r"(?:^|[.!?:#] )Of (?!two\b|three\b|several\b|[\d,]+ |the prompt's)[^.]*,": "begin with the subject",
}
# A comment has a subject of its own: not `# that are kept`, but `# stored prompts`.
FRAGMENT = re.compile(r"# (?:of|that|than|who|whose|(?:(?:at|by|for|from|in|of|on|to|with) )?which|behind|beside)\b")
_ANYWHERE = [(re.compile(pattern), instead) for pattern, instead in ANYWHERE.items()]


class Text(NamedTuple):
    line: int
    text: str
    begins: bool = False  # whether a comment begins here


def texts_of_code(source: str) -> Iterator[Text]:
    """Yield the comments, and the strings that have at least three words."""
    is_comment = False  # whether the line before is a comment alone
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.lstrip().startswith("#")
            yield Text(token.start[0], token.string, begins=not (is_alone and is_comment))
            is_comment = is_alone
        elif token.type != tokenize.NL:
            is_comment = False
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 3:
            for number, line in enumerate(node.value.split("\n")):
                yield Text(node.lineno + number, line.strip())


def texts_of_page(source: str) -> Iterator[Text]:
    for number, line in enumerate(source.split("\n"), 1):
        yield Text(number, line.strip())


def faults(sources: Mapping[str, str]) -> Iterator[tuple[str, int, str]]:
    """Yield the path, the line and the description of each odd word."""
    for path, source in sources.items():
        for line, text, begins in texts_of_code(source) if path.endswith(".py") else texts_of_page(source):
            for pattern, instead in _ANYWHERE:
                if match := pattern.search(text):
                    yield path, line, f"'{match[0].strip()}': {instead}"
            if begins and FRAGMENT.match(text):
                yield path, line, f"a comment without a subject: {text}"
