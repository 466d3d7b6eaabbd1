"""The Triton kernels compile for each kind of card, within bounds, and into the instructions that make them fast."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from tools.gpu import kernels
from tools.gpu.compiling import MI300
from tools.gpu.shapes import HAS_FLOAT8

pytestmark = pytest.mark.kernels

pytest.importorskip("triton", reason="Triton has no wheels for this system")

DATACENTER_BLACKWELL = 100
# Compiling all shapes for AMD takes minutes, so these are a product, with its unpacking in plain Triton, and norms.
OF_AMD = ("4 bits with zeros, 1 row", "norms of 4,096")
CAPABILITIES = [*(one for one in kernels.CARDS if one != MI300), DATACENTER_BLACKWELL]
KERNELS = {
    *("write_kernel", "plan_kernel", "prefill_kernel", "decode_kernel"),
    *("latent_write_kernel", "latent_kernel"),
    *("best_of_chunk_kernel", "best_kernel", "weights_kernel", "candidates_kernel", "cut_kernel", "scores_kernel"),
    *("shrink_kernel", "expand_kernel", "add_and_norm_kernel", "activate_kernel"),
    *("product_kernel", "unpack_kernel", "plan_experts_kernel", "recurrence_kernel", "round_rows_kernel"),
}
FOR_FLOAT8 = {"round_rows_kernel"}


class Cards:
    """What kernels take on each card. One process compiles for all, because importing torch takes longer than reading
    cached kernels, but a test waits for its own card and those before it alone: without a cache, each takes minutes."""

    def __init__(self) -> None:
        self.rows: dict[int, list[dict[str, Any]]] = {}
        wanted = {**dict.fromkeys(CAPABILITIES, ()), MI300: OF_AMD}
        self._missing = iter(wanted)
        self._found = kernels.resources_by_card(None, wanted)

    def of(self, capability: int) -> list[dict[str, Any]]:
        while capability not in self.rows:
            self.rows[next(self._missing)] = next(self._found)["rows"]
        return self.rows[capability]

    def close(self) -> None:
        self._found.close()


@pytest.fixture(scope="module")
def cards() -> Iterator[Cards]:
    with closing(Cards()) as all_cards:
        yield all_cards


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_all_kernels_are_within_bounds_on_each_card(capability: int, cards: Cards) -> None:
    rows = cards.of(capability)
    assert {row["capability"] for row in rows} == {capability}
    expected = KERNELS if capability >= HAS_FLOAT8 else KERNELS - FOR_FLOAT8
    assert {row["kernel"] for row in rows} == expected
    assert kernels.problems(rows) == []


def test_kernels_compile_for_mi300(cards: Cards) -> None:
    rows = cards.of(MI300)
    assert {row["capability"] for row in rows} == {MI300}
    assert {row["kernel"] for row in rows} == {"product_kernel", "unpack_kernel", "add_and_norm_kernel"}
    assert kernels.problems(rows) == []
    assert all(row["registers"] for row in rows)


A_ROW: Mapping[str, Any] = {
    "shape": "heads of 64",
    "kernel": "decode_kernel",
    "capability": 90,
    "spilled_bytes": 16,
    "programs": 3,
    "programs_counted": 3,
    "instructions": ["HMMA", "LDGSTS"],
    "is_in_16_bits": True,
}


OF_A_PRODUCT: Mapping[str, Any] = {
    "kernel": "product_kernel",
    "capability": 120,
    "kind": "int4",
    "rows": 16,
    "instructions_per_weight": 7.9,
}


def test_a_kernel_within_its_bounds_has_no_problem() -> None:
    assert kernels.problems([A_ROW]) == []


def test_tiles_that_a_start_times_may_take_more_instructions() -> None:
    tried = {**A_ROW, **OF_A_PRODUCT, "shape": "4 bits, tiles to choose from"}
    assert kernels.problems([tried]) == []
    assert len(kernels.problems([{**tried, "spilled_bytes": 328}])) == 1


def test_bounds_are_a_tenth_wider_for_another_triton() -> None:
    product = {**A_ROW, **OF_A_PRODUCT}
    spilling = {**A_ROW, "kernel": "prefill_kernel", "instructions": ["HGMMA", "LDGSTS"]}
    rows = [{**product, "instructions_per_weight": 4.95}, {**spilling, "spilled_bytes": 160}]
    assert kernels.problems(rows, kernels.BY_OTHER_TRITON) == []
    assert len(kernels.problems(rows)) == 2
    rows = [{**product, "instructions_per_weight": 4.96}, {**spilling, "spilled_bytes": 161}, {**A_ROW, "programs": 2}]
    assert [said.partition(": ")[2] for said in kernels.problems(rows, kernels.BY_OTHER_TRITON)] == [
        "takes 4.96 instructions for a weight, of at most 4.95",
        "spills 161 bytes of a thread's registers, of at most 160",
        "a multiprocessor runs 2 of its programs, and the plan counts on 3",
    ]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"problem": "needs 262,144 bytes of shared memory"}, "needs 262,144 bytes of shared memory"),
        ({"programs": 2}, "a multiprocessor runs 2 of its programs, and the plan counts on 3"),
        ({"spilled_bytes": 24}, "spills 24 bytes of a thread's registers, of at most 16"),
        ({"capability": 80, "spilled_bytes": 328}, "spills 328 bytes of a thread's registers, of at most 320"),
        ({"instructions": ["LDGSTS"]}, "multiplies with LDGSTS"),
        ({"kernel": "prefill_kernel"}, "multiplies with HMMA, LDGSTS"),
        (OF_A_PRODUCT, "takes 7.9 instructions for a weight, of at most 4.5"),
        ({**OF_A_PRODUCT, "instructions_per_weight": 0.0}, "takes 0.0 instructions for a weight, of at most 4.5"),
    ],
)
def test_what_is_beyond_a_bound_is_named(found: Mapping[str, Any], said: str) -> None:
    row = {**A_ROW, **found}
    assert kernels.problems([row]) == [f"{row['kernel']} on sm_{row['capability']}, heads of 64: {said}"]
