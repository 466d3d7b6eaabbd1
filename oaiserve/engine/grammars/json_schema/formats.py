"""Formats: those of JSON Schema, and those of pydantic, zod and OpenAPI.

A format constrains a string, and is enforced like a pattern. An unknown one is refused.
"""

from __future__ import annotations

from oaiserve.engine.grammars import regexes

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9a-f]{1,4}"
_IPV6 = "|".join(  # eight groups, or up to seven around "::"
    [f"(?:{_GROUP}:){{7}}{_GROUP}", f"::(?:(?:{_GROUP}:){{0,6}}{_GROUP})?"]
    + [f"(?:{_GROUP}:){{{i}}}:(?:(?:{_GROUP}:){{0,{6 - i}}}{_GROUP})?" for i in range(1, 7)]
    + [f"(?:{_GROUP}:){{7}}:"]
)
_IP = f"(?:{_IPV4}|{_IPV6})"
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?"
_BASE64URL = _BASE64.replace("+/", "_-")
_HEX = "[0-9a-f]"
_LETTER = "[A-Za-z0-9]"
_INNER = "[A-Za-z0-9-]"
# Names without "--" as third and fourth characters, which are only for punycode. No regex can check punycode.
_LABEL = (
    f"(?:{_LETTER}{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}{_LETTER}"
    f"|{_LETTER}(?:{_INNER}{{0,2}}{_LETTER})?)"
)


def _uuid(version: int) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}"


# The formats of strings, as regexes. None: llguidance has the same definition.
FORMATS: dict[str, str | None] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": None,
    "uuid": None,
    "email": None,
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": None,
    "ipv6": None,
    "uri": None,
    # pydantic's
    **{f"uuid{version}": _uuid(version) for version in (1, 3, 4, 5, 6, 7, 8)},
    "ipvanyaddress": _IP,
    "ipv4interface": f"{_IPV4}/(?:3[0-2]|[12]?[0-9])",
    "base64": _BASE64,
    "base64url": _BASE64URL,
    # OpenAPI's name for base64
    "byte": _BASE64,
    # zod's
    "cuid2": "[0-9a-z]+",
    "ulid": "[0-7][0-9A-HJKMNP-TV-Z]{25}",
    "nanoid": "[a-zA-Z0-9_-]{21}",
    "e164": r"\+[1-9][0-9]{6,14}",
    # These describe what a string is for. Any string is valid.
    **dict.fromkeys(("password", "binary", "path", "file-path", "directory-path"), regexes.ANYTHING),
}
# Formats of numbers, from OpenAPI and Rust. Any number of JSON can be stored as a float.
NUMBER_FORMATS: dict[str, tuple[int, int] | None] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    "float": None,
    "double": None,
}
