"""`Site`: a place in an answer where the name of a called tool appears, and the grammar from there to the call's end.

An answer with strict tools is unconstrained up to the name of one of them in such a position. From there to the end of
the arguments it obeys a grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from oaiserve.routes.dialects.lark import lark_of

BLANK = r"[ \t\n\r]{0,20}"
SPACE = f"/{BLANK}/"
ANY = "/(?s:.*)/"
NAME = r"^\s<>{}"  # character class of names in most dialects


@dataclass(frozen=True, slots=True)
class Site:
    """The text around a name. `lead` is a Python regex of the text before it.

    `head` comes between the name and the arguments, and `tail` after these: texts, and regexes in slashes.
    """

    lead: str
    name: str  # character class of names, as in a regex: "^..." for all but some
    head: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    other: str = ""  # a regex of text after the name that shows that this is no call
    prefix: str = ""  # a regex of text that may come between the lead and the name
    is_spaced: bool = False  # white space may come there, too
    is_own_form: bool = False  # The arguments are in the parser's own form, which is not JSON.

    def rules(
        self, number: int, arguments: Mapping[str, str], special_ids: Mapping[str, int], tags: Iterable[str]
    ) -> str:
        """Return the rule `site_` with this number, for the tools whose `arguments` are given in Lark."""
        space = BLANK if self.is_spaced else ""
        stop = self.name[1:] if self.name.startswith("^") else f"^{self.name}"
        before = f"{space}({self.prefix})?" if self.prefix else space
        names = "|".join(map(re.escape, arguments))
        # Each name forms one lexeme with the text before it: names may begin alike, and the longest lexeme wins.
        words = {name: f"/{before}{re.escape(name)}/" for name in arguments}
        head = " ".join(self._lark(self.head, special_ids))
        calls = [f"{words[name]} {head} {rule}" for name, rule in arguments.items()]
        tail = " ".join(self._lark(self.tail, special_ids))
        # Any other name, as soon as it has ended
        if self.is_spaced:
            ended = f"[{self.name}]*[[{stop}]&&\\S]|[{self.name}]+[{stop}]"
        else:
            ended = f"[{self.name}]*[{stop}]"
        other = f"/{before}({ended})(?s:.*)/ & ~/{before}({names})[{stop}](?s:.*)/"
        rules = [
            f"site_{number}: call_{number} {ANY} | OTHER_{number}",
            f"call_{number}: ({' | '.join(calls)}) {tail}",
            f"OTHER_{number}: {other}",
        ]
        if self.other:
            rules[0] += f" | ({' | '.join(words.values())}) /{self.other}/ {ANY}"
        text = "\0".join(tags)
        if ids := [str(token_id) for tag, token_id in special_ids.items() if tag in text]:
            rules[0] += f" | NAME_{number} <[{','.join(ids)}]>"
            rules.append(f"NAME_{number}: /{before}[{self.name}]+/ & ~/{before}({names})/")
        return "\n".join(rules)

    @staticmethod
    def _lark(pieces: Iterable[str], special_ids: Mapping[str, int]) -> list[str]:
        """Return the pieces in Lark. Regexes in slashes stay unchanged, and a text that ends with "?" is optional."""
        lark: list[str] = []
        for piece in filter(None, pieces):
            if piece.startswith("/"):
                lark.append(piece)
            elif piece.endswith("?"):
                lark.append(f"({lark_of(piece[:-1], special_ids)})?")
            else:
                lark.append(lark_of(piece, special_ids))
        return lark


# {"name": "NAME", "arguments": {...}}, anywhere. Text may contain such an object with other keys.
OBJECT = Site(
    r'\{\s*(?:"tool_call_id"\s*:\s*"[^"\\\x00-\x1f]{0,256}"\s*,\s*)?"(?:tool_)?name"\s*:\s*"',
    '^"',
    (rf'/"{BLANK},{BLANK}"(arguments|parameters)"{BLANK}:{BLANK}/',),
    (rf"/{BLANK}\}}/",),
    other=rf'"{BLANK},{BLANK}"([^ap"\\]|a[^r"\\]|p[^a"\\])',
)
