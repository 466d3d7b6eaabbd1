"""A start is recorded with the files and versions that it was made of, and a later one finds it."""

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.commands.models import stored_models
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.quantized_file import QuantizedFile
from oaiserve.engine.request import ChatPrompt
from oaiserve.engine.start.start_record import recall_start, remember_start, subject_of
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.storage import start_cache
from oaiserve.storage.start_cache import NotRemembered
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.remembered import AT_ONCE, OPTIONS, answer, save
from tests.models.decoders import generate

pytestmark = pytest.mark.compiler
NONE = "no earlier start has found it with these options"


@pytest.fixture
def folder(tmp_path: Path, empty_cache: Path) -> Path:
    return save(make_model(FAMILIES["llama"]), tmp_path / "model")


def recalled(folder: Path, **options: Any) -> Path | None:
    subject = subject_of(Checkpoint(folder), EngineOptions(**OPTIONS | options))
    assert subject is not None
    return recall_start(subject)


def records(cache: Path) -> list[Path]:
    return sorted(cache.glob("remembered/model-*"))


def test_the_second_start_finds_the_first(folder: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "oaiserve.engine.start")
    with pytest.raises(NotRemembered, match=f"^{NONE}$"):
        recalled(folder)
    expected = answer(folder, **OPTIONS)
    assert f"No earlier start is recorded: {NONE}" in caplog.text
    (path,) = records(empty_cache)
    written_ns = path.stat().st_mtime_ns
    caplog.clear()
    assert answer(folder, **OPTIONS) == expected
    assert "No earlier start is recorded" not in caplog.text
    assert path.stat().st_mtime_ns == written_ns
    assert recalled(folder) is None
    assert answer(folder, **OPTIONS, recheck=True) == expected
    assert path.stat().st_mtime_ns > written_ns


def test_a_model_that_has_started_is_listed_with_its_day(folder: Path) -> None:
    assert stored_models() == []
    answer(folder, **OPTIONS)
    (model,) = stored_models()
    assert model.path == folder
    assert model.remembered.startswith("20")


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_a_start_with_other_options_is_not_found(folder: Path, quantize: str) -> None:
    answer(folder, **OPTIONS, quantize=quantize)
    with pytest.raises(NotRemembered, match=f"^{NONE}$"):
        recalled(folder, quantize="int4")
    assert (recalled(folder, quantize=quantize) is None) == (quantize == "none")


def test_other_weights_are_another_model(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = answer(folder, **OPTIONS, quantize="int8")
    other = make_model(FAMILIES["llama"])
    with torch.no_grad():
        other.get_input_embeddings().weight.normal_(generator=torch.Generator().manual_seed(7))
    other.save_pretrained(folder)
    with pytest.raises(NotRemembered, match=r"^model\.safetensors has changed$"):
        recalled(folder, quantize="int8")
    after = answer(folder, **OPTIONS, quantize="int8")
    assert after != before
    assert after == answer(folder, **OPTIONS, quantize="int8")
    assert answer(folder, **OPTIONS) == generate(other, [[5, 9, 3, 17]], 12)


def test_the_version_is_part_of_a_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(folder, **OPTIONS)
    version_of = start_cache.version_of
    monkeypatch.setattr(start_cache, "version_of", lambda name: "0.1" if name == "oaiserve" else version_of(name))
    with pytest.raises(NotRemembered, match=r"^oaiserve is 0\.1 now, and was \d"):
        recalled(folder)


def test_a_file_that_changes_during_the_start_is_not_recorded(
    folder: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(asked: Any, data: Any, content: bytes) -> Path | None:
        (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
        return start_cache.remember(asked, data, content)

    monkeypatch.setattr("oaiserve.engine.start.start_record.remember", changing)
    answer(folder, **OPTIONS)
    assert records(empty_cache) == []


def test_starts_that_end_at_once_leave_the_record_of_the_file_that_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subject_of(Checkpoint(folder), EngineOptions(**OPTIONS, quantize="int8"))
    assert subject is not None
    first, second = (QuantizedFile(64, 2**20) for _ in range(2))
    sha256_of = start_cache.sha256_of

    def second_ends_meanwhile(path: Path) -> str:
        monkeypatch.setattr(start_cache, "sha256_of", sha256_of)
        remember_start(subject, second, AT_ONCE)
        return sha256_of(path)

    monkeypatch.setattr(start_cache, "sha256_of", second_ends_meanwhile)
    remember_start(subject, first, AT_ONCE)
    assert recall_start(subject) is not None


def _with_data(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """Return a function that changes the data of a record and gives it a right checksum."""

    def changed(content: bytes) -> bytes:
        line, _, rest = content[:-32].partition(b"\n")
        header = json.loads(line)
        header["data"] = change(header["data"])
        written = json.dumps(header).encode() + b"\n" + rest
        return written + hashlib.sha256(written).digest()

    return changed


def _with_quantized(name: str, value: object) -> Callable[[bytes], bytes]:
    return _with_data(lambda data: {"quantized": data["quantized"] | {name: value}})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-40],
        lambda content: b"",
        _with_data(lambda data: {}),
        _with_data(lambda data: {"quantized": 7}),
        _with_data(lambda data: {"quantized": {}}),
        *(_with_quantized(name, value) for name, value in (("name", "another"), ("name", 7), ("name", "../name"))),
        *(_with_quantized("num_bytes", value) for value in (0, -64, 2**60, "1", None)),
        _with_quantized("inode", 1),
        _with_quantized("more", 1),
    ],
)
def test_a_spoiled_record_counts_as_missing(folder: Path, empty_cache: Path, spoil: Callable[[bytes], bytes]) -> None:
    expected = answer(folder, **OPTIONS, quantize="int8")
    (path,) = records(empty_cache)
    path.write_bytes(spoil(path.read_bytes()))
    assert answer(folder, **OPTIONS, quantize="int8") == expected
    assert recalled(folder, quantize="int8")  # The start has written a new record in its place.


def test_a_file_with_parts_in_several_folders_is_not_recorded(tmp_path: Path) -> None:
    parts = [tmp_path / name / f"model-0000{number}-of-00002.gguf" for number, name in ((1, "a"), (2, "b"))]
    for part in parts:
        part.parent.mkdir()
        part.touch()
    (tmp_path / "a" / parts[1].name).symlink_to(parts[1])
    assert subject_of(Checkpoint.at(parts[0]), EngineOptions(**OPTIONS)) is None


def test_a_tokenizer_that_is_remembered_is_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Tokenizer.from_pretrained(folder, runtime=AT_ONCE)
    monkeypatch.setattr("oaiserve.engine.text.tokenizer.load_tokenizer", None)
    second = Tokenizer.from_pretrained(folder)
    assert second.backend.to_str() == first.backend.to_str()
    for name in ("vocab_size", "eos_token_id", "special_token_ids", "special_ids"):
        assert getattr(second, name) == getattr(first, name)
    prompt = ChatPrompt([{"role": "user", "content": "Hello, é!"}])
    assert second.encode(prompt) == first.encode(prompt)
