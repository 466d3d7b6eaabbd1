"""GBNF, llama.cpp's notation of grammars, translated into Lark's, which llguidance reads.

Rules become terminals unless they lead to a recursive rule, which makes matching much faster. The text between two
defined names is one rule, across line breaks. This module must not depend on requests or tokens.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

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


_Token = tuple[str, str]  # (kind, text); a kind is the name of a group in _TOKEN


def as_lark(text: str) -> str:
    """Translate a grammar into Lark's notation, token by token. Raises Refused."""
    rules = _rules(_tokens(text))
    if "root" not in rules:
        raise Refused("the grammar has no rule 'root'")
    names_of = {name: {token for kind, token in tokens if kind == "name"} for name, tokens in rules.items()}
    for name, names in names_of.items():
        if unknown := sorted(names - rules.keys()):
            raise Refused(f"the rule '{name}' of the grammar refers to '{unknown[0][:60]}', which it does not define")
    terminals: set[str] = set()  # rules that refer only to terminals, and so are terminals themselves
    while more := {name for name, names in names_of.items() if name not in terminals and names <= terminals}:
        terminals |= more
    written = {name: f"{'T' if name in terminals else 'r'}{index}" for index, name in enumerate(rules)}
    lines = (f"{written[name]}: {_lark_rule(tokens, written)}" for name, tokens in rules.items())
    return "\n".join([f"start: {written['root']}", *lines])


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            line = text.count("\n", 0, at) + 1
            raise Refused(f"the grammar cannot be read from {text[at : at + 20]!r} on, in line {line}")
        if match.lastgroup != "skip":
            tokens.append((str(match.lastgroup), match[0]))
        at = match.end()
    return tokens


def _rules(tokens: list[_Token]) -> dict[str, list[_Token]]:
    pairs = itertools.pairwise(kind for kind, _ in tokens)
    starts = [index for index, pair in enumerate(pairs) if pair == ("name", "define")]
    if tokens and starts[:1] != [0]:
        raise Refused(f'the grammar has {tokens[0][1][:60]!r} where a rule should begin, such as: root ::= "yes"')
    if len(starts) > MOST_RULES:
        raise Refused(f"the grammar has more than {MOST_RULES} rules")
    rules: dict[str, list[_Token]] = {}
    for start, end in itertools.pairwise([*starts, len(tokens)]):
        name = tokens[start][1]
        if name in rules:
            raise Refused(f"the grammar defines the rule '{name[:60]}' twice")
        rules[name] = tokens[start + 2 : end]
    return rules


def _lark_rule(tokens: list[_Token], names: Mapping[str, str]) -> str:
    written: list[str] = []
    depth = 0
    last = "|"  # the kind of the last token, or a sign that begins a sequence
    for kind, token in tokens:
        is_first = last in ("(", "|")
        if kind == "define" or (kind == "repeat" and (is_first or last == "repeat")):
            raise Refused(f"the grammar has a '{token}' in a place where it means nothing")
        depth += (token == "(") - (token == ")")
        if depth < 0:
            raise Refused("the grammar has a ')' without a '('")
        if depth > MOST_DEPTH:
            raise Refused(f"the grammar has more than {MOST_DEPTH} groups within each other")
        if is_first and token in ("|", ")"):
            written.append('""')
        if kind == "repeat":
            written[-1] += _repeat(token)
        else:
            written.append(names[token] if kind == "name" else _lark_element(kind, token))
        last = token if token in ("(", "|") else kind
    if depth:
        raise Refused("the grammar has a '(' without a ')'")
    return " ".join(written if last not in ("(", "|") else [*written, '""'])


def _lark_element(kind: str, token: str) -> str:
    match kind:
        case "string":
            regex = "".join(regexes.literal(character) for character, _ in _characters(token[1:-1]))
            if regex:
                return f"/{regex}/"
            return '""'
        case "class":
            return f"/{_class(token)}/"
        case _:
            if token == ".":
                return "/(?s:.)/"
            return token


def _repeat(token: str) -> str:
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
        match = _ESCAPE.match(text, at)
        if match is None:
            raise Refused(f"the grammar has '{text[at : at + 2]}', which is no escape")
        code = int(match[1] or match[2] or match[3] or "0", 16)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise Refused(f"the grammar has '{match[0]}', which is no character")
        characters.append((_CONTROLS.get(match[4], match[4]) if match[4] else chr(code), True))
        at = match.end()
    return characters


def _class(token: str) -> str:
    characters = _characters(token[1:-1])
    is_negated = characters[:1] == [("^", False)]
    characters = characters[is_negated:]
    if not characters:
        raise Refused("the grammar has an empty class")
    members = []
    at = 0
    while at < len(characters):
        first, _ = characters[at]
        is_range = characters[at + 1 : at + 2] == [("-", False)] and at + 2 < len(characters)
        at += 2 * is_range
        last, _ = characters[at]
        at += 1
        if last < first:
            raise Refused(f"the grammar has the range {first}-{last}, which is the wrong way round")
        members.append(f"{regexes.literal(first)}-{regexes.literal(last)}")
    return f"[{'^' if is_negated else ''}{''.join(members)}]"
