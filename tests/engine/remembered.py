"""Models in folders that tests start more than once, and the end of what a start remembers of them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel

from oaiserve.storage.start_cache import AFTER_SECONDS
from tests.engine.doubles import SimulatedEngine
from tests.engine.model.runners import greedy_answers
from tests.engine.text.tokenizers_for_tests import CHATML
from tests.models.decoders import byte_tokenizer

OPTIONS: dict[str, Any] = {"device": "cpu", "kv_blocks": 64, "cpu_threads": 1}


# A runtime without time, in which a record is written at once.
AT_ONCE: Any = SimpleNamespace(later=lambda name, seconds, call: call())


def save(model: PreTrainedModel, folder: Path, *vocab_size: int) -> Path:
    """Save a model with a tokenizer that has a chat template, and return the folder."""
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer(*vocab_size)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


def started(path: Path, *arguments: Any, **options: Any) -> SimulatedEngine:
    """Return an engine that is ready to run, once all that its start remembers has been written."""
    engine = SimulatedEngine.from_pretrained(path, *arguments, **options)
    engine.world.settle(AFTER_SECONDS)
    return engine


def answer(path: Path, *arguments: Any, **options: Any) -> list[list[int]]:
    """Return the ids of a greedy answer of an engine that is started with these arguments."""
    with started(path, *arguments, **options) as engine:
        return greedy_answers(engine, [[5, 9, 3, 17]])
