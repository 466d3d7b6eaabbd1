"""Text in the notation of llguidance's Lark, for the server's own grammars."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

# These stand for the index of a call in its answer, for the name of an argument, and for its type unless it is a
# string.
NUMBER = "{number}"
KEY = "{key}"
TYPE = "{type}"
_ANY = {NUMBER: "/[0-9]{1,4}/", KEY: '/[^<>"\\s]{1,64}/', TYPE: "/number|boolean|null|object|array/"}


def lark_of(text: str, special_ids: Mapping[str, int]) -> str:
    """Return a text in Lark, with special tokens by their ids, and regexes for NUMBER, KEY and TYPE."""
    tags = [*(tag for tag in special_ids if tag in text), *_ANY]
    return " ".join(
        f"<[{special_ids[piece]}]>" if piece in special_ids else _ANY.get(piece) or msgspec.json.encode(piece).decode()
        for piece in re.split(f"({'|'.join(map(re.escape, tags))})", text)
        if piece
    )
