"""The differences between two prompts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.plugins.inspector.changes import Change, changes_of

END = 0  # the token that ends a line
PROMPTS = st.lists(st.integers(0, 4), max_size=40)


def ends_line(token_id: int) -> bool:
    return token_id == END


@given(PROMPTS, PROMPTS)
def test_the_changes_make_the_later_prompt_of_the_earlier_one(before: list[int], now: list[int]) -> None:
    made: list[int] = []
    at = 0
    for change in changes_of(before, now, ends_line):
        made += before[at : change.removed_start]
        assert len(made) == change.start
        made += now[change.start : change.start + change.added]
        at = change.removed_start + change.removed
    assert made + before[at:] == now


def test_a_changed_clock_and_a_new_turn_are_two_changes() -> None:
    before = [1, 2, 3, END, 5, 6, END]
    now = [1, 9, 3, END, 5, 6, END, 7, END]
    assert changes_of(before, now, ends_line) == [Change(1, 1, 1, 1), Change(7, 2, 7, 0)]


def test_a_line_that_has_moved_is_removed_and_added() -> None:
    before = [1, END, 2, END, 3, END, 4, END]
    now = [4, END, 1, END, 2, END, 3, END]
    assert changes_of(before, now, ends_line) == [Change(0, 2, 0, 0), Change(8, 0, 6, 2)]


def test_between_unique_lines_repeated_ones_are_compared_at_both_ends() -> None:
    before = [1, END, 5, END, 5, END, 6, END, 5, END, 2, END]
    now = [1, END, 5, END, 5, END, 7, END, 5, END, 2, END]
    assert changes_of(before, now, ends_line) == [Change(6, 1, 6, 1)]
