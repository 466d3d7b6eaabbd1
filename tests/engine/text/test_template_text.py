"""Texts keep the origin of their characters through what templates do, and lose it rather than gain it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.text.jinja_template import JinjaTemplate
from oaiserve.engine.text.template_text import TemplateText, by_template, is_written, joined, outside, plain

OUTSIDE = "outside 'x'"


def written(text: str) -> list[str]:
    """Return the parts of a text that the template wrote."""
    bounds = [0, *(bound for part in outside(text) for bound in part), len(text)]
    return [plain(text)[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True) if end > start]


def rendered(source: str, content: str = OUTSIDE) -> str:
    return JinjaTemplate(source).render([{"role": "user", "content": content}], {"a": content})


@pytest.mark.parametrize(
    ("source", "shown", "by"),
    [
        ("<b>{{ a }}<e>", f"<b>{OUTSIDE}<e>", ["<b>", "<e>"]),
        ("{{ '<' ~ a ~ '>' }}", f"<{OUTSIDE}>", ["<", ">"]),
        ("{{ '<' + a + '>' }}", f"<{OUTSIDE}>", ["<", ">"]),
        ("{{ a + '<e>' }}", f"{OUTSIDE}<e>", ["<e>"]),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(a) | trim }}", f"<{OUTSIDE}>", ["<", ">"]),
        ("{% set x %} <b>{{ a }} {% endset %}{{ x.strip() }}", f"<b>{OUTSIDE}", ["<b>"]),
        ("{% set x = ' <b>' + a %}{{ x.lstrip() }}{{ x[2:3] }}", f"<b>{OUTSIDE}b", ["<b>", "b"]),
        ("{% set tags = ['<b>', a] %}{{ tags[0] }}{{ tags | join('|') }}", f"<b><b>|{OUTSIDE}", ["<b><b>|"]),
        ("{{ [a, '<e>'] | join }}", f"{OUTSIDE}<e>", ["<e>"]),
        ("{{ ', '.join([a, '<e>']) }}", f"{OUTSIDE}, <e>", [", <e>"]),
        ("{{ '<{}|{n}>'.format(a, n='k') }}", f"<{OUTSIDE}|k>", ["<", "|k>"]),
        ("{{ '<%s>' % a }}", f"<{OUTSIDE}>", ["<", ">"]),
        ("{{ '<%s>' | format(a) }}", f"<{OUTSIDE}>", ["<", ">"]),
        ("{{ '{:>3}'.format('<b>') }}{{ '{{}}{}'.format(a) }}", f"<b>{{}}{OUTSIDE}", []),
        ("{{ ('<b>' + a).replace('<b>', '[B]') }}", f"[B]{OUTSIDE}", ["[B]"]),
        ("{{ ('<b>' + a).split('b')[0] }}{{ ('<b> ' + a).split()[0] }}", "<<b>", ["<<b>"]),
        ("{{ '<b>' | upper }}{{ '=' * 3 }}{{ {'a': '<d>'}.a }}{{ ('<t>', 1)[0] }}", "<B>===<d><t>", ["<B>===<d><t>"]),
        ("{{ a + '[X]' + (a | tojson | safe) }}", f'outside &#39;x&#39;[X]"{OUTSIDE}"', ["[X]"]),
        ("{{ (a | safe) + '[X]' + (a | e) }}", f"{OUTSIDE}[X]outside &#39;x&#39;", ["[X]"]),
        ("{{ a | tojson }}{{ a.upper() }}{{ a[:3] }}{{ a | length }}", f"\"{OUTSIDE}\"OUTSIDE 'X'out11", []),
        ("{{ ('<b>' + a).upper() }}{{ ('<b>' + a) | indent }}", f"<B>OUTSIDE 'X'<b>{OUTSIDE}", []),
        ("{{ a.replace('outside', '<b>') }}{{ a.join(['x', 'y']) }}", f"<b> 'x'x{OUTSIDE}y", []),
    ],
)
def test_a_rendered_text_knows_what_the_template_wrote(source: str, shown: str, by: list[str]) -> None:
    text = rendered(source)
    assert plain(text) == shown
    assert written(text) == by


def test_an_outside_text_decides_as_any_other_one() -> None:
    source = "{{ a == 'x' }}{{ 'x' in a }}{{ a.startswith('x') }}{{ {'x': 1}[a] }}{{ a is string }}{{ a | length }}"
    assert rendered(source, "x") == "TrueTrueTrue1True1"


def test_text_and_undefined_values_are_added_as_in_jinja() -> None:
    for source, message in (("{{ 'a' + 1 }}", "concatenate str"), ("{{ 'a' + nothing }}", "'nothing' is undefined")):
        with pytest.raises(Exception, match=message):
            rendered(source)


TEXTS = st.lists(st.tuples(st.booleans(), st.text("ab< \n", max_size=4)), max_size=5)


def made(parts: list[tuple[bool, str]]) -> tuple[str, list[bool]]:
    """Return a text of parts, and whether the template wrote each character."""
    text = joined(by_template(part) if is_own else part for is_own, part in parts)
    return text, [is_own for is_own, part in parts for _ in part]


def origins(text: str) -> list[bool]:
    return [is_written(text, at, at + 1) for at in range(len(text))]


@given(TEXTS, TEXTS, st.integers(-8, 8), st.integers(-8, 8))
def test_joins_and_slices_keep_each_characters_origin(
    left: list[tuple[bool, str]], right: list[tuple[bool, str]], start: int, end: int
) -> None:
    first, of_first = made(left)
    second, of_second = made(right)
    assert origins(first) == of_first
    assert origins(first + second) == of_first + of_second
    assert origins(first[start:end]) == of_first[start:end]
    assert plain(first[start:end]) == plain(first)[start:end]
    at = next((place for place, one in enumerate(plain(first)) if not one.isspace()), len(first))
    assert origins(first.lstrip()) == of_first[at:]


@given(TEXTS, st.sampled_from([None, "a", "b<"]), st.integers(-1, 2))
def test_splits_and_replacements_are_those_of_strings(
    parts: list[tuple[bool, str]], separator: str | None, count: int
) -> None:
    text = TemplateText("").join([made(parts)[0]])
    assert text.split(separator, count) == plain(text).split(separator, count)
    assert text.replace(separator or "<", "zz", count) == plain(text).replace(separator or "<", "zz", count)
    assert all(all(origins(part)) for part in by_template(plain(text)).split(separator, count))
