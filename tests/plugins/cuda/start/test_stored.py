"""What a probe of a GPU found is read as it was written, or not at all."""

import os
from pathlib import Path

import pytest

from oaiserve.plugins.cuda.executor.product_ways import ProductWays
from oaiserve.plugins.cuda.start.features import FEATURES, Probed
from oaiserve.plugins.cuda.start.stored import all_found, folder, recall, remember

ALL_ON = dict.fromkeys(FEATURES, "")
WAYS = ProductWays(unpacked_from=256, rounded_from=64, adds_fast=True)
SECONDS = {"by a kernel": {16: 1e-5, 64: 2e-5}}


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        "[]",
        "7",
        '{"off": {"kernels": ""}}',
        '{"kernels": ""}',
        '{"verdict": {"kernels": ""}, "ways": {}, "seconds": {}, "about": ""}',
        '{"verdict": {}, "ways": {"unknown": 1}, "seconds": {}, "about": ""}',
        '{"kernels": 1, "graphs": 2}',
        "\xff",
        None,
    ],
)
def test_a_spoiled_verdict_counts_as_missing(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "verdict"
    if content is None:
        path.mkdir()
    else:
        path.write_text(content, encoding="latin-1")
        path.chmod(0o600)
    assert recall(path) is None
    assert recall(tmp_path / "missing") is None


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "probed-gpus" / "verdict"
    found = Probed({**ALL_ON, "graphs": "wrong"}, WAYS, SECONDS, about="a model on a GPU")
    remember(path, found)
    assert recall(path) == found


def test_all_that_starts_have_found_is_listed_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))
    assert [*all_found()] == []
    founds = [Probed(ALL_ON, WAYS, SECONDS, about=about) for about in ("the older one", "the newer one")]
    for time, found in enumerate(founds):
        remember(folder() / found.about, found)
        os.utime(folder() / found.about, (time, time))
    (folder() / "spoiled").write_text("{")
    assert [*all_found()] == founds[::-1]
