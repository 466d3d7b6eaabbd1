"""Notes on what was left out of a request or read differently."""

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.routes.adaptations import HEADER, MOST_CHARACTERS, MOST_NOTES, Adaptations


def test_request_read_to_the_letter_has_no_header() -> None:
    assert Adaptations().headers() == {}
    assert Adaptations().notes == ()


def test_each_note_is_in_the_header_once_and_in_order() -> None:
    adaptations = Adaptations()
    for place in ("tools[3]", "messages[1]", "tools[3]"):
        adaptations.note(place, "left out")
    assert adaptations.headers() == {HEADER: "tools[3]: left out; messages[1]: left out"}


@given(st.lists(st.tuples(st.text(), st.text(max_size=200)), max_size=60))
def test_header_is_short_printable_ascii(notes: list[tuple[str, str]]) -> None:
    adaptations = Adaptations()
    for place, what in notes:
        adaptations.note(place, what)
    header = adaptations.headers().get(HEADER, "")
    assert len(header) <= (MOST_NOTES + 1) * (MOST_CHARACTERS + 2)
    assert all(" " <= letter <= "~" for letter in header)
    assert (HEADER in adaptations.headers()) == bool(notes)
