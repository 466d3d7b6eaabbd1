"""`Keyring` holds the valid API keys and their rights, from the settings, from files, and from plug-ins.

It stores only digests of keys, and no message contains a key or a part of one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from oaiserve.config import is_header_value
from oaiserve.errors import StartupError
from oaiserve.runtime import Runtime

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0  # interval between checks for changed key files and sources
MOST_BYTES = 2**20  # maximum size of a key file
_NAME = re.compile(r"[A-Za-z0-9._@:+/-]{1,64}")
NAME_RULE = "a name must be 1 to 64 letters, digits or ._@:+/-"


class Right(Flag):
    """The kinds of routes that a key may use. Some routes are for every key."""

    USE = auto()  # send requests to the model, and read what the key has stored
    WATCH = auto()  # see times, sizes and ids of all requests
    ADAPTERS = auto()  # load and unload adapters
    KEYS = auto()  # see all stored keys


OF_LISTED = Right.USE | Right.WATCH | Right.ADAPTERS  # rights of keys in the settings and in files
ROLES = {"use": Right.USE, "watch": Right.WATCH, "admin": OF_LISTED | Right.KEYS}


class KeyUse(Protocol):
    """The use of a key by one request to the model. Its key is limited, or its uses are counted."""

    @property
    def key(self) -> Key: ...

    async def reserve(self, tokens: int) -> None:
        """Admit the request, which may use up to `tokens` tokens. Raises RateLimited and Unavailable."""

    async def headers(self) -> Mapping[str, str]:
        """Return headers of the answer, also of a refusal, which say what the key has left."""

    def settle(self, tokens: int, cost: float) -> None:
        """Count what the request has used. It is called once, at the end, and must not block."""


@dataclass(frozen=True, slots=True)
class Key:
    """A valid key, with its owner and its rights. Its holder may use all models, at any priority, and without limits;
    keys of plug-ins may have further rules."""

    name: str
    digest: bytes = field(repr=False)
    rights: Right = OF_LISTED
    share: float = 1.0  # the key's share of the server, relative to other busy clients, under `--policy fair`

    def check_model(self, *names: str) -> None:
        """Raise Forbidden if the key allows none of these names of one model."""

    def priority_for(self, requested: int | None) -> int:
        """Return the priority of a request that asks for this one. A lower one is served earlier."""
        return requested or 0

    def new_use(self) -> KeyUse | None:
        """Return the use of the key by a new request, if it has limits or is counted."""
        return None


class KeySource(Protocol):
    """A source of further valid keys, which a plug-in adds to a `Keyring`."""

    def valid(self) -> Mapping[bytes, Key]:
        """Return the keys that are valid now, by their digests. This may block."""

    async def close(self) -> None:
        """Release everything. No request is open, and no use will be settled."""


class Keyring:
    """The valid keys. Any thread may call `find`; only one at a time may call `refresh`."""

    def __init__(self, keys: Sequence[str], files: Iterable[Path] = ()) -> None:
        """Take `keys`, which are named key-1, key-2 and so on, and read the files. Raises StartupError."""
        self._own = [Key(f"key-{number}", sha256(key.encode()).digest()) for number, key in enumerate(keys, start=1)]
        self._files = [_KeyFile(path) for path in files]
        self.sources: list[KeySource] = []
        self._gather()

    def add(self, source: KeySource) -> None:
        """Accept the keys of this source, too. A key that is also in the settings or in a file has the source's
        rules. This blocks."""
        self.sources.append(source)
        self._gather()

    async def close(self) -> None:
        """Close the sources."""
        for source in self.sources:
            await source.close()

    def find(self, key: bytes) -> Key | None:
        """Return the key, or None if it is unknown. It compares digests, so its time doesn't reveal a nearly right
        key."""
        return self.of_digest(sha256(key).digest())

    def of_digest(self, digest: bytes) -> Key | None:
        return self._by_digest.get(digest)

    def refresh(self) -> None:
        """Read the files that have changed, and the sources. It may block, so call it about once a second in a worker
        thread.

        A file is read once two successive calls have found it unchanged, so an unfinished file is not read. If a file
        is broken, an error is logged and its former keys stay valid.
        """
        for file in self._files:
            file.refresh()
        self._gather()

    async def stay_fresh(self, runtime: Runtime) -> None:
        """Refresh keys that may change, until cancelled. Files may be slow, so a worker thread reads them."""
        if not self._files and not self.sources:
            return
        thread = runtime.executor("keys")
        try:
            while True:
                await asyncio.sleep(INTERVAL_SECONDS)
                await asyncio.get_running_loop().run_in_executor(thread, self.refresh)
        finally:
            thread.shutdown(wait=False)

    def _gather(self) -> None:
        listed = [*self._own, *(key for file in self._files for key in file.keys)]
        by_digest = {key.digest: key for key in reversed(listed)}
        for source in self.sources:
            by_digest |= source.valid()
        self._by_digest = by_digest


class _KeyFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = _version(path)
        self._read: object = None  # A file that changes right after it is read may keep its time, so it is read twice.
        try:
            self.keys = _read(path)
        except ValueError as error:
            raise StartupError(f"--api-key-file '{path}' {error}.") from None

    def refresh(self) -> None:
        version = _version(self._path)
        has_settled = version == self._seen
        self._seen = version
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


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def exposure(path: Path) -> str | None:
    """Return a warning if other users of the machine can read or change the file, or None if they cannot.

    The file's group may read it, so that a service can use another user's file.
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


def _read(path: Path) -> list[Key]:
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


def _parse(path: Path, number: int, line: str) -> Key | None:
    fields = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].split()
    if not fields:
        return None
    if len(fields) > 2:
        raise ValueError(f"is wrong in line {number}: it must be NAME KEY, or only KEY")
    *names, key = fields
    if not is_header_value(key):
        raise ValueError(f"is wrong in line {number}: a key must be printable ASCII")
    if names and not is_name(names[0]):
        raise ValueError(f"is wrong in line {number}: {NAME_RULE}")
    name = names[0] if names else f"{re.sub('[^A-Za-z0-9._@+-]', '_', path.name)[:56]}:{number}"
    return Key(name, sha256(key.encode()).digest())
