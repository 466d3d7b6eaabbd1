"""The beginning of a JSON text, rewritten in the spelling that grammars of schemas use."""

from __future__ import annotations

import json
import re

_WHOLE = r'"(?:[^"\\]|\\.)*+"'
_CUT = r'"(?:[^"\\]|\\.)*+\\?\Z'
_PARTS = re.compile(rf'\s+|{_WHOLE}|{_CUT}|[,:]|[^\s",:]+', re.DOTALL)


def respelled(begun: str) -> str | None:
    """Return the beginning of a JSON text with a blank after each comma and colon, no other white space, and one
    spelling for each string. Whatever may follow the result may also follow `begun`.

    Return None if there is no such text: an escape or a surrogate pair is incomplete, or a blank ends a number.
    """
    parts: list[str] = []
    is_spaced = False  # White space came last.
    for part in _PARTS.findall(begun):
        if part.isspace():
            is_spaced = True
            continue
        if parts and parts[-1] in (",", ":"):
            parts.append(" ")
        if part.startswith('"'):
            try:
                part = _string(part)
            except ValueError:
                return None
        parts.append(part)
        is_spaced = False
    if is_spaced and parts:
        if parts[-1] in (",", ":"):
            parts.append(" ")
        elif parts[-1][-1] not in '[]{}"':
            return None
    return "".join(parts)


def _string(part: str) -> str:
    """Return a string in that spelling. It may lack its end. Raises ValueError if it isn't a string of JSON."""
    is_whole = re.fullmatch(_WHOLE, part, re.DOTALL) is not None
    spelled = json.dumps(json.loads(part if is_whole else part + '"'), ensure_ascii=False)
    spelled.encode()  # Half of a surrogate pair has no UTF-8.
    return spelled if is_whole else spelled[:-1]
