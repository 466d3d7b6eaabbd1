"""The floor of a step, and the tables of steps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.decoder.blocks import new_blocks
from oaiserve.engine.decoder.description import Matrix
from tools.bench import floor
from tools.bench.floor import Ceilings
from tools.bench.step import BLOCK_SIZE, average_bytes, choose_points, middle, with_prompt_rate

DEMO = floor.DecoderShape(
    layers=30,
    hidden=576,
    queries=576,
    keys=192,
    intermediate=1536,
    vocab=49152,
    element_bytes=2,
    cached_bytes=30 * 2 * 192 * 2,
    weight_bytes=2,
)
MACHINE = Ceilings(bytes_per_second=52e9, flops_per_second=890e9)


def test_a_decode_step_reads_every_weight_and_what_is_cached() -> None:
    """The demo model has 135 M parameters with its output embedding, and 23,040 bytes of keys and values a token."""
    works = floor.work(DEMO, [(191, 192)])
    weights = sum(work.num_bytes for name, work in works.items() if name not in ("attention", "embed"))
    assert weights == pytest.approx(2 * 134.5e6, rel=0.001)
    assert works["attention"].num_bytes == 23_040 * 192


def test_floors_of_the_demo_model_are_those_worked_out_by_hand() -> None:
    floors_ms = {batch: floor.step_work(DEMO, [(191, 192)] * batch).seconds(MACHINE) * 1e3 for batch in (1, 8, 64)}
    assert floors_ms[1] == pytest.approx(269e6 / 52e9 * 1e3, rel=0.03)
    assert floors_ms[8] == pytest.approx((269e6 + 8 * 192 * 23_040) / 52e9 * 1e3, rel=0.03)
    assert floors_ms[64] == pytest.approx(2 * 134.5e6 * 64 / 890e9 * 1e3, rel=0.05)
    parts_ms = [work.seconds(MACHINE) * 1e3 for work in floor.work(DEMO, [(191, 192)] * 64).values()]
    assert max(parts_ms) < floors_ms[64] < sum(parts_ms)  # reading and computing overlap


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=4))
def test_attention_counts_each_query_and_each_key_that_it_sees(lengths: list[tuple[int, int]]) -> None:
    chunks = [(start, start + length) for start, length in lengths]
    pairs = sum(position + 1 for start, end in chunks for position in range(start, end))
    assert floor.work(DEMO, chunks)["attention"].flops == pytest.approx(4 * 30 * 576 * pairs)


def test_bytes_of_weights_are_averaged_over_the_formats_of_a_file() -> None:
    of_floats = Matrix(torch.zeros(4, 256, dtype=torch.bfloat16), None)
    of_blocks = Matrix(new_blocks(8, 4, 256), None)  # Q8_0: 34 bytes for 32 weights
    assert average_bytes([of_floats, of_blocks]) == pytest.approx((2 + 34 / 32) / 2)


def test_points_that_do_not_fit_are_left_out_and_named() -> None:
    points, left_out = choose_points(64 * 2048 // BLOCK_SIZE)
    assert left_out == ["64 x 8192"]
    assert all(point.num_blocks <= 64 * 2048 // BLOCK_SIZE for kind in points.values() for point in kind)


def test_the_tokens_of_a_step_are_weighed_as_those_of_the_fastest_prompt() -> None:
    prompts = [{"num_tokens": 128, "step_ms": 32.0}, {"num_tokens": 512, "step_ms": 102.4}]
    (row,) = with_prompt_rate([{"num_sequences": 8, "step_ms": 7.0}], prompts)
    assert row == {"num_sequences": 8, "step_ms": 7.0, "computing_ms": pytest.approx(1.6)}


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=5, max_size=30))
def test_parts_add_up_to_the_step_and_outliers_do_not_count(times: list[tuple[float, float]]) -> None:
    rows = [{"step": a + b, "first": a, "second": b} for a, b in times]
    medians = middle([*rows, {"step": 100.0, "first": 100.0, "second": 0.0}])
    assert medians["step"] == pytest.approx(medians["first"] + medians["second"])
    assert medians["step"] <= 2000
