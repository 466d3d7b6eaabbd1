"""The cache folder, and private folders: only this user and root can change them, so their files can be trusted.

It does not know the purpose of the folders.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from oaiserve.errors import StartupError

FOLDER_MODE = 0o700
FILE_MODE = 0o600


class NotPrivate(Exception):
    """A folder or a file is not private: others could change it. The message says who or how, without a full stop."""


def cache_folder() -> Path:
    """Return $OAISERVE_CACHE if it is set, else the folder `oaiserve` in the user's cache folder.

    It holds files that can be made or downloaded again: the demo model, compiled native code, the start cache."""
    if own := os.environ.get("OAISERVE_CACHE"):
        return expanded(own, "OAISERVE_CACHE")
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "OAISERVE_CACHE") / "oaiserve"


def expanded(path: str, variable: str) -> Path:
    """Return the path without `~`. If the user has no home folder, StartupError names the variable to set: a container
    may run with an arbitrary user id and without HOME."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise StartupError(
            f"The user {os.geteuid()} has no home folder. Set {variable} to a folder that this user can write to."
        ) from error


def make_folder(folder: Path) -> None:
    """Create a folder, and missing folders above it, for this user only, whatever the umask.

    A file or a dangling link in its place is removed, unless it is the value of OAISERVE_CACHE: the folder is one of
    our own.
    """
    if not folder.is_dir() and folder != cache_folder():
        try:
            folder.unlink()
        except OSError:  # There was nothing, or another thread or process has created the folder.
            if os.path.lexists(folder) and not folder.is_dir():
                raise
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        try:
            path.mkdir(FOLDER_MODE)
        except FileExistsError:  # Another process has created it.
            continue
        path.chmod(FOLDER_MODE)


def verified(folder: Path) -> Path:
    """Return the folder without symbolic links in its path. Raises NotPrivate if it is not a folder, or if another user
    could write to it.

    A user who can write to a folder above could replace this one, so all are checked. With the sticky bit, as on /tmp,
    others can write but cannot replace the files of this user.
    """
    real = folder.resolve(strict=True)
    if not real.is_dir():
        raise NotPrivate(f"{real} is not a folder")
    for path in (real, *real.parents):
        status = path.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise NotPrivate(f"{path} belongs to another user ({status.st_uid})")
        is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_shared and (path == real or not status.st_mode & stat.S_ISVTX):
            raise NotPrivate(f"other users can write to {path} (chmod go-w {path} prevents it)")
    return real


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other thread or process is in this block for the same folder, if its file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write a file of a verified folder for this user only, atomically: a reader gets the whole old file or the whole
    new one."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.chmod(file.name, FILE_MODE)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read_file(path: Path) -> bytes:
    """Read the content of a file in a verified folder. Raises OSError, and NotPrivate if it is a symbolic link, not a
    regular file, or another user's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise NotPrivate(f"{path} is a symbolic link") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotPrivate(f"{path} is not a regular file")
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise NotPrivate(f"other users can write to {path}")
        return file.read()
