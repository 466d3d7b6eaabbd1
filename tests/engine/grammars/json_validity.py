"""Says whether a text is JSON that is valid under a schema: a plain reference, which shares no code with the server.

It is the library jsonschema, which leaves most formats to others and divides floats. So formats are checked by Python's
own libraries here, and multiples by their decimals, as JSON Schema defines them.
"""

import base64
import email.headerregistry
import ipaddress
import json
import re
import uuid
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from fractions import Fraction
from functools import partial
from typing import Any

import jsonschema
from jsonschema.exceptions import ValidationError

LABEL = r"(?!..--)[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOSTNAME = re.compile(rf"(?=.{{1,253}}$){LABEL}(?:\.{LABEL})*", re.ASCII)
# RFC 3339, appendix A: units follow each other without a gap.
DURATION = re.compile(
    r"P(?=.)(?:\d+W|(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)?"
    r"(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))?)",
    re.ASCII,
)
URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*", re.ASCII)
UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}", re.ASCII)


def _is_uuid(text: str, version: int) -> bool:
    return UUID.fullmatch(text) is not None and uuid.UUID(text).version == version


# Each returns None or False, or raises an error, for a text that does not have the format.
CHECKS: dict[str, Callable[[str], object]] = {
    "date": date.fromisoformat,
    "time": lambda text: time.fromisoformat(text).tzinfo,
    "date-time": lambda text: datetime.fromisoformat(text).tzinfo,
    "duration": DURATION.fullmatch,
    "uuid": UUID.fullmatch,
    "email": lambda text: email.headerregistry.Address(addr_spec=text),
    "hostname": HOSTNAME.fullmatch,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uri": URI.fullmatch,
    **{f"uuid{version}": partial(_is_uuid, version=version) for version in (1, 3, 4, 5, 6, 7, 8)},
    "ipvanyaddress": ipaddress.ip_address,
    "ipv4interface": ipaddress.IPv4Interface,
    "base64": lambda text: base64.b64decode(text, validate=True),
    "byte": lambda text: base64.b64decode(text, validate=True),
    "base64url": lambda text: base64.b64decode(text.translate(str.maketrans("-_+/", "+/!!")), validate=True),
    "cuid2": re.compile("[0-9a-z]+").fullmatch,
    "ulid": re.compile("[0-9A-HJKMNP-TV-Z]{26}").fullmatch,
    "nanoid": re.compile("[A-Za-z0-9_-]{21}").fullmatch,
    "e164": re.compile(r"\+[1-9][0-9]{1,14}").fullmatch,
}
RANGES = {"int32": range(-(2**31), 2**31), "int64": range(-(2**63), 2**63), "uint8": range(2**8)}
FORMATS = jsonschema.FormatChecker(formats=())


def _holds_of_strings(value: object, check: Callable[[str], object]) -> bool:
    return not isinstance(value, str) or check(value) not in (None, False)


def _holds_of_integers(value: object, allowed: range) -> bool:
    return not isinstance(value, int) or value in allowed


for _name, _check in CHECKS.items():
    FORMATS.checks(_name, raises=Exception)(partial(_holds_of_strings, check=_check))
for _name, _range in RANGES.items():
    FORMATS.checks(_name)(partial(_holds_of_integers, allowed=_range))


def _multiple_of(_: Any, divisor: float, value: Any, __: Any) -> Iterator[ValidationError]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (Fraction(str(value)) / Fraction(str(divisor))).denominator != 1:
        yield ValidationError(f"{value} is not a multiple of {divisor}")


def error_of(text: str, schema: Any) -> str:
    """Return the error of a text; "" if it is valid."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        return str(error)
    return instance_error(value, schema)


def instance_error(value: Any, schema: Any) -> str:
    """Return the error of a value; "" if it is valid."""
    draft = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind = jsonschema.validators.extend(draft, {"multipleOf": _multiple_of})
    error = next(kind(schema, format_checker=FORMATS).iter_errors(value), None)
    return "" if error is None else error.message


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
