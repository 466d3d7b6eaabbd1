"""How many blocks the KV cache gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from oaiserve.config import Bytes, EngineOptions
from oaiserve.engine.model import memory
from oaiserve.engine.model.memory import kv_blocks
from oaiserve.errors import StartupError

GIB = 2**30
LOADED = SimpleNamespace(device=torch.device("cpu"), kv_bytes_per_token=2**14)  # 256 KiB a block


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_bytes", lambda: 16 * GIB)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("options", "max_model_len", "blocks"),
    [
        (EngineOptions(), 2048, 65_536 // 16),
        (EngineOptions(), 16_384, 8 * 16_384 // 16),
        (EngineOptions(), 131_072, 4 * GIB // 2**18),  # a quarter of what is free
        (EngineOptions(max_running=2), 2048, 2 * 2048 // 16),  # nobody could use more
        (EngineOptions(kv_blocks=77), 2048, 77),
        (EngineOptions(kv_cache_memory=Bytes("1GiB")), 2048, GIB // 2**18),
    ],
)
def test_blocks(options: EngineOptions, max_model_len: int, blocks: int) -> None:
    assert kv_blocks(LOADED, options, max_model_len) == blocks


@pytest.mark.usefixtures("free")
def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(StartupError, match=r"--kv-cache-memory is 17GiB, but only 16\.0 GiB are free on cpu\."):
        kv_blocks(LOADED, EngineOptions(kv_cache_memory=Bytes("17GiB")), 2048)


@pytest.mark.usefixtures("free")
def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(StartupError, match=r"one block of the KV cache takes 262144 bytes\."):
        kv_blocks(LOADED, EngineOptions(kv_cache_memory=Bytes("4KiB")), 2048)
