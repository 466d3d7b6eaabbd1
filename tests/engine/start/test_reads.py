"""A start reads what a model's files say about it once."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oaiserve.checkpoints import checkpoint, gguf
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.remembered import OPTIONS, save, started
from tests.models.in_blocks import FAMILIES as IN_BLOCKS
from tests.models.in_blocks import TOKENIZER, file_of

_open_counts: list[Counter[str]] = []


@contextmanager
def opens_counted() -> Iterator[Counter[str]]:
    """Count how often each file is opened in the block, by its name."""
    if not hasattr(opens_counted, "hooked"):  # A hook of the interpreter stays.
        sys.addaudithook(lambda event, args: _count(args[0]) if event == "open" and _open_counts else None)
        opens_counted.hooked = True  # type: ignore[attr-defined]
    _open_counts.append(Counter())
    try:
        yield _open_counts[-1]
    finally:
        _open_counts.pop()


def _count(path: object) -> None:
    if isinstance(path, str | Path):
        _open_counts[-1][Path(path).name] += 1


def test_a_later_start_opens_each_file_of_settings_once(tmp_path: Path, empty_cache: Path) -> None:
    folder = save(make_model(FAMILIES["llama"]), tmp_path / "model")
    with started(folder, **OPTIONS, compile=False):  # transformers makes the tokenizer, and reads the files, too.
        pass
    with opens_counted() as opens, started(folder, **OPTIONS, compile=False):
        pass
    assert opens["config.json"] == opens["generation_config.json"] == 1


def test_starts_read_the_head_of_a_gguf_file_once(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(IN_BLOCKS["llama"], tmp_path, tokenizer=TOKENIZER)
    heads = []

    def read_head(path: Path) -> gguf.GgufHead:
        heads.append(path.name)
        return gguf.read_head(path)

    monkeypatch.setattr(checkpoint, "read_head", read_head)
    with started(path, **OPTIONS, compile=False):
        assert heads == [path.name]
    with opens_counted() as opens, started(path, **OPTIONS, compile=False):
        assert heads == [path.name] * 2
    assert opens[path.name] == 2  # for its head and for its tensors
