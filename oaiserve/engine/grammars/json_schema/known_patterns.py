"""Patterns of widespread libraries with look-around, each rewritten without it.

A regex with look-around has no automaton, so it is refused. But these few occur in the schemas of many clients, and
have plain equivalents. Every match of a plain pattern also matches the library's.
"""

from __future__ import annotations

import re

# zod 4: z.email() and z.iso.duration(). The plain patterns match exactly the same strings.
_SECONDS = r"\d+(?:[.,]\d+)?S"
_TIME = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_DATE = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
PLAIN = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|{_DATE}(?:{_TIME})?|{_TIME})$"
    ),
}
# pydantic 2: Decimal as a string, with a maximum of digits and decimal places. The plain patterns require a digit
# before the point.
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
_ANY = _DECIMAL + r"\d*\.?\d*$"
_PLACES = re.compile(re.escape(_DECIMAL + r"\d*\.?\d{0,") + r"([0-9]{1,3})" + re.escape("}0*$"))
_DIGITS = re.compile(
    re.escape(_DECIMAL + r"(?:\d{0,")
    + r"([0-9]{1,3})"
    + re.escape(r"}|(?=[\d.]{1,")
    + r"([0-9]{1,3})"
    + re.escape(r"}0*$)")
    + r"(?:\\d\{0,(?P<whole>[0-9]{1,3})\}\\\.\\d\{0,(?P<places>[0-9]{1,3})\}|\\d\*\\\.\\d\*)"
    + re.escape("0*$)")
)


def without_look_around(pattern: str) -> str:
    """Return the plain pattern for a known one, and any other pattern unchanged."""
    if pattern == _ANY:
        return r"^[+-]?\d+(?:\.\d*)?$"
    if match := _PLACES.fullmatch(pattern):
        return rf"^[+-]?\d+(?:\.\d{{0,{match[1]}}})?$"
    if match := _DIGITS.fullmatch(pattern):
        whole = int(match[1])
        digits = int(match[2]) - 1
        places = digits if match["places"] is None else int(match["places"])
        forms = []  # one for each number of decimal places
        for place in range(min(places, digits) + 1):
            before = min(whole, digits - place)
            forms.append((rf"\d{{1,{before}}}" if before else "0") + (rf"\.\d{{{place}}}" if place else ""))
        return f"^[+-]?(?:{'|'.join(forms)})$"
    return PLAIN.get(pattern, pattern)
