"""Once native code has copies of a model's weights, the pages of the files are given back to the system."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.model import memory
from oaiserve.engine.start.described import describe_model
from tests.engine.executors.native.small_models import config, make_model, native_of
from tests.engine.model.runners import greedy_answers
from tests.engine.remembered import save, started
from tests.models.in_blocks import file_of

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc: run it on Linux"),
]
MODEL = config("llama", hidden_size=256, intermediate_size=1024)
OPTIONS = EngineOptions(device="cpu", dtype="float32", kv_blocks=8, cpu_threads=1)


def resident_bytes(path: Path) -> int:
    """Return how much of a file is mapped and in the memory of this process."""
    of_maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    sizes = [re.search(r"^Rss: +(\d+) kB", one, re.MULTILINE) for one in of_maps if f"{path}\n" in one]
    return sum(1024 * int(size[1]) for size in sizes if size is not None)


@pytest.mark.usefixtures("empty_cache")
def test_pages_of_packed_weights_are_given_back(tmp_path: Path) -> None:
    file = save(make_model(MODEL), tmp_path) / "model.safetensors"
    with started(tmp_path, OPTIONS) as engine:
        greedy_answers(engine, [[5, 9, 3]])  # This reads the embedding.
        assert file.stat().st_size > 2**21
        assert 0 < resident_bytes(file) < file.stat().st_size / 4


def test_pages_of_a_gguf_file_are_given_back_as_soon_as_its_blocks_are_packed(tmp_path: Path) -> None:
    file = file_of(config("llama", hidden_size=256, intermediate_size=2048), tmp_path)
    described = describe_model(find_model(file), OPTIONS)
    executor = native_of(described, num_blocks=8, block_size=16, num_threads=1)
    assert executor.weight_bytes > 2**21
    assert resident_bytes(file) < file.stat().st_size / 4  # the description still has the file
    assert described.decoder.layers


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_cache_fits_next_to_the_weights_that_are_packed_after_it_is_sized(
    tmp_path: Path, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(make_model(MODEL), tmp_path)
    options = replace(OPTIONS, dtype="auto", kv_blocks=None, quantize=quantize)
    with started(tmp_path, options) as engine:
        weight_bytes = engine._parts.model.weight_bytes
    free_bytes = weight_bytes * 6 // 5
    monkeypatch.setattr(memory, "available_bytes", lambda: free_bytes)
    with started(tmp_path, options) as engine:
        assert 0 < engine.kv_bytes <= free_bytes - weight_bytes
