"""While a thread loads weights, the main thread makes the tokenizer."""

from pathlib import Path

import pytest

from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.engine.doubles import new_world


def request_of(path: Path) -> StartRequest:
    """Return the request of a model that doesn't exist."""
    source = ModelSource(str(path / "missing"), None, is_local=True)
    return StartRequest(source, EngineOptions(), new_world())


def test_the_main_thread_leaves_pythons_lock_to_a_load_until_it_packs_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(Tokenizer, "of", lambda *_, **__: order.append("tokenizer"))
    request = request_of(tmp_path)

    def load() -> None:
        order.append("describe")
        request.went_native.put(None)
        request.runtime.wait_for(lambda: "tokenizer" in order)
        order.append("pack")

    request.load("weights", load, packs_blocks=True)
    assert order == ["describe", "tokenizer", "pack"]


def test_a_load_that_fails_before_it_packs_blocks_ends_the_wait(tmp_path: Path) -> None:
    def load() -> None:
        raise NotKnown("no such family")

    with pytest.raises(NotKnown, match="no such family"):
        request_of(tmp_path).load("weights", load, packs_blocks=True)
