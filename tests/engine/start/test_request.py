"""While a thread loads weights, the main thread makes the tokenizer."""

from pathlib import Path
from threading import Event

import pytest

from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.text.tokenizer import Tokenizer

MOST_SECONDS = 10.0  # for a wait that ends at once unless the test fails


class AwaitedEvent(Event):
    """An event that says when a thread begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_awaited.set()
        return super().wait(timeout)


def request_of(path: Path) -> StartRequest:
    """Return the request of a model that doesn't exist."""
    source = ModelSource(str(path / "missing"), None, is_local=True)
    return StartRequest(source, EngineOptions())


def test_the_main_thread_leaves_pythons_lock_to_a_load_until_it_packs_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(Tokenizer, "from_pretrained", lambda *_, **__: order.append("tokenizer"))
    request = request_of(tmp_path)
    request.is_native = is_native = AwaitedEvent()

    def load() -> None:
        is_native.is_awaited.wait(MOST_SECONDS)
        order.append("describe")
        is_native.set()

    request.load("weights", load, packs_blocks=True)
    assert order == ["describe", "tokenizer"]


def test_a_load_that_fails_before_it_packs_blocks_ends_the_wait(tmp_path: Path) -> None:
    def load() -> None:
        raise NotKnown("no such family")

    with pytest.raises(NotKnown, match="no such family"):
        request_of(tmp_path).load("weights", load, packs_blocks=True)
