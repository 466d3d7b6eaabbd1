r"""Regular expressions of clients (ECMA-262), translated into llguidance's (Rust's).

The dialects agree on most things. Where they don't, an answer must be valid in each of them: `\d` is 0-9 here, and `\D`
excludes the digits of all scripts. Look-around and back references have no automaton, and are refused. Anchors are
resolved here, because they may occur in any alternative of a pattern.

This module must not depend on JSON Schema or on any library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from oaiserve.engine.grammars.refusal import Refused

MOST_CHARACTERS = 2**14
MOST_DEPTH = 50  # groups within groups
MOST_FORCED = 2**14  # characters of the shortest match

ANYTHING = "(?s:.*)"
# Control characters without a short escape in JSON. Strings in answers never contain them, and llguidance drops them
# from its input.
UNWRITABLE = frozenset(map(chr, {*range(0x20), 0x7F} - {8, 9, 10, 12, 13}))
NOT_LINE_END = r"[^\n\r\u{2028}\u{2029}]"  # the meaning of "."
# For each class: the characters that belong to it in all dialects, and those that do in any dialect.
_CLASSES = {
    "d": ("0-9", r"\p{Nd}"),
    "w": ("0-9A-Za-z_", r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\u{200c}\u{200d}"),
    "s": (r" \t\n\r\f\x0b", r"\p{White_Space}\x1c-\x1f\u{feff}"),
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "v": "\v", "f": "\f"}
_COUNT = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}|c([A-Za-z])|0(?![0-9])", re.ASCII)
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(=[A-Za-z_]+)?\}", re.ASCII)
_NAMED = re.compile(r"\(\?P?<[A-Za-z_]\w*>", re.ASCII)
# Inline flags, as in Python: for the whole pattern, or for a group. The flags `a` and `u` change nothing here.
_FLAGS = re.compile(r"\(\?([aisu]+)([:)])", re.ASCII)


@dataclass(frozen=True, slots=True)
class Regex:
    """A regex without anchors, which must match a whole text."""

    text: str
    least: int  # characters of the shortest match


def search(pattern: str) -> Regex:
    """Return a regex for the JSON strings in which the pattern matches somewhere. Raises Refused."""
    return _translated(pattern, UNWRITABLE, ANYTHING)


def full_match(pattern: str) -> Regex:
    """Return a regex for the texts that a pattern matches as a whole, whether it has anchors or not. Raises Refused."""
    try:
        return _translated(pattern, frozenset(), "")
    except Refused as refused:
        raise Refused(f"the regex {refused.reason}") from None


def _translated(pattern: str, unwritable: frozenset[str], around: str) -> Regex:
    if len(pattern) > MOST_CHARACTERS:
        raise Refused(f"has more than {MOST_CHARACTERS} characters")
    group = _RegexParser(pattern, unwritable).parse()
    if group.least > MOST_FORCED:
        raise Refused(f"matches only texts with more than {MOST_FORCED} characters")
    return Regex(_emit(group, around, around), group.least)


def literal(text: str) -> str:
    return "".join(map(_character, text))


def _character(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    return rf"\u{{{ord(character):x}}}"


@dataclass(slots=True)
class _Branch:
    """One alternative of a pattern or group."""

    is_start: bool = False  # It begins with "^".
    items: list[str | _Repeated | _RegexGroup] = field(default_factory=list)
    is_end: bool = False  # It ends with "$".
    least: int = 0


@dataclass(frozen=True, slots=True)
class _Repeated:
    text: str
    quantifier: str
    least: int


@dataclass(slots=True)
class _RegexGroup:
    branches: list[_Branch]

    @property
    def least(self) -> int:
        return min(branch.least for branch in self.branches)

    @property
    def has_anchor(self) -> bool:
        return any(
            branch.is_start
            or branch.is_end
            or any(isinstance(item, _RegexGroup) and item.has_anchor for item in branch.items)
            for branch in self.branches
        )


def _emit(group: _RegexGroup, before: str | None, after: str | None) -> str:
    """Return the regex of a group. `before` matches the text before a group at the beginning of the pattern, and
    `after` the text after one at its end. Elsewhere they are None, because an anchor could never match there."""
    emitted = []
    for branch in group.branches:
        if (branch.is_start and before is None) or (branch.is_end and after is None):
            raise Refused("has an anchor (^ or $) in the middle")
        left = "" if branch.is_start else before
        right = "" if branch.is_end else after
        parts: list[str] = []
        last = len(branch.items) - 1
        for index, item in enumerate(branch.items):
            if isinstance(item, str):
                parts.append(item)
            elif isinstance(item, _Repeated):
                # Next to "anything", further repetitions are redundant. Without this, llguidance would count them.
                is_next_to_anything = ANYTHING in (left if index == 0 else "", right if index == last else "")
                parts.append(item.text + (f"{{{item.least}}}" if is_next_to_anything else item.quantifier))
            elif not item.has_anchor:
                parts.append(_emit(item, None, None))
            else:
                parts.append(_emit(item, left if index == 0 else None, right if index == last else None))
                left = "" if index == 0 else left
                right = "" if index == last else right
        emitted.append((left or "") + "".join(parts) + (right or ""))
    return f"(?:{'|'.join(emitted)})"


class _RegexParser:
    def __init__(self, pattern: str, unwritable: frozenset[str]) -> None:
        """The pattern may have none of the unwritable characters on its own."""
        self._text = pattern
        self._unwritable = unwritable
        # In a class with all control characters, llguidance mistakes quotes and backslashes for members. So classes for
        # JSON strings lack U+0000, which these strings never contain anyway.
        self._nul = [_character("\0")] if unwritable else []
        self._at = 0
        self._depth = 0
        self._flags = ""

    def parse(self) -> _RegexGroup:
        if (match := _FLAGS.match(self._text)) and match[2] == ")":
            self._flags = match[1]
            self._at = match.end()
        group = self._group()
        if self._at < len(self._text):
            raise Refused("has a ')' without a '('")
        return group

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        if self._at == len(self._text):
            raise Refused("ends in the middle")
        self._at += 1
        return self._text[self._at - 1]

    def _group(self) -> _RegexGroup:
        """Read alternatives up to the end of their group."""
        branches = [_Branch()]
        while (character := self._peek()) and character != ")":
            branch = branches[-1]
            self._at += 1
            if character == "|":
                branches.append(_Branch())
                continue
            if branch.is_end:
                raise Refused("has a '$' in the middle")
            if character == "\\" and (anchor := self._peek()) and anchor in "AZz":
                self._at += 1
                character = "^" if anchor == "A" else "$"
            if character == "^":
                if branch.items or branch.is_start:
                    raise Refused("has a '^' in the middle")
                branch.is_start = True
            elif character == "$":
                branch.is_end = True
            else:
                item: str | _Repeated | _RegexGroup = self._atom(character)
                least = 1
                if isinstance(item, _RegexGroup):
                    least = item.least
                if (quantifier := self._quantifier()) is not None:
                    if self._quantifier() is not None:
                        raise Refused("has two quantifiers in a row")
                    text, low = quantifier
                    if isinstance(item, _RegexGroup):
                        item = _emit(item, None, None)
                    item = _Repeated(str(item), text, low)
                    least *= low
                branch.items.append(item)
                branch.least += least
        return _RegexGroup(branches)

    def _quantifier(self) -> tuple[str, int] | None:
        """Read a quantifier, and return it with its lowest count."""
        match self._peek():
            case "*" | "+" | "?" as sign:
                self._at += 1
                text = str(sign)
                least = int(sign == "+")
            case "{":
                match = _COUNT.match(self._text, self._at)
                if match is None:
                    if self._text.startswith("{,", self._at):
                        raise Refused("has '{,', which dialects read in different ways: write '{0,'")
                    return None
                low = match[1]
                high = match[3]
                if max(len(low), len(high or "")) > 9 or (high and int(high) < int(low)):
                    raise Refused(f"has the count {match[0][:40]}, which is no range")
                text = match[0]
                least = int(low)
                self._at = match.end()
            case _:
                return None
        if self._peek() == "?":  # Lazy quantifiers match the same texts.
            self._at += 1
        return text, least

    def _atom(self, character: str) -> str | _RegexGroup:
        """Read the subject of a quantifier: a character, a class or a group, which begins with this character."""
        match character:
            case "(":
                return self._parenthesis()
            case "[":
                return self._class()
            case ".":
                if "s" in self._flags:
                    return "(?s:.)"
                return NOT_LINE_END
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise Refused(f"has a '{character}' with nothing to repeat")
            case "{" if _COUNT.match(self._text, self._at - 1):
                raise Refused("has a '{' with nothing to repeat")
            case _:
                return self._written(_unbroken(character))

    def _parenthesis(self) -> _RegexGroup:
        flags = self._flags
        if self._peek() == "?":
            start = self._at - 1
            if (flagged := _FLAGS.match(self._text, start)) and flagged[2] == ":":
                self._flags = flags + flagged[1]
                self._at = flagged.end()
            elif named := _NAMED.match(self._text, start):
                self._at = named.end()
            elif self._text.startswith("?:", self._at):
                self._at += 2
            elif re.match(r"\?<?[=!]", self._text[self._at : self._at + 3]):
                raise Refused("looks around itself, with '(?=' or the like")
            else:
                raise Refused(f"has '{self._text[start : start + 3]}': flags and other extensions are not supported")
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise Refused(f"has more than {MOST_DEPTH} groups in each other")
        group = self._group()
        if self._peek() != ")":
            raise Refused("has a '(' without a ')'")
        self._at += 1
        self._depth -= 1
        self._flags = flags
        return group

    def _escape(self) -> str:
        letter = self._peek()
        if (shorthand := self._shorthand(is_negated=False)) is not None:
            if letter in _CLASSES:
                return f"[{shorthand}]"
            return shorthand
        if letter in ("b", "B"):
            raise Refused(rf"has '\{letter}': word boundaries are not supported")
        if letter == "k" or (letter in "123456789" and letter):
            raise Refused(f"refers back, with '\\{letter}'")
        return self._written(self._escaped_character())

    def _shorthand(self, *, is_negated: bool) -> str | None:
        r"""Read a class such as `\d` after a backslash, as a member of another class. Return None if there is none."""
        if (letter := self._peek()) and letter.lower() in _CLASSES:
            self._at += 1
            common, any_dialect = _CLASSES[letter.lower()]
            if letter.islower():
                if is_negated:
                    return any_dialect
                return common
            return f"[^{common if is_negated else any_dialect}]"
        if match := _PROPERTY.match(self._text, self._at):
            self._at = match.end()
            if is_negated or not self._nul:
                return f"\\{match[0]}"
            return f"[^\\{match[0].swapcase()[0]}{match[0][1:]}{self._nul[0]}]"
        return None

    def _written(self, character: str) -> str:
        if character in self._unwritable:
            raise Refused(f"has the control character U+{ord(character):04X}, which strings of answers do not have")
        cases = self._cases(character)
        if len(cases) == 1:
            return _character(character)
        return f"[{''.join(map(_character, cases))}]"

    def _cases(self, character: str) -> list[str]:
        """Return a character, and its other case if the pattern ignores case."""
        swapped = character.swapcase() if "i" in self._flags else character
        if swapped == character or swapped.swapcase() != character:
            return [character]
        return [character, swapped]

    def _escaped_character(self) -> str:
        if match := _CODE.match(self._text, self._at):
            self._at = match.end()
            if match[4]:
                return chr(ord(match[4]) % 32)
            code = int(match[1] or match[2] or match[3] or "0", 16)
            low = re.compile(r"\\u(D[C-F][0-9A-F]{2})", re.IGNORECASE).match(self._text, self._at)
            if 0xD800 <= code < 0xDC00 and low:
                self._at = low.end()
                code = 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
            if code > 0x10FFFF:
                raise Refused(f"has '\\{match[0]}', which is no character")
            return _unbroken(chr(code))
        character = self._next()
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character.isalnum():
            raise Refused(f"has '\\{character}', which is not supported")
        return _unbroken(character)

    def _class(self) -> str:
        is_negated = self._peek() == "^"
        self._at += is_negated
        if self._peek() == "]":
            raise Refused("has '[]' or '[^]', which dialects read in different ways")
        members: list[str] = []
        while (first := self._member(is_negated)) is not None:
            if len(first) > 1 or self._peek() != "-" or self._text.startswith("-]", self._at):
                members.append(first if len(first) > 1 else self._in_class(first, is_negated))
                continue
            self._at += 1
            last = self._member(is_negated)
            if last is None or len(last) > 1:  # Next to a class such as \d, this is a literal hyphen.
                members += [self._in_class(first, is_negated), _character("-"), last or ""]
                continue
            if first > last:
                raise Refused(f"has the range {first}-{last}, which is the wrong way round")
            members.append(self._in_class(first, is_negated) if first == last else self._range(first, last))
        if is_negated:
            members += self._nul
        written = f"[{'^' if is_negated else ''}{''.join(members)}]"
        # Dialects differ in case folding. Exclude anything that one of them would exclude.
        if is_negated and "i" in self._flags:
            return f"(?i:{written})"
        return written

    def _in_class(self, character: str, is_negated: bool) -> str:
        if is_negated:
            return _character(character)
        return self._written(character).strip("[]")

    def _range(self, first: str, last: str) -> str:
        if self._nul:
            first = max(first, "\1")
        written = f"{_character(first)}-{_character(last)}"
        for low, high in (("a", "z"), ("A", "Z")) if "i" in self._flags else ():
            begin = max(first, low)
            end = min(last, high)
            if begin <= end:
                written += f"{begin.swapcase()}-{end.swapcase()}"
        return written

    def _member(self, is_negated: bool) -> str | None:
        """Read a member of a class: return a character as it is, another class as a regex, None at the end."""
        character = self._next()
        if character == "]":
            return None
        if character == "[" and self._peek() == ":":
            raise Refused("has '[:': classes with names are not supported")
        if character != "\\":
            return _unbroken(character)
        if self._peek() == "b":  # a backspace, within a class
            self._at += 1
            return "\b"
        return self._shorthand(is_negated=is_negated) or self._escaped_character()


def _unbroken(character: str) -> str:
    if 0xD800 <= ord(character) < 0xE000:
        raise Refused("has half of a surrogate pair, which is no character")
    return character
