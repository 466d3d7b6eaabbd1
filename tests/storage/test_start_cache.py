"""What is remembered holds for the files and the versions that it was found out from, and for no others."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.storage import start_cache as remembered
from oaiserve.storage.start_cache import NotRemembered, Subject, recall, remember, subject

DATA = {"answer": [1, "two"]}
CONTENT = b"bytes" * 100


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "remembered"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights.safetensors").write_text("weights")
    (model / "README.md").write_text("read me")
    return model


def ask(folder: Path, **options: str) -> Subject:
    return subject("kind", folder, (".json", ".safetensors"), options=options, packages=("pytest", "not-installed"))


def remembered_path(folder: Path) -> Path:
    path = remember(ask(folder), lambda: DATA, CONTENT)
    assert path is not None
    return path


def overwrite_weights(folder: Path) -> None:
    """Keep the size and the time of the file."""
    weights = folder / "weights.safetensors"
    stat = weights.stat()
    weights.write_text("WEIGHTS")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_what_was_found_out_is_there_for_the_next_start(folder: Path) -> None:
    remembered_path(folder)
    (folder / "README.md").write_text("changed")  # The record was not made from this file.
    record = recall(ask(folder))
    assert record.data == DATA
    start = record.start
    assert start % 64 == 0
    assert record.content[start : start + len(CONTENT)] == CONTENT


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (overwrite_weights, "weights.safetensors has changed"),
        (lambda folder: (folder / "config.json").unlink(), "config.json was removed"),
        (lambda folder: (folder / "more.json").touch(), "more.json was added"),
    ],
)
def test_a_changed_file_is_named(folder: Path, change: Callable[[Path], object], reason: str) -> None:
    remembered_path(folder)
    change(folder)
    with pytest.raises(NotRemembered, match=f"^{reason}$"):
        recall(ask(folder))


def test_files_that_were_written_again_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered_path(folder)
    for path in list(folder.iterdir()):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    read: list[str] = []
    sha256 = remembered.sha256_of
    monkeypatch.setattr(remembered, "sha256_of", lambda path: (read.append(path.name), sha256(path))[1])
    for _ in range(2):
        record = recall(ask(folder))
        assert (record.data, bytes(record.content[record.start :][: len(CONTENT)])) == (DATA, CONTENT)
    assert sorted(read) == ["config.json", "weights.safetensors"]


def test_it_holds_for_these_versions_only(folder: Path) -> None:
    remembered_path(folder)
    older = replace(ask(folder), versions={"pytest": "0.1", "not-installed": "none"})
    with pytest.raises(NotRemembered, match=r"^pytest is 0\.1 now, and was \d"):
        recall(older)


def test_each_combination_of_options_is_remembered_apart(folder: Path) -> None:
    remembered_path(folder)
    with pytest.raises(NotRemembered, match="^no earlier start has found it with these options$"):
        recall(ask(folder, dtype="float32"))
    remember(ask(folder, dtype="float32"), lambda: {"answer": 2}, b"")
    assert recall(ask(folder)).data == DATA
    assert recall(ask(folder, dtype="float32")).data == {"answer": 2}


def test_nothing_is_remembered_of_a_file_that_changed_during_the_start(folder: Path, cache: Path) -> None:
    subject = ask(folder)
    (folder / "config.json").write_text("{ }")
    assert remember(subject, lambda: DATA, CONTENT) is None
    assert not cache.exists()


def test_no_other_start_writes_a_record_while_one_makes_its_data(folder: Path, cache: Path) -> None:
    def data() -> dict[str, object]:
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return {}

    cache.mkdir(parents=True, mode=0o700)
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        remember(ask(folder), data, b"")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_a_record_stays_in_the_cache_that_its_subject_was_made_with(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    subject = ask(folder)
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "other"))
    path = remember(subject, lambda: DATA, CONTENT)
    assert path is not None
    assert path.parent == cache
    assert not (tmp_path / "other").exists()


@given(data=st.data())
def test_a_damaged_record_is_not_used(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("damaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OAISERVE_CACHE", str(root))
        (root / "config.json").write_text("{}")
        path = remembered_path(root)
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        else:
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        with pytest.raises(NotRemembered, match="is damaged$"):
            recall(ask(root))


def test_a_record_that_others_could_have_written_is_not_used(folder: Path, cache: Path) -> None:
    path = remembered_path(folder)
    path.chmod(0o666)
    with pytest.raises(NotRemembered, match="other users can write to"):
        recall(ask(folder))


def test_records_of_models_that_are_gone_are_removed(folder: Path, cache: Path, tmp_path: Path) -> None:
    gone = shutil.copytree(folder, tmp_path / "gone")
    remembered_path(gone)
    shutil.rmtree(gone)
    path = remembered_path(folder)
    assert list(cache.iterdir()) == [path]


def _header(**changes: object) -> Callable[[Path], object]:
    """Change the header of a record, whose checksum fits then."""

    def spoil(path: Path) -> None:
        line, _, rest = path.read_bytes()[: -hashlib.sha256().digest_size].partition(b"\n")
        written = json.dumps({**json.loads(line), **changes}).encode() + b"\n" + rest
        path.write_bytes(written + hashlib.sha256(written).digest())

    return spoil


def _whole(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content + hashlib.sha256(content).digest())


SPOILS: dict[str, Callable[[Path], object]] = {
    "nested": _whole(b"[" * 100_000 + b"\n"),
    "list": _whole(b"[]\n"),
    "no line": _whole(b""),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "link to nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "no folder": lambda path: (shutil.rmtree(path.parent), path.parent.write_text("")),
    **{f"{name} {json.dumps(value)}": _header(**{name: value})
       for name in ("format", "versions", "files", "data") for value in (None, 7, "x", [], [[]], {"x": []})
       if (name, value) != ("data", {"x": []})},
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILS)
def test_a_spoiled_record_counts_as_missing(folder: Path, kind: str) -> None:
    SPOILS[kind](remembered_path(folder))
    with pytest.raises(NotRemembered):
        recall(ask(folder))
    list(remembered.records())
    if kind != "folder":  # it stays
        remembered_path(folder)
        assert recall(ask(folder)).data == DATA
