r"""Matches names of modules with the regular expressions of an adapter's configuration, in linear time. Stdlib only.

An adapter's configuration maps expressions to numbers, such as ranks. PEFT gives a module the number of the first
expression that matches its whole name, or the part after a dot. Python's `re` backtracks and holds the interpreter's
lock meanwhile, so that an expression with three `.*` can stop a server for minutes. This matcher follows all positions
of a name at once: bit n of an integer is set if the expression so far matches up to character n. So each part of an
expression costs a few operations on integers.

It supports what configurations use: characters, classes, anchors, alternatives, optional groups, and repeated
characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

MOST_PATTERNS = 1024  # An adapter of Mixtral with a rank for each expert has 896.
MOST_CHARACTERS = 500  # most characters in an expression
MOST_STEPS = 2_000_000  # limit for all expressions and names together: one or two seconds
_MOST_DEPTH = 20  # most levels of nested groups
_MOST_REPEATS = 100
_PLAIN = re.compile(r"[\w.-]*")
_ATOM = re.compile(
    r"\\[dDwWsS]|\\[^\w\s]|\[\^?(?:\\[dDwWsS.-]|\w-\w|[\w.])+-?\]|[^\\\[\](){}*+?|^$\n]"  # matches one character
)
_GROUP = re.compile(r"\((?:\?:)?(?!\?)")
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d{1,3})(,?)(\d{0,3})\})\??")

# Turns the positions before a part of an expression, as bits, into those after it.
Part = Callable[["Name", int], int]


class BadPattern(Exception):
    """An expression cannot be used. The message continues a sentence whose subject is the expression."""


class TooMuchWork(Exception):
    """There are too many expressions or names, or they are too long."""


class Steps:
    """Counts the steps of all matches. Raises TooMuchWork."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._left = most

    def take(self, number: int = 1) -> None:
        self._left -= number
        if self._left < 0:
            raise TooMuchWork


class Name:
    """A module's name, to be matched with expressions."""

    def __init__(self, text: str, steps: Steps) -> None:
        self.text = text
        self.steps = steps
        self.end = 1 << len(text)
        self._positions: dict[str, int] = {}  # for each character, its positions as bits
        for position, character in enumerate(text):
            self._positions[character] = self._positions.get(character, 0) | 1 << position
        # A match may begin at the start of the name or after a dot.
        self.begins = 1 | self._positions.get(".", 0) << 1
        self._of_atoms: dict[str, int] = {}

    def matching_positions(self, atom: str) -> int:
        """Return the positions, as bits, of the characters that an atom matches: a class, an escape or a character."""
        mask = self._of_atoms.get(atom)
        if mask is None:
            self.steps.take(len(self._positions))
            matching = (bits for character, bits in self._positions.items() if _is_match(atom, character))
            mask = self._of_atoms[atom] = sum(matching)
        return mask


@lru_cache(4096)
def _is_match(atom: str, character: str) -> bool:
    return re.fullmatch(atom, character) is not None


class NamePattern:
    """An expression that matches the ends of names, as PEFT's `re.match(rf"(.*\\.)?({text})$", name)` does."""

    def __init__(self, text: str) -> None:
        """Raises BadPattern."""
        if len(text) > MOST_CHARACTERS:
            raise BadPattern(f"has {len(text)} characters, and may have at most {MOST_CHARACTERS}")
        self._text = text
        self._part = None if _PLAIN.fullmatch(text) else _Parser(text).parse()

    def matches(self, name: Name) -> bool:
        """Return whether the expression matches the end of a name without line breaks. Raises TooMuchWork."""
        if self._part is not None:
            return self._part(name, name.begins) & name.end != 0
        name.steps.take()
        begin = len(name.text) - len(self._text)
        if begin < 0 or (begin and name.text[begin - 1] != "."):
            return False
        end = name.text[begin:]
        return end == self._text or all(one in (other, ".") for one, other in zip(self._text, end, strict=True))


class FirstMatch:
    """A mapping from expressions to numbers, in which the first match counts."""

    def __init__(self, numbers: Mapping[NamePattern, float]) -> None:
        self._numbers = numbers

    def number(self, name: Name) -> float | None:
        """Return the number of the first expression that matches a name. Raises TooMuchWork."""
        return next((number for pattern, number in self._numbers.items() if pattern.matches(name)), None)


class _Parser:
    """Reads an expression from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> Part:
        try:
            re.compile(self._text)
        except (re.error, OverflowError, RecursionError) as error:
            raise BadPattern(f"is no regular expression ({error})") from error
        part = self._alternatives(0)
        if self._at < len(self._text):
            raise self._unsupported()
        return part

    def _alternatives(self, depth: int) -> Part:
        parts = [self._sequence(depth)]
        while self._text.startswith("|", self._at):
            self._at += 1
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else _any_of(parts)

    def _sequence(self, depth: int) -> Part:
        parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._item(depth))
        return _all_of(parts)

    def _item(self, depth: int) -> Part:
        if self._text[self._at] in "^$":
            self._at += 1
            return _at_begin if self._text[self._at - 1] == "^" else _at_end
        if group := _GROUP.match(self._text, self._at):
            if depth == _MOST_DEPTH:
                raise self._unsupported()
            self._at = group.end()
            part = self._alternatives(depth + 1)
            self._at += 1  # `re` has found the bracket
            least, most = self._repeats()
            if (least, most) == (0, 1):
                return _any_of([_all_of([]), part])
            if (least, most) != (1, 1):
                raise self._unsupported()
            return part
        atom = _ATOM.match(self._text, self._at)
        if atom is None:
            raise self._unsupported()
        self._at = atom.end()
        return _repeated(atom[0], *self._repeats())

    def _repeats(self) -> tuple[int, int | None]:
        """Read how often the preceding part is repeated: the least and the most, which is None for any number."""
        match = _QUANTIFIER.match(self._text, self._at)
        if match is None:
            return 1, 1
        sign, least, comma, most = match.groups()
        if sign is None and max(int(least), int(most or 0)) > _MOST_REPEATS:
            raise self._unsupported()
        self._at = match.end()
        if sign is not None:
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        return int(least), int(most) if most else None if comma else int(least)

    def _unsupported(self) -> BadPattern:
        return BadPattern(
            "is not supported: groups may only be optional, and characters repeated with *, + or up to "
            f"{_MOST_REPEATS} times"
        )


def _at_begin(name: Name, positions: int) -> int:
    name.steps.take()
    return positions & 1


def _at_end(name: Name, positions: int) -> int:
    name.steps.take()
    return positions & name.end


def _all_of(parts: list[Part]) -> Part:
    def part(name: Name, positions: int) -> int:
        for each in parts:
            positions = each(name, positions)
            if not positions:
                break
        return positions

    return part


def _any_of(parts: list[Part]) -> Part:
    def part(name: Name, positions: int) -> int:
        after = 0
        for each in parts:
            after |= each(name, positions)
        return after

    return part


def _repeated(atom: str, least: int, most: int | None) -> Part:
    def part(name: Name, positions: int) -> int:
        matched = name.matching_positions(atom)
        name.steps.take(1 + (least if most is None else most))
        for _ in range(least):
            positions = (positions & matched) << 1
        if most is None:
            # The carry of an addition runs from each position through all characters after it that match.
            return positions | ((positions & matched) + matched) ^ matched
        for _ in range(most - least):
            positions |= (positions & matched) << 1
        return positions

    return part
