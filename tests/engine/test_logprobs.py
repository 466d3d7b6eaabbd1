"""Log-probabilities in arrays: what was put in comes out, and takes little memory."""

from __future__ import annotations

import math
import pickle
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.logprobs import TokenLogprob, TokenLogprobs, TopLogprob, text_of

ENTRIES = st.builds(
    lambda token_id, data, logprob: TopLogprob(token_id, text_of(data), data, logprob),
    st.integers(0, 2**31 - 1),
    st.binary(max_size=4),
    st.floats(max_value=0, allow_nan=False),
)
ROWS = st.lists(
    st.builds(
        lambda one, top: TokenLogprob(one.token_id, one.token, one.bytes, one.logprob, top),
        ENTRIES,
        st.lists(ENTRIES, max_size=3),
    ),
    max_size=6,
)


@given(ROWS, ROWS)
def test_rows_come_out_as_they_were_put_in(first: list[TokenLogprob], second: list[TokenLogprob]) -> None:
    rows = TokenLogprobs(first)
    rows.extend(TokenLogprobs(second))
    assert list(rows) == first + second
    assert rows == TokenLogprobs(first + second) == pickle.loads(pickle.dumps(rows))
    assert rows.num_entries == sum(1 + len(row.top) for row in first + second)
    assert [token_id for token_id, _, _ in rows.tokens()] == [row.token_id for row in first + second]
    rows.truncate(len(first))
    assert list(rows) == first


@given(ROWS.filter(bool))
def test_rows_are_read_by_position(rows: list[TokenLogprob]) -> None:
    packed = TokenLogprobs(rows)
    assert (packed[0], packed[-1], packed[1:]) == (rows[0], rows[-1], rows[1:])
    with pytest.raises(IndexError):
        packed[len(rows)]


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
