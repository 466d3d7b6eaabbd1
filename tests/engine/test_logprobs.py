"""Log-probabilities in arrays: what was put in comes out, and takes little memory."""

import math
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.types.logprobs import Entry, TokenLogprobs
from tests.engine.logprobs_for_tests import token_logprobs

ENTRIES = st.tuples(st.integers(0, 2**31 - 1), st.binary(max_size=4), st.floats(max_value=0, allow_nan=False))
ROWS = st.lists(st.lists(ENTRIES, min_size=1, max_size=4), max_size=6)


@given(ROWS, ROWS)
def test_rows_come_out_as_they_were_put_in(first: list[list[Entry]], second: list[list[Entry]]) -> None:
    rows = token_logprobs(*first)
    rows.extend(token_logprobs(*second))
    assert list(rows.entries()) == first + second
    assert rows == token_logprobs(*first, *second)
    assert (len(rows), rows.num_entries) == (len(first + second), sum(map(len, first + second)))
    assert list(rows.tokens()) == [entries[0] for entries in first + second]
    rows.truncate(len(first))
    assert list(rows.entries()) == first
    assert len(rows.ranks) == len(first)


def test_an_alternative_takes_about_20_bytes() -> None:
    texts = [b"a", b"b"] * 10 + [b"c"]
    tracemalloc.start()
    try:
        rows = TokenLogprobs()
        for _ in range(1000):
            rows.add(range(1000, 1021), texts, [-math.pi] * 21)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 20 <= num_bytes / rows.num_entries < 25
