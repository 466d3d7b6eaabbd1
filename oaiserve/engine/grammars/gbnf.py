"""GBNF, llama.cpp's notation of grammars, translated into Lark's, which llguidance reads.

Rules without references to rules of rules become terminals, which is the difference between fast and slow. The text
between two defined names is one rule, across line breaks. It must not know requests or tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from oaiserve.engine.grammars import regexes
from oaiserve.engine.grammars.refusal import Refused

MOST_RULES = 500
MOST_DEPTH = 30  # groups within groups
MOST_REPETITIONS = 10_000

_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)|(?P<define>::=)|(?P<name>[A-Za-z0-9_-]+)|(?P<string>"(?:\\.|[^"\\])*")
    |(?P<class>\[(?:\\.|[^\]\\])*\])|(?P<repeat>[*+?]|\{[0-9]*,?[0-9]*\})|(?P<sign>[().|])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([nrt\\\"\[\]\-^]))")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True, slots=True)
class _Name:
    name: str

    def names(self) -> set[str]:
        return {self.name}

    def written(self, names: dict[str, str]) -> str:
        return names[self.name]


@dataclass(frozen=True, slots=True)
class _Regex:
    regex: str

    def names(self) -> set[str]:
        return set()

    def written(self, names: dict[str, str]) -> str:
        return f"/{self.regex}/" if self.regex else '""'


@dataclass(frozen=True, slots=True)
class _GbnfGroup:
    """Alternatives, each a sequence of elements with their repetitions."""

    alternatives: list[list[tuple[_Name | _Regex | _GbnfGroup, str]]]

    def names(self) -> set[str]:
        return set[str]().union(*(element.names() for sequence in self.alternatives for element, _ in sequence))

    def rule(self, names: dict[str, str]) -> str:
        sequences = (" ".join(one.written(names) + repeat for one, repeat in row) for row in self.alternatives)
        return " | ".join(sequence or '""' for sequence in sequences)

    def written(self, names: dict[str, str]) -> str:
        return f"({self.rule(names)})"


def as_lark(text: str) -> str:
    """Translate a grammar into Lark's notation. Raises Refused."""
    rules = _GbnfParser(text).rules()
    if "root" not in rules:
        raise Refused("the grammar has no rule 'root'")
    names_of = {name: rule.names() for name, rule in rules.items()}
    for name, names in names_of.items():
        if unknown := sorted(names - rules.keys()):
            raise Refused(f"the rule '{name}' of the grammar refers to '{unknown[0][:60]}', which it does not define")
    terminals: set[str] = set()  # they refer to nothing but terminals
    while found := {name for name, names in names_of.items() if name not in terminals and names <= terminals}:
        terminals |= found
    written = {name: f"{'T' if name in terminals else 'r'}{index}" for index, name in enumerate(rules)}
    lines = (f"{written[name]}: {rule.rule(written)}" for name, rule in rules.items())
    return "\n".join([f"start: {written['root']}", *lines])


class _GbnfParser:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                line = text.count("\n", 0, at) + 1
                raise Refused(f"the grammar cannot be read from {text[at : at + 20]!r} on, in line {line}")
            if found.lastgroup != "skip":
                self._tokens.append((str(found.lastgroup), found[0]))
            at = found.end()
        self._at = 0

    def rules(self) -> dict[str, _GbnfGroup]:
        rules: dict[str, _GbnfGroup] = {}
        while self._at < len(self._tokens):
            name = self._tokens[self._at][1]
            if not self._is_definition():
                raise Refused(f'the grammar has {name[:60]!r} where a rule should begin, such as: root ::= "yes"')
            if name in rules:
                raise Refused(f"the grammar defines the rule '{name[:60]}' twice")
            self._at += 2
            rules[name] = self._group(0)
            if len(rules) > MOST_RULES:
                raise Refused(f"the grammar has more than {MOST_RULES} rules")
        return rules

    def _is_definition(self) -> bool:
        return [kind for kind, _ in self._tokens[self._at : self._at + 2]] == ["name", "define"]

    def _group(self, depth: int) -> _GbnfGroup:
        """Read alternatives up to the end of their group, or of their rule."""
        if depth > MOST_DEPTH:
            raise Refused(f"the grammar has more than {MOST_DEPTH} groups within each other")
        alternatives: list[list[tuple[_Name | _Regex | _GbnfGroup, str]]] = [[]]
        while self._at < len(self._tokens) and not self._is_definition():
            kind, token = self._tokens[self._at]
            if token == ")":
                break
            self._at += 1
            if token == "|":
                alternatives.append([])
                continue
            alternatives[-1].append((self._element(kind, token, depth), self._repeat()))
        return _GbnfGroup(alternatives)

    def _element(self, kind: str, token: str, depth: int) -> _Name | _Regex | _GbnfGroup:
        if token == "(":
            group = self._group(depth + 1)
            if self._tokens[self._at : self._at + 1] != [("sign", ")")]:
                raise Refused("the grammar has a '(' without a ')'")
            self._at += 1
            return group
        match kind:
            case "name":
                return _Name(token)
            case "string":
                return _Regex("".join(regexes.literal(character) for character, _ in _characters(token[1:-1])))
            case "class":
                return _Regex(_class(token))
            case "sign" if token == ".":
                return _Regex("(?s:.)")
            case _:
                raise Refused(f"the grammar has a '{token}' in a place where it means nothing")

    def _repeat(self) -> str:
        if self._at == len(self._tokens) or self._tokens[self._at][0] != "repeat":
            return ""
        token = self._tokens[self._at][1]
        self._at += 1
        if token[0] != "{":
            return token
        low, comma, high = token[1:-1].partition(",")
        counts = [int(count[:9]) for count in (low, high) if count]
        if not counts or max(counts) > MOST_REPETITIONS or counts != sorted(counts):
            raise Refused(f"the grammar has the count {token[:40]}: counts may be up to {MOST_REPETITIONS}")
        return f"{{{low or 0}{comma}{high}}}"


def _characters(text: str) -> list[tuple[str, bool]]:
    """Return the characters of a string or class, and whether each was escaped."""
    characters = []
    at = 0
    while at < len(text):
        if text[at] != "\\":
            characters.append((text[at], False))
            at += 1
            continue
        found = _ESCAPE.match(text, at)
        if found is None:
            raise Refused(f"the grammar has '{text[at : at + 2]}', which is no escape")
        code = int(found[1] or found[2] or found[3] or "0", 16)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise Refused(f"the grammar has '{found[0]}', which is no character")
        characters.append((_CONTROLS.get(found[4], found[4]) if found[4] else chr(code), True))
        at = found.end()
    return characters


def _class(token: str) -> str:
    characters = _characters(token[1:-1])
    is_negated = characters[:1] == [("^", False)]
    characters = characters[is_negated:]
    if not characters:
        raise Refused("the grammar has an empty class")
    members = []
    while characters:
        first = last = characters.pop(0)[0]
        if len(characters) > 1 and characters[0] == ("-", False):
            last = characters[1][0]
            del characters[:2]
        if last < first:
            raise Refused(f"the grammar has the range {first}-{last}, which is the wrong way round")
        members.append(f"{regexes.literal(first)}-{regexes.literal(last)}")
    return f"[{'^' if is_negated else ''}{''.join(members)}]"
