"""Fixtures of the engine's tests."""

from pathlib import Path

import pytest
import torch

from oaiserve.engine.accounts.host_time import HostTime, describe
from oaiserve.engine.decoder import quantized_file
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.sequences.step import Step
from oaiserve.engine.start.probe import refuse_unless_probed
from oaiserve.facts.step_record import HostPart
from oaiserve.storage.private import cache_folder
from tests.engine.doubles import ScriptedRunner
from tests.engine.memory import Memory
from tests.models.decoders import FAMILIES, random_model
from tests.models.described import SmallModel, described


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test twice: with each step collected before the next is scheduled, and with one step in flight."""
    monkeypatch.setattr(ScriptedRunner, "is_asynchronous", request.param)
    monkeypatch.setattr(Memory, "overlap", request.param)
    return request.param


@pytest.fixture
def parts_entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the parts of the engine thread's work, with their steps, as engines will enter them."""
    names: list[str] = []
    enter = HostTime.enter

    def recorded(host: HostTime, part: HostPart, step: Step | None = None) -> int:
        names.append(part if step is None else f"{part} {describe(step)}")
        return enter(host, part, step)

    monkeypatch.setattr(HostTime, "enter", recorded)
    return names


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a cache that is empty, apart from the library for float32, which has been probed. Return it.

    Quantized weights fit into it, even if the disk of the tests is nearly full.
    """
    refuse_unless_probed(Library(torch.float32))
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    for name in ("native", "probed"):
        (cache / name).symlink_to(cache_folder() / name)
    monkeypatch.setenv("OAISERVE_CACHE", str(cache))
    monkeypatch.setattr(quantized_file, "LEFT_BYTES", 0)
    return cache


@pytest.fixture(scope="module")
def loaded() -> SmallModel:
    """Return a small random Llama, ready to be computed in steps."""
    return described(random_model(FAMILIES["llama"]))
