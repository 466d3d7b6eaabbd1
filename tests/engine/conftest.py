"""Fixtures of the engine's tests."""

from pathlib import Path

import pytest
import torch

from oaiserve.engine.model.cpu import build
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.start.prepare import prepare
from tests.engine.doubles import ScriptedRunner
from tests.engine.memory import Memory
from tests.models.decoders import FAMILIES, random_model


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test twice: with each step collected before the next is scheduled, and with one step in flight."""
    monkeypatch.setattr(ScriptedRunner, "is_asynchronous", request.param)
    monkeypatch.setattr(Memory, "overlap", request.param)
    return request.param


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a cache that is empty, apart from the library for float32. Return it."""
    libraries = build.build(torch.float32).parent
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / "native").symlink_to(libraries)
    monkeypatch.setenv("OAISERVE_CACHE", str(cache))
    return cache


@pytest.fixture
def cache_of_blocks(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a cache that is empty, apart from the library for float32, and that is written at once. Return it."""
    monkeypatch.setattr("oaiserve.engine.start.ways.quantized.REMEMBER_AFTER_SECONDS", 0.0)
    return empty_cache


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    """Return a small random Llama, ready to be computed in steps."""
    return prepare(random_model(FAMILIES["llama"]))
