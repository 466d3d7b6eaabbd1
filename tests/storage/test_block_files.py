"""The files of KV blocks: what was written comes back or is missing, whatever happens to the files."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.storage import block_files
from oaiserve.storage.block_files import BlockFiles, Buffer, open_blocks
from oaiserve.storage.private import NotPrivate

SIZE = 40
FILE_BYTES = SIZE + 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


def files_in(folder: Path, most_blocks: int = 100, kind: str = "kind") -> BlockFiles:
    return open_blocks(folder, kind, SIZE, most_blocks * FILE_BYTES)


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big") if number else b""


def content_of(number: int) -> bytes:
    return bytes((number + place) % 256 for place in range(SIZE))


def write(files: BlockFiles, number: int, parent: int = 0) -> bool:
    return files.write(name_of(number), name_of(parent), memoryview(content_of(number)))


def read(files: BlockFiles, number: int) -> bytes | None:
    content = bytearray(SIZE)
    return bytes(content) if files.read(name_of(number), memoryview(content)) else None


def kept(files: BlockFiles, most: int = 30) -> list[int]:
    return [number for number in range(1, most) if name_of(number) in files]


def test_what_was_written_is_read_now_and_after_a_restart(folder: Path) -> None:
    files = files_in(folder)
    assert [write(files, 1), write(files, 2, 1), write(files, 3, 2)] == [True] * 3
    for reader in (files, files_in(folder)):
        assert [read(reader, number) for number in (1, 2, 3, 4)] == [*map(content_of, (1, 2, 3)), None]
        assert reader.num_failures == 0


def test_files_are_for_this_user_alone(folder: Path) -> None:
    write(files_in(folder), 1)
    assert folder.stat().st_mode & 0o77 == 0
    assert {path.stat().st_mode & 0o777 for path in (folder / "kind").iterdir()} == {0o600}


def test_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    (folder / "kind").mkdir(parents=True)
    (folder / "kind").chmod(0o777)
    with pytest.raises(NotPrivate, match="other users can write"):
        files_in(folder)


def test_a_block_whose_parent_is_missing_is_not_written(folder: Path) -> None:
    files = files_in(folder)
    assert not write(files, 2, 1)
    assert write(files, 1)
    assert write(files, 2, 1)
    assert not write(files, 2, 1), "it is there already"


def test_a_file_that_lies_is_missing_from_then_on(folder: Path) -> None:
    """Bytes are changed, cut off, inserted or appended."""
    rng = random.Random(0)
    files = files_in(folder)
    for num_before in range(500):
        assert write(files, 1)
        (path,) = (folder / "kind").iterdir()
        lies = bytearray(path.read_bytes())
        while lies == path.read_bytes():
            place = rng.randrange(len(lies))
            number = rng.randrange(1, 9)
            lies[place : place + rng.choice((0, number))] = rng.randbytes(rng.choice((0, number)))
        path.write_bytes(lies)
        assert read(files, 1) is None
        assert (name_of(1) in files, path.exists(), files.num_failures) == (False, False, num_before + 1)


@pytest.mark.parametrize("spoil", [lambda path: os.truncate(path, 50), os.unlink, lambda path: link(path)])
def test_a_file_that_is_cut_or_gone_or_a_link_is_missing(folder: Path, spoil: object) -> None:
    files = files_in(folder)
    write(files, 1)
    (path,) = (folder / "kind").iterdir()
    spoil(path)
    assert read(files, 1) is None
    assert read(files, 1) is None
    assert write(files, 1)


def test_a_file_that_makes_room_while_it_is_read_is_no_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_in(folder, most_blocks=1)
    write(files, 1)

    def open_late(*arguments: object) -> int:
        monkeypatch.undo()
        assert write(files, 2)
        return os.open(*arguments)

    monkeypatch.setattr(os, "open", open_late)
    assert read(files, 1) is None
    assert (kept(files), files.num_failures) == ([2], 0)


def test_files_that_another_server_removes_are_no_failures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_in(folder)
    write(files, 1)
    assert write(files_in(folder, most_blocks=1), 2)
    assert read(files, 1) is None
    replace = os.replace

    def replace_late(*arguments: str) -> None:
        monkeypatch.undo()
        files_in(folder)
        replace(*arguments)

    monkeypatch.setattr(os, "replace", replace_late)
    assert not write(files, 3)
    assert (files.num_failures, caplog.messages) == (0, [])
    assert write(files, 3)
    shutil.rmtree(folder)
    assert not write(files, 4)
    assert (files.num_failures, len(caplog.messages)) == (1, 1)


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def test_a_file_under_another_blocks_name_is_missing(folder: Path) -> None:
    files = files_in(folder)
    write(files, 1)
    (path,) = (folder / "kind").iterdir()
    path.rename(path.with_name(f"{name_of(9).hex()}-"))
    assert read(files_in(folder), 9) is None


@pytest.mark.parametrize("room_bytes", [0, FILE_BYTES - 1])
def test_a_full_disk_is_told_once_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, room_bytes: int
) -> None:
    def writev(descriptor: int, parts: Sequence[Buffer]) -> int:
        if not is_full:
            return os.writev(descriptor, parts)
        if not room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, b"".join(parts)[:room_bytes])

    files = BlockFiles(tmp_path, SIZE, 100 * FILE_BYTES, writev=writev)
    is_full = True
    assert not write(files, 1)
    assert not write(files, 2)
    assert ([*tmp_path.iterdir()], files.num_failures) == ([], 2)
    assert [record.message for record in caplog.records if "No space left" in record.message] == [caplog.messages[0]]
    is_full = False
    assert write(files, 1)


def test_a_start_removes_what_a_killed_process_was_writing_and_what_nobody_asks_for(folder: Path) -> None:
    files = files_in(folder)
    for number, parent in ((1, 0), (2, 1), (3, 2), (4, 0)):
        write(files, number, parent)
    of_kind = folder / "kind"
    (of_kind / ".tmp1").write_bytes(b"half")
    (of_kind / f"{name_of(7).hex()}-").write_bytes(b"another size")
    (of_kind / f"{name_of(2).hex()}-{name_of(1).hex()}").unlink()  # 3 has no parent now
    assert kept(files_in(folder)) == [1, 4]
    assert len([*of_kind.iterdir()]) == 2


def test_the_least_recently_used_block_that_no_other_follows_goes_first(folder: Path) -> None:
    files = files_in(folder, most_blocks=4)
    for number, parent in ((1, 0), (2, 1), (3, 0), (4, 3)):
        write(files, number, parent)
    files.use([name_of(1), name_of(2)])
    write(files, 5)
    assert kept(files) == [1, 2, 3, 5], "4 is the oldest that none follows"
    write(files, 6, 3)
    assert kept(files) == [1, 3, 5, 6], "its parent was used just now"


def test_other_kinds_have_half_of_the_space_and_the_last_used_are_kept(folder: Path) -> None:
    for age, kind in enumerate(("newest", "middle", "oldest")):
        files = files_in(folder, kind=kind)
        for number in (1, 2, 3):
            write(files, number, number - 1)
        os.utime(folder / kind, (1e9 - age, 1e9 - age))
    files = files_in(folder, most_blocks=10)
    assert [kept(files_in(folder, kind=kind)) for kind in ("newest", "middle", "oldest")] == [[1, 2, 3], [1, 2], []]
    for number in range(1, 20):
        write(files, number)
    assert len(kept(files)) == 10 - 5


def test_a_running_server_of_another_kind_writes_on_after_a_start(folder: Path) -> None:
    running = files_in(folder, kind="running")
    for number in range(1, 11):
        write(running, number, number - 1)
    (folder / "running" / ".half").write_bytes(b"")
    (folder / "not ours" / "folder").mkdir(parents=True)
    (folder / "not ours" / "empty").write_bytes(b"")
    files_in(folder, most_blocks=10)
    assert kept(files_in(folder, kind="running")) == [1, 2, 3, 4, 5]
    assert [read(running, number) for number in (5, 6)] == [content_of(5), None]
    assert write(running, 6, 5)
    assert running.num_failures == 0


def test_a_running_server_of_another_kind_may_write_while_a_start_makes_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has as many blocks again as soon as they are removed, more than there is space."""
    num_blocks = {"running": 12, "older": 1, "empty": 0}
    for age, kind in enumerate(num_blocks):
        (folder / kind).mkdir(parents=True)
        os.utime(folder / kind, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(block_files, "_sizes", lambda path: [FILE_BYTES] * num_blocks[path.name])
    files = files_in(folder, most_blocks=10)
    assert not write(files, 1)
    assert files.num_failures == 0


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12), st.booleans()), max_size=60), st.integers(1, 6))
def test_there_are_never_too_many_and_each_has_its_parent(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, bool]], most: int
) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    files = files_in(folder, most)
    parents: dict[int, int] = {}  # a hash has one parent for ever
    for number, parent, is_read in steps:
        if is_read:
            assert read(files, number) in (None, content_of(number))
        elif parent < number:
            write(files, number, parents.setdefault(number, parent))
        on_disk = kept(files)
        assert len(on_disk) == len([*(folder / "kind").iterdir()]) <= most
        assert all(parents[one] in (0, *on_disk) for one in on_disk)
    assert kept(files_in(folder, most)) == kept(files)


