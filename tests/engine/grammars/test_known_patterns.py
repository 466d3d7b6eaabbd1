"""Plain patterns match only what the patterns of libraries match, which look around themselves."""

import itertools
import re

import pytest

from oaiserve.engine.grammars import regexes
from oaiserve.engine.grammars.json_schema.known_patterns import PLAIN, without_look_around

EMAIL, DURATION = PLAIN


def decimal(digits: int | None, places: int | None) -> str:
    """Return pydantic's pattern for a Decimal with limits for its digits and places."""
    start = r"^(?!^[-+.]*$)[+-]?0*"
    if digits is not None and places is not None:
        whole = max(0, digits - places)
        after = rf"(?=[\d.]{{1,{digits + 1}}}0*$)\d{{0,{whole}}}\.\d{{0,{places}}}0*$"
        return start + rf"(?:\d{{0,{whole}}}|{after})"
    if digits is not None:
        return start + rf"(?:\d{{0,{digits}}}|(?=[\d.]{{1,{digits + 1}}}0*$)\d*\.\d*0*$)"
    if places is not None:
        return start + rf"\d*\.?\d{{0,{places}}}0*$"
    return start + r"\d*\.?\d*$"


def texts(alphabet: str, longest: int) -> list[str]:
    return ["".join(each) for length in range(longest + 1) for each in itertools.product(alphabet, repeat=length)]


@pytest.mark.parametrize(("pattern", "alphabet"), [(EMAIL, "a.'@-"), (DURATION, "P1WTMS.")], ids=["email", "duration"])
def test_the_plain_pattern_matches_the_same_strings(pattern: str, alphabet: str) -> None:
    plain = without_look_around(pattern)
    regexes.search(plain)
    results = [(bool(re.search(pattern, text)), bool(re.search(plain, text))) for text in texts(alphabet, 6)]
    assert all(one == other for one, other in results)
    assert (True, True) in results


@pytest.mark.parametrize(
    ("digits", "places", "valid"),
    [
        (None, None, ["0", "-12.5", "+1."]),
        (None, 2, ["123456.78"]),
        (3, None, ["123", "1.23", "0.123"]),
        (4, 2, ["12", "12.34"]),
        (2, 4, ["0", "0.12"]),
        (3, 0, ["123"]),
        (8, 2, ["123456.78"]),
    ],
)
def test_decimals_are_those_that_the_pattern_matches_and_have_so_many_digits(
    digits: int | None, places: int | None, valid: list[str]
) -> None:
    pattern = decimal(digits, places)
    plain = without_look_around(pattern)
    regexes.search(plain)
    assert all(re.search(plain, text) for text in valid)
    results = [text for text in texts("+-.01", 6) if re.search(plain, text)]
    assert all(re.search(pattern, text) for text in results)
    for text in results:
        whole, _, fraction = text.lstrip("+-").partition(".")
        assert places is None or len(fraction) <= places
        assert digits is None or len((whole + fraction).lstrip("0")) <= digits


def test_other_patterns_stay_as_they_are() -> None:
    assert without_look_around("^a(?=b)") == "^a(?=b)"
