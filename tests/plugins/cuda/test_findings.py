"""`oaiserve doctor` lists what starts on a GPU have found and chosen."""

from pathlib import Path

import pytest

from oaiserve.plugin_loading import findings_of
from oaiserve.plugins.cuda import plugin
from oaiserve.plugins.cuda.executor.product_ways import MatrixTiles, ProductWays
from oaiserve.plugins.cuda.findings import products, unfit
from oaiserve.plugins.cuda.start.features import FEATURES, Probed
from oaiserve.plugins.cuda.start.stored import folder, remember


def test_measured_products_are_listed_with_the_ways_that_were_chosen() -> None:
    seconds = {"by a kernel": {2048: 3e-3, 16: 12.4e-6}, "unpacked": {16: 5e-5, 2048: 1e-3}}
    tiles = (MatrixTiles(16, 128, 4, 3, programs_per_sm=8), MatrixTiles(64, 64, 4, 3))
    ways = ProductWays(unpacked_from=2048, tiles=tiles, expert_tiles=tiles[:1])
    found = Probed({}, ways, seconds, trial_seconds=7.25, about="/models/qwen on an L4")
    part, sentences = products(found)
    assert part == "products"
    assert sentences == (
        "Products of /models/qwen on an L4: by a kernel, they take 12 µs with 16 rows, 3,000 µs with 2048 rows; "
        "unpacked, they take 50 µs with 16 rows, 1,000 µs with 2048 rows. Matrices are unpacked from 2048 rows on, and "
        "inputs rounded to FP8 never. The kernel takes tiles of 16 by 128 with 4 warps, 3 stages, 8 programs per "
        "multiprocessor; tiles of 64 by 64 with 4 warps, 3 stages, 4 programs per multiprocessor. Experts take tiles "
        "of 16 by 128 with 4 warps, 3 stages, 8 programs per multiprocessor. Choosing took 7.2 s, with the kernels "
        "that were compiled for it. --recheck measures again."
    )


def test_kernels_that_do_not_fit_are_listed() -> None:
    found = Probed({}, about="/models/qwen on an L4", unfit={"attention": "OutOfResources: out of resource."})
    ((part, sentences),) = unfit(found)
    assert part == "kernels"
    assert sentences == (
        "Plain torch computes attention of /models/qwen on an L4, because Triton's kernels don't fit there: "
        "OutOfResources: out of resource."
    )


def test_findings_are_those_that_starts_have_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))
    assert findings_of([plugin]) == []
    fast = dict.fromkeys(FEATURES, "")
    remember(folder() / "first", Probed(fast, about="/models/qwen on an L4", unfit={"attention": "OutOfResources."}))
    remember(folder() / "second", Probed(fast, about="/models/llama on an L4", seconds={"unpacked": {16: 5e-5}}))
    assert sorted(part for part, _ in findings_of([plugin])) == ["kernels", "products"]
