"""Models in folders that tests start more than once, and the end of what a start remembers of them."""

import threading
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from oaiserve.engine.engine import Engine
from tests.engine.model.runners import greedy_answers
from tests.engine.text.tokenizers_for_tests import CHATML
from tests.models.decoders import byte_tokenizer

OPTIONS: dict[str, Any] = {"device": "cpu", "kv_blocks": 64, "cpu_threads": 1}


def save(model: PreTrainedModel, folder: Path, *vocab_size: int) -> Path:
    """Save a model with a tokenizer that has a chat template, and return the folder."""
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer(*vocab_size)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return folder


def wait_until_remembered() -> None:
    for thread in threading.enumerate():
        if thread.name == "remember":
            thread.join()


def started(path: Path, *arguments: Any, **options: Any) -> Engine:
    """Return an engine that is ready to run, once all that its start remembers has been written."""
    engine = Engine.from_pretrained(path, *arguments, **options)
    wait_until_remembered()
    return engine


def answer(path: Path, *arguments: Any, **options: Any) -> list[list[int]]:
    """Return the ids of a greedy answer of an engine that is started with these arguments."""
    with started(path, *arguments, **options) as engine:
        return greedy_answers(engine, [[5, 9, 3, 17]])
