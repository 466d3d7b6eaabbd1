"""Files of quantized weights in the cache: whole or not there, known again, and never more than is allowed."""

import gc
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from oaiserve.engine.decoder import quantized_file
from oaiserve.engine.decoder.quantized_file import FileIdentity, FinishedFile, QuantizedFile, file_bytes, find
from oaiserve.storage.private import NotPrivate

Q8_0 = 8
MATRICES = [(Q8_0, 3, 64), (Q8_0, 5, 32)]
SIZE = 3 * 2 * 34 + 52 + 5 * 34 + 22  # with what aligns each to 64 bytes

pytestmark = pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without a name, as Linux has")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the files, which fit into it even if the disk of the tests is nearly full."""
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(quantized_file, "LEFT_BYTES", 0)
    return tmp_path / "cache" / "quantized"


def made(name: str, value: int = 7, most_bytes: int = 10 * SIZE) -> FileIdentity:
    file = QuantizedFile(file_bytes(MATRICES), most_bytes)
    for matrix in MATRICES:
        file.blocks(*matrix).data[:] = value
    return file.finish(name)


def test_a_file_has_the_matrices_one_behind_the_other(folder: Path) -> None:
    assert file_bytes(MATRICES) == SIZE
    file = QuantizedFile(SIZE, SIZE)
    first, second = (file.blocks(*matrix) for matrix in MATRICES)
    first.data[:] = 1
    second.data[:] = 2
    assert list(folder.iterdir()) == []  # it has no name yet
    identity = file.finish("a")
    path = find(identity)
    assert path == folder / "a"
    assert path.stat().st_mode & 0o777 == 0o600
    content = np.frombuffer(path.read_bytes(), np.uint8)
    assert content.nbytes == identity.num_bytes == SIZE
    for blocks, value in ((first, 1), (second, 2)):
        assert (content[blocks.offset : blocks.offset + blocks.data.nbytes] == value).all()
    finished = FinishedFile(path)
    assert finished.num_bytes == SIZE
    for matrix, blocks in zip(MATRICES, (first, second), strict=True):
        again = finished.blocks(*matrix)
        assert again.shape == matrix[1:]
        assert np.array_equal(again.data, blocks.data)


def test_a_file_that_is_not_finished_leaves_nothing(folder: Path) -> None:
    file = QuantizedFile(SIZE, SIZE)
    blocks = file.blocks(*MATRICES[0])
    del file
    gc.collect()
    blocks.data[:] = 3  # it is there as long as somebody uses it
    assert list(folder.iterdir()) == []


def test_a_file_that_has_changed_is_not_found(folder: Path) -> None:
    identity = made("a")
    assert find(identity) == folder / "a"
    for changed in (replace(identity, num_bytes=1), replace(identity, inode=1), replace(identity, name="b")):
        assert find(changed) is None
    with (folder / "a").open("r+b") as file:
        file.write(b"x")
    assert find(identity) is None
    newer = made("a")
    assert find(newer) == folder / "a"  # the new one has replaced it
    (folder / "a").rename(folder / "b")
    (folder / "a").symlink_to(folder / "b")
    with pytest.raises(NotPrivate, match="is not a regular file"):
        find(newer)


def test_files_that_no_start_has_used_for_longest_make_room(folder: Path) -> None:
    identities = {name: made(name, most_bytes=3 * SIZE) for name in "abc"}
    for second, (name, identity) in enumerate(identities.items()):
        os.utime(folder / name, ns=(second, identity.written_ns))
    assert find(identities["a"]) is not None
    made("d", most_bytes=3 * SIZE)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c", "d"]
    assert find(identities["a"]) is not None
    made("e", most_bytes=SIZE)
    assert [path.name for path in folder.iterdir()] == ["e"]


def test_a_file_that_another_start_removes_meanwhile_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("a")
    listed = [*folder.iterdir(), folder / "removed"]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", lambda _: iter(listed))
        made("b", most_bytes=SIZE)
    assert [path.name for path in folder.iterdir()] == ["b"]


def test_what_a_killed_process_of_the_same_id_has_left_does_not_stop_another(folder: Path) -> None:
    """In containers that share a cache, all servers may have the process id 1."""
    made("a")
    (folder / "a").rename(folder / f".a-{os.getpid()}")
    assert find(made("a")) == folder / "a"


@pytest.mark.parametrize("reason", ["allows", "the disk has", "other users can write"])
def test_without_room_nothing_is_made_or_removed(reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("a")
    most_bytes = SIZE - 1 if reason == "allows" else 10 * SIZE
    if reason == "the disk has":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    elif reason != "allows":
        folder.chmod(0o777)
    with pytest.raises((NotPrivate, OSError), match=reason):
        QuantizedFile(SIZE, most_bytes)
    assert [path.name for path in folder.iterdir()] == ["a"]
