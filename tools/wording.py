"""Finds words in comments, strings and pages that readers stumble over. `tools.style` prints them.

A few words are always wrong: they are errors. The rest is advice, because good sentences have these words, too.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from typing import NamedTuple

Patterns = Mapping[re.Pattern[str], str]


def _compiled(patterns: Mapping[str, str]) -> Patterns:
    return {re.compile(pattern): instead for pattern, instead in patterns.items()}


# What to write instead, by the pattern of what is always wrong
ERRORS = _compiled(
    {
        r"\b[Ww]ho(?:so)?(?:m)?ever\b": "name the person or thing, or write 'anyone who'",
        r"\b[Oo]f late(?=[,.;:)])": "recently",
        r"\b[Aa]new\b": "again",
        r"\b[Aa] further one\b|\bfurther ones\b": "another, others, or more",
        r"\bsuch a one\b": "name the thing",
        r"\b[Aa]skers?\b": "client, or another request",
        r"\b(?:[Hh]itherto|[Hh]enceforth)\b": "so far, or from now on",
        r"\b(?:[Ww]hence|[Tt]hence|[Ww]hither)\b": "from where, or from there",
        r"\b(?:[Tt]here|[Ww]here|[Hh]ere)(?:of|in|to|with)\b": "name the thing: 'in the block'",
        r"\bno use any ?more\b": "no longer useful, or too late",
    }
)
ADVICE = _compiled(
    {
        r"\b[Oo]f late\b(?![,.;:)])": "recently",
        r"\b[Bb]ut for\b": "except, or apart from",
        r"\b[Ww]hat of\b": "name the thing: 'the part of'",
        r"\bReturn what\b": "name the result",
        r"\bso many\b(?![^.]*\bthat\b)": "a number, this many, or the parameter's name",
        r"(?:^|[.!?:#] )Of (?!course\b|two\b|three\b|several\b|[\d,]+ |the prompt's)[^.]*,": "begin with the subject",
    }
)
# A comment has a subject of its own: not `# that are kept`, but `# stored prompts`.
FRAGMENT = re.compile(r"# (?:of|that|than|who|whose|(?:(?:at|by|for|from|in|of|on|to|with) )?which|behind|beside)\b")
MIN_WORDS = 3  # a shorter string is a name, a tag or data
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # the latter since Python 3.12
QUOTES = re.compile(r"^\w*(?:\"{3}|'{3}|[\"'])|(?:\"{3}|'{3}|[\"'])$")


class Text(NamedTuple):
    line: int
    text: str
    begins: bool = False  # whether a comment begins here


def texts_of_code(source: str) -> Iterator[Text]:
    """Yield the comments, and the lines of strings that have at least MIN_WORDS words."""
    is_comment = False  # whether the line before is a comment alone
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.lstrip().startswith("#")
            yield Text(token.start[0], token.string, begins=not (is_alone and is_comment))
            is_comment = is_alone
        elif token.type != tokenize.NL:
            is_comment = False
        if token.type in STRINGS and len(token.string.split()) >= MIN_WORDS:
            for number, line in enumerate(QUOTES.sub("", token.string).split("\n"), token.start[0]):
                yield Text(number, line.strip())


def texts_of_page(source: str) -> Iterator[Text]:
    for number, line in enumerate(source.split("\n"), 1):
        yield Text(number, line.strip())


def texts(path: str, source: str) -> Iterator[Text]:
    return texts_of_code(source) if path.endswith(".py") else texts_of_page(source)


def _matches(text: str, patterns: Patterns) -> Iterator[str]:
    for pattern, instead in patterns.items():
        if match := pattern.search(text):
            yield f"'{match[0].strip()}': {instead}"


def errors(sources: Mapping[str, str]) -> Iterator[tuple[str, int, str]]:
    """Yield the path, the line and the description of each word that is always wrong."""
    for path, source in sources.items():
        # Most files have none of the words, not even in their code.
        if any(pattern.search(source) for pattern in ERRORS):
            for line, text, _ in texts(path, source):
                for match in _matches(text, ERRORS):
                    yield path, line, match


def advice(sources: Mapping[str, str]) -> Iterator[tuple[str, int, str]]:
    """Yield the path, the line and the description of each word that a plainer one may replace."""
    for path, source in sources.items():
        for line, text, begins in texts(path, source):
            for match in _matches(text, ADVICE):
                yield path, line, match
            if begins and FRAGMENT.match(text):
                yield path, line, f"a comment without a subject: {text}"