def _place(folder: Path, number: int, parent: int) -> Path:
    return folder / "kind" / f"{name_of(number).hex()}-{name_of(parent).hex()}"


SPOILS: dict[str, Callable[[Path], object]] = {
    "folder": lambda folder: (_place(folder, 2, 1).unlink(), _place(folder, 2, 1).mkdir()),
    "other folder": lambda folder: (folder / "kind" / "mine").mkdir(),
    "link to nothing": lambda folder: (_place(folder, 2, 1).unlink(), _place(folder, 2, 1).symlink_to("nothing")),
    "pipe": lambda folder: (_place(folder, 2, 1).unlink(), os.mkfifo(_place(folder, 2, 1))),
    "follows itself": lambda folder: _place(folder, 2, 1).rename(_place(folder, 2, 2)),
    "follow each other": lambda folder: (_place(folder, 2, 1).rename(_place(folder, 2, 3)),
                                         shutil.copy(_place(folder, 2, 3), _place(folder, 3, 2))),
    "follows two": lambda folder: shutil.copy(_place(folder, 2, 1), _place(folder, 2, 0)),
    "file of the kind": lambda folder: (shutil.rmtree(folder / "kind"), (folder / "kind").write_text("")),
    "link of the kind": lambda folder: (shutil.rmtree(folder / "kind"), (folder / "kind").symlink_to("nothing")),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILS)
def test_spoiled_files_count_as_missing(folder: Path, kind: str) -> None:
    files = files_in(folder)
    for number in (1, 2):
        assert write(files, number, number - 1)
    SPOILS[kind](folder)
    files = files_in(folder, most_blocks=3)
    assert kept(files) == {"other folder": [1, 2], "follows two": [1, 2]}.get(
        kind, [] if " of the kind" in kind else [1]
    )
    for number in range(4, 10):  # each takes the place of another one
        assert write(files, number)
        assert read(files, number) == content_of(number)
