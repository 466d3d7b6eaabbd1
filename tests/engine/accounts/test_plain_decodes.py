"""Shares by sums of steps equal those that are added up request by request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.accounts import plain_decodes
from oaiserve.engine.accounts.plain_decodes import PlainDecodes
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk
from oaiserve.engine.sequences.step_load import load_of_chunks
from oaiserve.explain.causes import RequestCauses

NUMBER = 5
COSTS = st.tuples(*[st.floats(0, 1e4)] * 3)
NUMBERS = st.floats(0, 1e7)


def sequences() -> list[Sequence]:
    """Return sequences of different lengths, the last of which may have several chunks in a step."""
    made = []
    for i in range(NUMBER):
        sequence = Sequence(str(i), 0, [1] * (7 * i + 3), SamplingParams(), max_len=500)
        sequence.num_cached = 2 * i
        sequence.causes = RequestCauses(has_several=i == NUMBER - 1)
        made.append(sequence)
    return made


@given(
    steps=st.lists(
        st.tuples(
            st.sets(st.integers(0, NUMBER - 1), min_size=1),  # the sequences of a step
            st.sampled_from([None, None, None, 0, 1, 2]),  # one that goes back, as after a preemption
            st.sampled_from([None, None, None, 0, 1, 2]),  # one with two tokens
            st.sampled_from([None, None, None, 0, 1, 2]),  # one that is asked for its shares afterwards
            COSTS,
            *(st.floats(0, 1e-4), st.floats(0, 1), NUMBERS, NUMBERS),
        ),
        max_size=30,
    ),
    most_steps=st.integers(1, 8),
)
def test_shares_are_those_of_each_step(
    steps: list[
        tuple[set[int], int | None, int | None, int | None, tuple[float, float, float], float, float, float, float]
    ],
    most_steps: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_decodes, "MOST_STEPS", most_steps)
        decodes = PlainDecodes()
        starts = {sequence: sequence.prompt_len for sequence in sequences()}
        expected = {sequence: [0.0] * 4 for sequence in starts}
        for indices, back, longer, asked, costs, unit, beside, core_ns, machine_ns in steps:
            chunks = []
            others = []
            for index, sequence in enumerate(starts):
                if index == back:
                    starts[sequence] = max(1, starts[sequence] - 3)
                if index not in indices:
                    continue
                chunk = Chunk(sequence, starts[sequence], 1 + (index == longer))
                chunks.append(chunk)
                starts[sequence] = chunk.end
                assert sequence.causes is not None
                if chunk.num_tokens > 1 or not sequence.causes.is_plain:
                    others.append(chunk)
                    continue
                ns = costs[0] + costs[1] * chunk.start + costs[2] * sequence.num_cached
                share = unit * ns + beside
                for place, amount in enumerate((ns, core_ns * share, machine_ns * share, 0.25)):
                    expected[sequence][place] += amount
            found = decodes.begin_step(chunks, load_of_chunks(chunks))
            assert sorted(map(id, found)) == sorted(map(id, others))
            decodes.step_ended(costs, unit, beside, core_ns, machine_ns, 0.25, is_known=True)
            if asked is not None:
                decodes.settle(list(starts)[asked].causes)
                check(list(starts)[asked], expected)
        decodes.settle_all()
        for sequence in starts:
            check(sequence, expected)


def check(sequence: Sequence, expected: dict[Sequence, list[float]]) -> None:
    own = sequence.causes
    assert own is not None
    found = [own.alone_ns, own.core_ns, own.machine_ns, own.weight_reads]
    assert found == pytest.approx(expected[sequence], rel=1e-9, abs=1e-3)


def test_request_that_left_comes_again_with_a_context_of_nothing() -> None:
    decodes = PlainDecodes()
    first, second, *_ = sequences()
    expected = {first: [0.0] * 4, second: [0.0] * 4}
    assert first.causes is not None
    # The last step adds nothing to the sum of contexts for the first sequence, as if that took no part.
    for starts in ((3, 10), (4, 11), (0, 12)):
        chunks = [Chunk(sequence, start, 1) for sequence, start in zip(expected, starts, strict=True)]
        assert decodes.begin_step(chunks, load_of_chunks(chunks)) == []
        decodes.step_ended((100.0, 1.0, 0.0), 0.0, 0.5, 10.0, 20.0, 0.5, is_known=True)
        for chunk in chunks:
            for place, amount in enumerate((100.0 + chunk.start, 5.0, 10.0, 0.5)):
                expected[chunk.sequence][place] += amount
        if chunks[0].start == 4:
            decodes.settle(first.causes)
    decodes.settle_all()
    for sequence in expected:
        check(sequence, expected)
