"""`ResponseForm`: a `response_template`, in which a checkpoint declares its answers, read by transformers' parser.

The template's regular expressions are not trusted, and a backtracking engine matches them with every answer. So those
that could take long are refused, and the texts that they are applied to are bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex

from oaiserve.errors import StartupError

if TYPE_CHECKING:
    from transformers.utils.chat_parsing import ResponseParser

CALLS = "tool_calls"
MOST_BYTES = 16384  # bytes of a template
MOST_PATTERNS = 16
MOST_CHARACTERS = 500  # characters of an expression
MOST_CHOICES = 6  # optional parts and alternatives of an expression
MOST_OF_CALL = 2**16  # characters of a call in JSON or Python
MOST_OF_SEARCHED_CALL = 2**14  # limit for calls that are searched for expressions or delimiters
_PATTERNS = ("open_pattern", "close_pattern", "tag_pattern")
_TOKEN = re.compile(
    r"(?P<atom>\\[dDwWsSnt]|\\[^\w\s]|\[\^?(?:\\[dDwWsSnt]|\\[^\w\s]|[^\\\[\]])+\]|[^\\\[\](){}*+?|^$])"
    r"(?P<repeat>(?:[*+?]|\{\d{1,2}(?:,\d{0,2})?\})\??)?"
    r"|(?P<group>\((?:\?:|\?P<[A-Za-z]\w*>)?(?!\?))|(?P<end>\)(?P<optional>\??))(?![*+{?])|(?P<either>\|)"
)


class BadResponseTemplate(Exception):
    """A template cannot be used. The message is a sentence about it, without the final full stop."""


@dataclass(frozen=True, slots=True)
class ResponseForm:
    template: Any  # transformers' `ResponseTemplate`
    texts: frozenset[str]  # the fields that can be passed on as they arrive
    tags: tuple[str, ...]  # all texts that may contain a special token
    most_of_call: int

    def parser(self, tools: Mapping[str, Mapping[str, Any]]) -> ResponseParser:
        """Return a parser of the rest of an answer. `tools` are schemas of parameters by name."""
        from transformers.utils.chat_parsing import ResponseParser

        functions: list[Any] = [{"function": {"name": name, "parameters": schema}} for name, schema in tools.items()]
        return ResponseParser(self.template, prefix="", tools=functions)


def response_form(declared: Mapping[str, Any], without: Collection[str] = ()) -> ResponseForm:
    """Return the form of answers that a template declares, without certain fields. Raises BadResponseTemplate."""
    fields = declared.get("fields")
    if not isinstance(fields, Mapping) or not isinstance(fields.get(CALLS), Mapping):
        raise BadResponseTemplate(f"It has no field '{CALLS}'")
    try:
        num_bytes = len(json.dumps(dict(declared)))
    except RecursionError as error:
        raise BadResponseTemplate("It is nested too deeply") from error
    if num_bytes > MOST_BYTES:
        raise BadResponseTemplate(f"It is longer than {MOST_BYTES} bytes")
    patterns = list(_texts_in(fields, _PATTERNS))
    if len(patterns) > MOST_PATTERNS:
        raise BadResponseTemplate(f"It has {len(patterns)} expressions, and may have at most {MOST_PATTERNS}")
    for pattern in patterns:
        _check(pattern)

    from transformers.utils.chat_parsing.response_templates import load_response_template

    kept = {name: _as_part(field) for name, field in fields.items() if name not in without}
    if not any(isinstance(field, Mapping) and not _is_tagged(field) for field in kept.values()):
        kept[""] = {}  # Text outside of the tags is shown.
    # The prompt isn't parsed, so the anchor in it doesn't matter.
    anchorless = {key: value for key, value in declared.items() if not key.startswith("start_anchor")}
    try:
        template = load_response_template({**anchorless, "fields": kept, "start_anchor": "\0", "defaults": {}})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadResponseTemplate(f"transformers cannot read it ({error})") from error
    if template.fields[CALLS].open_re is None:
        raise BadResponseTemplate(f"Its field '{CALLS}' has no 'open' and no 'open_pattern'")
    for field in template.fields.values():
        if any(each is not None and each.match("") for each in (field.open_re, field.close_re)):
            raise BadResponseTemplate(f"An expression of its field '{field.name}' matches the empty text")
    texts = {name for name, field in template.fields.items() if field.content == "text" and field.transform is None}
    return ResponseForm(
        template,
        frozenset(texts - {CALLS}),
        tuple(text.replace("\\", "") for text in _texts_in(kept)),
        MOST_OF_SEARCHED_CALL if template.fields[CALLS].content_args else MOST_OF_CALL,
    )


def _is_tagged(field: Mapping[str, Any]) -> bool:
    return "open" in field or "open_pattern" in field


def _as_part(field: Any) -> Any:
    """Return a field for parsing only the rest of an answer: a tagged one may be missing, and untagged text stays as it
    is."""
    if not isinstance(field, Mapping):
        return field
    if _is_tagged(field):
        return {**field, "optional": True}
    return {key: value for key, value in field.items() if key in ("close", "close_pattern")}


def read_response_template(path: Path) -> dict[str, Any]:
    """Return the template in the file of `--response-template`. Raises StartupError if it cannot be used."""
    try:
        declared = json.loads(path.read_bytes())
    except OSError as error:
        raise StartupError(f"--response-template is '{path}', which cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise StartupError(f"--response-template is '{path}', which is not JSON: {error}.") from error
    if not isinstance(declared, dict):
        raise StartupError(f"--response-template is '{path}', whose JSON must be an object with 'fields'.")
    try:
        response_form(declared)
    except BadResponseTemplate as error:
        raise StartupError(f"--response-template is '{path}', which cannot be used. {error}.") from error
    return declared


def _texts_in(value: Any, keys: Collection[str] | None = None) -> Iterator[str]:
    """Yield all texts in a JSON value, or only those under these keys."""
    waiting = [("", value)]
    while waiting:
        key, part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += part.items()
        elif isinstance(part, list):
            waiting += (("", each) for each in part)
        elif isinstance(part, str) and (keys is None or key in keys):
            yield part


def _check(pattern: str) -> None:
    """Raise BadResponseTemplate for an expression that could take more than quadratic time.

    A repeat takes linear time if the next character ends it, or if the engine can search for the text after it.
    """
    if (length := len(pattern)) > MOST_CHARACTERS:
        raise BadResponseTemplate(f"An expression has {length} characters, and may have at most {MOST_CHARACTERS}")
    tokens = []
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            raise BadResponseTemplate(
                f"Its expression '{pattern}' is not supported from '{pattern[at : at + 20]}' on: it may have "
                "characters, classes, groups, alternatives and repeated characters"
            )
        tokens.append(token)
        at = token.end()
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise BadResponseTemplate(f"transformers cannot read it (its expression '{pattern}': {error})") from error
    endless = [number for number, token in enumerate(tokens) if _is_open(token) and not _is_ended(tokens, number)]
    choices = sum(bool(token["either"] or token["optional"] or (token["repeat"] or "")[:1] == "?") for token in tokens)
    is_slow = choices > MOST_CHOICES or (choices and any(map(_is_open, tokens)))
    if is_slow or any(not _is_before_literals(tokens[number:]) for number in endless):
        raise BadResponseTemplate(
            f"Its expression '{pattern}' could take very long: each repeat must be followed by a character that ends "
            "it, or the last one by plain text, and none may be next to alternatives or optional parts"
        )


def _is_open(token: re.Match[str]) -> bool:
    """Return whether a character may be repeated a variable number of times, other than being merely optional."""
    repeat = token["repeat"] or ""
    return repeat[:1] in ("*", "+") or "," in repeat


def _is_ended(tokens: list[re.Match[str]], number: int) -> bool:
    """Return whether a repeat is always followed by a character that it cannot match."""
    following = next((token for token in tokens[number + 1 :] if token["atom"]), None)
    if following is None or following["repeat"]:
        return False
    literal = _literal(following["atom"])
    return bool(literal) and regex.fullmatch(tokens[number]["atom"], literal, regex.DOTALL) is None


def _is_before_literals(tokens: list[re.Match[str]]) -> bool:
    """Return whether only literal text follows the first token, which the engine searches for quickly."""
    repeat, *later = tokens
    if not later or all(token["end"] for token in later):
        return True
    is_plain = all(token["end"] or (_literal(token["atom"] or ".") and not token["repeat"]) for token in later)
    return "?" in repeat["repeat"][1:] and is_plain


def _literal(atom: str) -> str:
    """Return the only character that an atom matches, or "" if it matches several."""
    if atom == "." or atom[0] == "[" or (atom[0] == "\\" and atom[1] in "dDwWsS"):
        return ""
    return {"\\n": "\n", "\\t": "\t"}.get(atom, atom[-1])
