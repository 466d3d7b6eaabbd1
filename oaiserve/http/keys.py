"""`Keyring` knows the API keys and their owners, from the settings and from files, which may change.

It keeps only digests of keys, and no message contains a key or a part of one.
"""

from __future__ import annotations

import hmac
import logging
import re
import stat
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from oaiserve.config import is_header_value
from oaiserve.errors import StartupError

logger = logging.getLogger(__name__)

MOST_BYTES = 2**20  # of a file of keys
_NAME = re.compile(r"[A-Za-z0-9._@:+/-]{1,64}")


class _Key(NamedTuple):
    name: str
    digest: bytes


class Keyring:
    """The keys that are valid now. Any thread may call `name_of`; only one at a time may call `refresh`."""

    def __init__(self, keys: Sequence[str], files: Iterable[Path] = ()) -> None:
        """Take `keys`, which are named key-1, key-2 and so on, and read the files. Raises StartupError."""
        self._own = [_Key(f"key-{number}", sha256(key.encode()).digest()) for number, key in enumerate(keys, start=1)]
        self._files = [_KeyFile(path) for path in files]
        self._gather()

    def name_of(self, key: bytes) -> str | None:
        """Return the name of the key, or None if it is unknown. A nearly right key takes no longer."""
        given = sha256(key).digest()
        matches = [known.name for known in self._keys if hmac.compare_digest(given, known.digest)]
        return matches[0] if matches else None

    def refresh(self) -> None:
        """Read the files that have changed. It may block, so call it about once a second in a worker thread.

        A file is read when it was the same in two calls, so an unfinished one is left alone. A broken file leaves its
        former keys valid, and is an error in the log.
        """
        for file in self._files:
            file.refresh()
        self._gather()

    def _gather(self) -> None:
        self._keys = (*self._own, *(key for file in self._files for key in file.keys))


class _KeyFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = _version(path)
        self._read: object = None  # a file that changes right after it was read may keep its time, so read it once more
        try:
            self.keys = _read(path)
        except ValueError as error:
            raise StartupError(f"--api-key-file '{path}' {error}.") from None

    def refresh(self) -> None:
        version = _version(self._path)
        has_settled, self._seen = version == self._seen, version
        if version == self._read or not has_settled:
            return
        self._read = version
        try:
            keys = _read(self._path)
        except ValueError as error:
            logger.error("--api-key-file '%s' %s. The keys that it had before stay valid.", self._path, error)
            return
        if keys != self.keys:
            names = ", ".join(sorted({key.name for key in keys}))
            logger.info("--api-key-file '%s' has changed. Its keys are now those of: %s", self._path, names)
        self.keys = keys


def exposure(path: Path) -> str | None:
    """Return a warning if other users of the machine can read the file or change it, and None if they cannot.

    The file's group may read it, so that a service can get somebody else's file.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None
    if not mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        return None
    return f"'{path}' holds API keys, but others can read or change it (its mode is {mode:04o}). Try: chmod 640"


def _version(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return "missing"
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: Path) -> list[_Key]:
    """Return the keys of a file, one on each line: NAME KEY, or only KEY. Raises ValueError with the reason."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"is larger than {MOST_BYTES} bytes")
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ValueError("is not text in UTF-8") from None
    keys = [key for number, line in enumerate(lines, start=1) if (key := _parse(path, number, line)) is not None]
    if not keys:
        raise ValueError("has no keys: write one on each line, as NAME KEY or only KEY")
    return keys


def _parse(path: Path, number: int, line: str) -> _Key | None:
    fields = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].split()
    if not fields:
        return None
    if len(fields) > 2:
        raise ValueError(f"is wrong in line {number}: it must be NAME KEY, or only KEY")
    *names, key = fields
    if not is_header_value(key):
        raise ValueError(f"is wrong in line {number}: a key must be printable ASCII")
    if names and _NAME.fullmatch(names[0]) is None:
        raise ValueError(f"is wrong in line {number}: a name must be 1 to 64 letters, digits or ._@:+/-")
    name = names[0] if names else f"{re.sub('[^A-Za-z0-9._@+-]', '_', path.name)[:56]}:{number}"
    return _Key(name, sha256(key.encode()).digest())
