"""Regexes of clients against Python's own, which agrees with ECMA-262 on what is compared here."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.grammars.refusal import Refused
from oaiserve.engine.grammars.regexes import MOST_CHARACTERS, MOST_DEPTH, MOST_FORCED, full_match, literal, search

CHARACTERS = "ab1_-] \n.é€😀"
texts = st.text(CHARACTERS, max_size=6)
atoms = st.sampled_from(
    ["a", "b", "1", r"\d", r"\D", "[ab]", "[^a]", r"[\]\-]", r"\.", ".", r"\x61", "é", "-", r"\s", "😀"]
)
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{1,}", "*?"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


def as_python(regex: str) -> re.Pattern[str]:
    """Return a translated regex for Python, whose names of characters and of classes are others than Rust's."""
    regex = re.sub(r"\\u\{([0-9a-f]+)\}", lambda found: rf"\U{int(found[1], 16):08x}", regex)
    regex = regex.replace(r"[^\p{Nd}]", r"\D").replace(r"\p{White_Space}\x1c-\x1f\U0000feff", r"\s")
    return re.compile(regex)


@given(patterns, texts)
def test_a_search_matches_what_python_finds(pattern: str, text: str) -> None:
    # Python's dot matches all line ends but one, and ECMA's none. There is one in these texts.
    assert bool(as_python(search(pattern).text).fullmatch(text)) == bool(re.search(pattern, text))


@pytest.mark.parametrize(
    ("pattern", "same"),
    [("a{1,255}", "a{1}"), ("a{2,}b*", "a{2}b{0}"), ("^a{1,255}", "^a{1}"), ("a?b+c?|d+", "a{0}b+c{0}|d{1}")],
)
def test_a_search_counts_no_more_than_it_must(pattern: str, same: str) -> None:
    assert search(pattern) == search(same)
    assert full_match(pattern) != full_match(same)


@given(patterns, texts)
def test_a_full_match_matches_what_python_matches_in_full(pattern: str, text: str) -> None:
    assert bool(as_python(full_match(pattern).text).fullmatch(text)) == bool(re.fullmatch(pattern, text))


@given(texts)
def test_a_literal_matches_itself(text: str) -> None:
    assert as_python(literal(text)).fullmatch(text)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("^a|b$", ["a", "ax", "b", "xb"], ["xa", "bx", ""]),
        ("(^a|b)c", ["acx", "xbc"], ["xac"]),
        ("(a$|b)", ["xa", "bx"], ["ax"]),
        ("^(?:$|a$)", ["", "a"], ["ab", "ba"]),
        ("^$|^a+$", ["", "aa"], ["ab"]),
        ("((^a)|b)$", ["a", "xb"], ["xa", "bx"]),
    ],
)
def test_anchors_may_stand_in_any_alternative(pattern: str, matching: list[str], others: list[str]) -> None:
    regex = as_python(search(pattern).text)
    assert [text for text in [*matching, *others] if regex.fullmatch(text)] == matching


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a^b", "'^' in the middle"),
        ("a$b", "'$' in the middle"),
        ("a(b$|c)d", "an anchor (^ or $) in the middle"),
        ("(?=a)b", "looks around"),
        ("(?<!a)b", "looks around"),
        (r"(a)\1", "refers back"),
        (r"\bword", "word boundaries"),
        ("(?x)a", "flags"),
        ("a(?i)b", "flags"),
        ("(a", "'(' without a ')'"),
        ("a)", "')' without a '('"),
        ("[a", "ends in the middle"),
        ("a\\", "ends in the middle"),
        ("*a", "nothing to repeat"),
        ("{2}", "nothing to repeat"),
        ("a**", "two quantifiers"),
        ("a{3,2}", "no range"),
        ("a{,2}", "write '{0,'"),
        ("[b-a]", "wrong way round"),
        ("[]", "different ways"),
        ("[[:alpha:]]", "classes with names"),
        (r"\q", "not supported"),
        (r"\ud800", "half of a surrogate pair"),
        ("a{100000}", f"more than {MOST_FORCED} characters"),
        ("(" * (MOST_DEPTH + 1), f"more than {MOST_DEPTH} groups"),
        ("(" * 15_000, f"more than {MOST_DEPTH} groups"),
        ("a" * (MOST_CHARACTERS + 1), f"more than {MOST_CHARACTERS} characters"),
    ],
)
def test_what_has_no_automaton_or_no_meaning_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(Refused) as refused:
        search(pattern)
    assert says in refused.value.reason


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"^[\w-\.]+$", ["a-b.c"], ["a b", "+"]),
        (r"^[a-\d]+$", ["a-5"], ["b"]),
        (r"\Aab\Z", ["ab"], ["xab", "abx"]),
        (r"\Aab|c\z", ["abx", "xc"], ["xab", "cx"]),
        ("(?i)^aB[d-f]1$", ["abE1", "ABd1"], ["abg1"]),
        ("^(?i:a)b$", ["ab", "Ab"], ["aB"]),
        ("(?i)^é$", ["é", "É"], ["e"]),
        ("(?s)^a.b$", ["a\nb", "axb"], ["ab"]),
        ("(?aiu)^a.b$", ["AxB"], ["a\nb"]),
    ],
)
def test_anchors_flags_and_hyphens_of_other_dialects_are_read(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    regex = as_python(search(pattern).text)
    assert [text for text in [*matching, *others] if regex.fullmatch(text)] == matching


@pytest.mark.parametrize("pattern", ["(a+)+b", "a{1,100000}", "(a|aa)+$", "(x+x+)+y", "((a{0,1000}){0,1000}){0,1000}"])
def test_what_takes_others_long_is_an_automaton_like_any(pattern: str) -> None:
    assert search(pattern).text


@pytest.mark.parametrize("pattern", [r"a\x01", "\x7f", r"[\x02]", r"[\x02-\x02]", "(\x00|a)"])
def test_control_characters_that_json_has_no_short_escape_for_are_refused_in_strings(pattern: str) -> None:
    with pytest.raises(Refused, match="control character U[+]00"):
        search(pattern)
    assert full_match(pattern).text
    assert search(r"[^\x00-\x1f\x7f]\n").text  # they may be excluded


def test_classes_have_what_all_dialects_agree_on() -> None:
    assert full_match(r"\d").text == "(?:[0-9])"
    assert full_match(r"[^\d]").text == r"(?:[^\p{Nd}])"  # no digit of any script


@pytest.mark.parametrize(("pattern", "least"), [("a|bcd", 1), ("a*", 0), ("(ab){3,5}c?", 6), ("", 0), ("^abc$", 3)])
def test_the_shortest_match_is_known(pattern: str, least: int) -> None:
    assert search(pattern).least == least
