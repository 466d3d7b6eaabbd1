"""A private folder is made whatever is in its place, also if another thread makes it at the same time."""

import os
import stat
from pathlib import Path

import pytest

from oaiserve.storage import private


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "above" / "folder"


def test_a_folder_and_those_above_are_for_this_user_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0o177)
    try:
        private.make_folder(folder)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]


def test_a_folder_that_others_make_meanwhile_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def late(path: Path) -> None:
        path.mkdir(parents=True)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", late)
    private.make_folder(folder)
    assert folder.is_dir()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_or_a_dangling_link_in_its_place_is_removed(folder: Path, is_link: bool) -> None:
    folder.parent.mkdir()
    if is_link:
        folder.symlink_to("nothing")
    else:
        folder.touch()
    private.make_folder(folder)
    assert folder.is_dir()
    assert not folder.is_symlink()


def test_a_file_that_cannot_be_removed_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(f"{path} can't be removed")

    folder.parent.mkdir()
    folder.touch()
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(PermissionError, match="can't be removed"):
        private.make_folder(folder)
