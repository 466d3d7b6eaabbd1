"""What a start chooses on a card of each kind, by a clock that counts bytes, operations and instructions of products.

The card is a fake one, and its rates are those that its maker publishes, so these are no measurements: they show that
each card gets its own choice.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oaiserve.engine.model.attention import FP8
from oaiserve.plugins.cuda.executor.device_matrices import PARTS, Kind, PackedMatrix
from oaiserve.plugins.cuda.start import trials
from oaiserve.plugins.cuda.start.trials import FLUSHED_BYTES, RUNS, SLEEP_CYCLES, product_ways
from tests.engine.executors import fake_gpu

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor import triton_attention
from tools.gpu.compiling import MI300
from tools.gpu.shapes import card

pytestmark = pytest.mark.kernels

SHAPES = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)]  # an 8B's
INSTRUCTIONS: dict[Kind, float] = {"int4": 4.4, "float8": 4.8}  # The kernel's loop has these for a weight.


@dataclass(frozen=True)
class Rates:
    """What a card does in a second, in units of 10^12."""

    capability: int
    terabytes: float
    operations: float  # with weights of 16 bits
    operations_in_8_bits: float  # 0 without such instructions
    thread_instructions: float

    def seconds(self, run: Any) -> float:
        """Return how long a product takes at these rates."""
        return 1e-12 * self._picoseconds(run)

    def _picoseconds(self, run: Any) -> float:
        x, matrix, _, way = run.args
        n, columns = matrix.shape
        weights = n * columns
        num_bytes = weights * (0.5 if PARTS[matrix.kind] == 4 else 1)
        operations = 2 * weights * len(x)
        if way.rounds(len(x)):
            reading = num_bytes + 3 * x.nelement()
            return max(reading / self.terabytes, operations / self.operations_in_8_bits * (1.2 - 0.2 * way.adds_fast))
        if way.unpacks(len(x)):
            written = 2 * weights
            unpacking = (num_bytes + written) / self.terabytes
            return unpacking + max(written / self.terabytes, operations / self.operations)
        tiles = way.tiles_for(len(x))
        num_tiles = -(-len(x) // tiles.rows)
        computed = operations / len(x) * num_tiles * tiles.rows
        unpacking = weights * num_tiles * INSTRUCTIONS[matrix.kind]
        # A warp multiplies what it has unpacked, so the times of both add up.
        return max(num_bytes / self.terabytes, computed / self.operations + unpacking / self.thread_instructions)


CARDS = {
    "A100": Rates(80, 2.04, 312, 0, 9.7),
    "L4": Rates(89, 0.3, 121, 242, 15.1),
    "H100": Rates(90, 3.35, 989, 1979, 29.6),
    "RTX 5090": Rates(120, 1.79, 210, 419, 52),
    "MI300X": Rates(MI300, 5.3, 1307, 0, 81),
}


def matrices_of(kind: Kind) -> list[PackedMatrix]:
    gpu: dict[str, Any] = {"device": fake_gpu.GPU}
    if kind == "float8":
        codes = (torch.empty(n, k, dtype=FP8, **gpu) for n, k in SHAPES)
        return [PackedMatrix(kind, one, torch.empty(1, len(one), **gpu), None) for one in codes]
    return [
        PackedMatrix(kind, torch.empty(n, k // 2, dtype=torch.uint8, **gpu), torch.empty(k // 128, n, **gpu), None)
        for n, k in SHAPES
    ]


# By card and kind of weights: from how many rows on matrices are unpacked, and rows are rounded to FP8. Weights in FP8
# are expanded on an A100 and an MI300.
CHOICES: dict[tuple[str, Kind], tuple[int | None, int | None]] = {
    ("A100", "int4"): (1024, None),
    ("L4", "int4"): (None, None),
    ("L4", "float8"): (None, 256),
    ("H100", "int4"): (1024, None),
    ("H100", "float8"): (1024, 256),
    ("RTX 5090", "int4"): (None, None),
    ("RTX 5090", "float8"): (None, 64),
    ("MI300X", "int4"): (2048, None),
}


@pytest.mark.parametrize(("name", "kind"), CHOICES, ids=str)
def test_each_card_gets_its_own_choice(name: str, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = CARDS[name]
    monkeypatch.setattr(triton_attention, "card_of", lambda device: card(rates.capability))
    monkeypatch.setattr(trials, "refuse_wrong", lambda *_: None)  # There are no numbers to compare.
    stored: Any = SimpleNamespace(packed=matrices_of(kind), dtype=torch.bfloat16, device=fake_gpu.GPU)
    found = product_ways(stored, rates.seconds)
    assert (found.ways.unpacked_from, found.ways.rounded_from) == CHOICES[name, kind]
    assert [tiles.rows for tiles in found.ways.tiles] == [16, 64, 128]
    # For the smaller memory of other cards, fewer tiles are loaded ahead.
    assert found.ways.tiles[-1].num_stages == (3 if name in ("A100", "H100") else 2)


@pytest.mark.parametrize("kind", ["int4", "float8"])
def test_products_of_an_8b_are_tried_on_an_l4_for_less_than_ten_seconds(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the time to compile. On an H100, products in few bits took up to 5.3 times as long as their bytes."""
    rates = CARDS["L4"]
    taken: list[float] = []

    def seconds(run: Any) -> float:
        matrix = run.args[1]
        found = rates.seconds(run)
        # Before its runs the device sleeps, and before each one it writes over its caches.
        between = SLEEP_CYCLES / 0.795e9 + RUNS * FLUSHED_BYTES / (1e12 * rates.terabytes)
        compared = 40 * matrix.shape[0] * matrix.shape[1] / (1e12 * rates.terabytes)  # with plain torch
        taken.append((RUNS + 2) * 6 * found + between + compared)
        return found

    monkeypatch.setattr(triton_attention, "card_of", lambda device: card(rates.capability))
    monkeypatch.setattr(trials, "refuse_wrong", lambda *_: None)
    stored: Any = SimpleNamespace(packed=matrices_of(kind), dtype=torch.bfloat16, device=fake_gpu.GPU)
    product_ways(stored, seconds)
    assert len(taken) >= len(SHAPES) * 3
    assert sum(taken) < 10
