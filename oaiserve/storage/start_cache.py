"""Stores what earlier starts have verified about a model's files, so that later starts need not repeat it.

A record is valid for the files it was made from, and for the versions of the code that made it. A file counts as
unchanged if its inode, size and times are the same, or else if the SHA-256 of the file, or of the part that its subject
selects, is. Stdlib only.

A record is one file in the user's cache: a line of JSON, then bytes, then the SHA-256 of everything before. It is read
only if no other user could have written it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from oaiserve.storage import private
from oaiserve.storage.private import NotPrivate, cache_folder
from oaiserve.storage.start_warnings import Warned

log = logging.getLogger(__name__)

_FORMAT = 2
_DIGEST_BYTES = hashlib.sha256().digest_size
_ALIGNMENT = 64  # alignment of a record's bytes
AFTER_SECONDS = 3.0  # delay, so that the first answer doesn't wait for a record


class NotRemembered(Exception):
    """There is no usable record. The message says why, without a full stop."""


@contextmanager
def of_record(path: Path) -> Iterator[None]:
    """Treat a record with unreadable content as missing, whatever the error. Raises NotRemembered."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise NotRemembered("no earlier start has found it with these options") from None
    except (NotPrivate, OSError) as error:
        raise NotRemembered(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise NotRemembered(f"{path} has another form ({type(error).__name__})") from error


@dataclass(frozen=True, slots=True)
class Subject:
    """What a record is about: a kind of fact, and the model files from which it was derived."""

    kind: str
    model: Path  # a folder, or a file
    options: Mapping[str, str]  # Each combination of options has its own record.
    versions: Mapping[str, str]  # versions of the code that makes the record
    stats: Mapping[str, list[int]]  # the files that the record is made from, by name, as they were at the start
    folder: Path  # the folder of these files
    record: Path  # the path of the record, whether or not there is one
    digest: Callable[[Path], str] | None = None  # digest of the part of a file that counts; None: its SHA-256


@dataclass(frozen=True, slots=True)
class StartRecord:
    data: dict[str, Any]
    content: bytearray
    start: int  # offset in `content` to which offsets in `data` are relative
    day: str  # the day on which it was made
    path: Path
    warnings: list[Warned]  # warnings from the work that the record saves, to be logged again


class Record(NamedTuple):
    """A record, without its data."""

    path: Path
    kind: str
    model: Path  # a folder, or a file
    day: str
    holds: bool  # The record is valid for the model's current files and all current versions.


def subject(
    kind: str,
    model: Path,
    suffixes: tuple[str, ...],
    *,
    options: Mapping[str, str],
    packages: tuple[str, ...],
    digest: Callable[[Path], str] | None = None,
    parts: Iterable[Path] = (),
) -> Subject:
    """Return the subject that consists of the current files with these suffixes in a model's folder.

    If the model is a file, it is the whole subject, whatever its suffix, with the `parts` in its folder.
    """
    model = model.resolve()
    of_model = {model, *(part.resolve() for part in parts)}
    if model.is_file():
        folder = model.parent
        files = sorted(of_model)
    else:
        folder = model
        files = sorted(model.iterdir())
    options = dict(sorted(options.items()))
    return Subject(
        kind,
        model,
        options,
        {package: version_of(package) for package in packages},
        {p.name: _stat(p) for p in files if p in of_model or (p.suffix in suffixes and p.is_file())},
        folder,
        cache_folder() / "remembered" / _record_name(kind, model, options),
        digest,
    )


def recall(subject: Subject) -> StartRecord:
    """Return the record of a subject. Raises NotRemembered if there is none, or if anything has changed."""
    with of_record(subject.record):
        return _recall(subject)


def _recall(subject: Subject) -> StartRecord:
    path = subject.record
    content = bytearray(private.read_file(private.verified(path.parent) / path.name))
    end = len(content) - _DIGEST_BYTES
    if end < 0 or hashlib.sha256(memoryview(content)[:end]).digest() != content[end:]:
        raise NotRemembered(f"{path} is damaged")
    line = content.index(b"\n") + 1
    header = json.loads(content[:line])
    start = line + -line % _ALIGNMENT
    data: dict[str, Any] = header["data"]
    if header["format"] != _FORMAT or not isinstance(data, dict):
        raise NotRemembered(f"{path} has another format")
    for package, now in subject.versions.items():
        if header["versions"].get(package) != now:
            raise NotRemembered(f"{package} is {now} now, and was {header['versions'].get(package)}")
    known: dict[str, dict[str, Any]] = header["files"]
    if differing := sorted(known.keys() ^ subject.stats.keys()):
        raise NotRemembered(f"{differing[0]} was {'removed' if differing[0] in known else 'added'}")
    moved = {name: known[name]["sha256"] for name, stat in subject.stats.items() if known[name]["stat"] != stat}
    for name, digest in moved.items():
        if _digest(subject, name) != digest:
            raise NotRemembered(f"{name} has changed")
    if moved:  # The next start then need not read them again.
        files = {name: {"stat": stat, "sha256": known[name]["sha256"]} for name, stat in subject.stats.items()}
        try:
            _write(path, header | {"files": files}, bytes(content[start:end]))
        except OSError as error:
            log.debug("%s could not be renewed: %s", path, error)
    warnings = [Warned(str(logger), int(level), str(message)) for logger, level, message in header["warnings"]]
    return StartRecord(data, content, start, str(header["day"]), path, warnings)


def remember(
    subject: Subject, make_data: Callable[[], Mapping[str, Any]], content: bytes, warnings: Sequence[Warned] = ()
) -> Path | None:
    """Write the record of a subject, and return its path; None if a file has changed since the start.

    `warnings` are those of the work that later starts skip because of this record: `collected_warnings` collects them,
    and `repeat` logs those of a record.

    Offsets in the data are relative to the start of `content`. The data may describe a file with which `make_data`
    replaces another start's: no other record is written between the two. Raises OSError, and NotPrivate if other users
    could write there.
    """
    if _has_changed(subject):
        return None
    files = {name: {"stat": stat, "sha256": _digest(subject, name)} for name, stat in subject.stats.items()}
    if _has_changed(subject):  # changed while it was read
        return None
    path = subject.record
    private.make_folder(path.parent)
    private.verified(path.parent)
    _forget_lost_models(path.parent)
    header = {
        "format": _FORMAT,
        "folder": str(subject.folder),
        "day": date.today().isoformat(),
        "versions": dict(subject.versions),
        "files": files,
        "warnings": warnings,
    }
    with private.locked(path.parent):
        _write(path, header | {"data": make_data()}, content)
    return path


def _record_name(kind: str, model: Path, options: Mapping[str, str]) -> str:
    """Return the name of a record, which is the same at each start."""
    name = json.dumps([str(model), options])
    return f"{kind}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _write(path: Path, header: Mapping[str, Any], content: bytes) -> None:
    line = json.dumps(header).encode() + b"\n"
    written = line + b"\0" * (-len(line) % _ALIGNMENT) + content
    private.write_file(path, written + hashlib.sha256(written).digest())


def records() -> Iterator[Record]:
    """Yield the records of models that still exist."""
    for path in sorted((cache_folder() / "remembered").glob("*-*")):
        try:
            with of_record(path):
                record = _record(path)
        except NotRemembered:
            continue
        yield record


def _record(path: Path) -> Record:
    header = _header(path)
    folder = Path(header["folder"])
    files = header["files"]
    is_current = all(version_of(package) == known for package, known in header["versions"].items())
    is_unchanged = all(_stat(folder / name) == known["stat"] for name, known in files.items())
    model = folder if "config.json" in files else folder / min(files)
    return Record(path, path.name.partition("-")[0], model, str(header["day"]), is_current and is_unchanged)


def _forget_lost_models(records: Path) -> None:
    for path in records.glob("*-*"):
        try:
            with of_record(path):
                header = _header(path)
                is_lost = not all((Path(header["folder"]) / name).exists() for name in header["files"])
        except NotRemembered:
            is_lost = True
        if is_lost:
            with suppress(OSError):  # a folder, for example, which is harmless
                path.unlink()


def _header(path: Path) -> dict[str, Any]:
    if not stat.S_ISREG(path.lstat().st_mode):  # Reading a pipe would block.
        raise ValueError("no regular file")
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.readline())
    return header


def _has_changed(subject: Subject) -> bool:
    return any(_stat(subject.folder / name) != stat for name, stat in subject.stats.items())


def _stat(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _digest(subject: Subject, name: str) -> str:
    path = subject.folder / name
    if subject.digest is None:
        return sha256_of(path)
    return subject.digest(path)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
