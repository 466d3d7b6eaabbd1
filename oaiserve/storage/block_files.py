"""The files of KV blocks, for the disk tier of the prefix cache: one file for each block, in a private folder.

A file's name contains the hashes of its block and of the block before. The file contains a checksum, the hash, and the
content. It is written under another name and renamed, so a killed process leaves no partial files. A file that was cut
or changed has another checksum, and counts as missing. Stdlib only.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import statistics
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TypeAlias
from zlib import crc32

from oaiserve.storage import private

log = logging.getLogger(__name__)

Buffer: TypeAlias = bytearray | memoryview
_HEAD_BYTES = 32  # a checksum in 4 bytes, the hash in 16, and the rest is 0


def open_blocks(folder: Path, kind: str, content_bytes: int, most_bytes: int) -> BlockFiles:
    """Open the blocks of one `kind` of server, which are in a folder of that name, so that all kinds in `folder` have
    at most `most_bytes` together.

    Other kinds get half of them; blocks of the most recently used kinds stay. Raises OSError, and NotPrivate if others
    could write to the folder of the kind.
    """
    private.make_folder(folder / kind)
    of_kind = private.verified(folder / kind)
    return BlockFiles(of_kind, content_bytes, most_bytes - _trim_others(folder, kind, most_bytes // 2))


class BlockFiles:
    """The files of blocks in a private folder, with at most `most_bytes` together: none if that is negative.

    When the limit is reached, the least recently used block without a successor is removed. Any thread may call the
    methods, and other processes may use the same folder: a file that they have removed is missing, which is no failure.
    """

    def __init__(
        self,
        folder: Path,
        content_bytes: int,
        most_bytes: int,
        *,
        writev: Callable[[int, Sequence[Buffer]], int] = os.writev,
        preadv: Callable[[int, Sequence[Buffer], int], int] = os.preadv,
    ) -> None:
        """Find the files, and remove those that are too many or cannot be used. Raises OSError.

        Tests pass other system functions, which simulate a full disk, for example."""
        self._folder = folder
        self._writev = writev
        self._preadv = preadv
        self._content_bytes = content_bytes
        self._most_blocks = max(0, most_bytes // (_HEAD_BYTES + content_bytes))
        self._parents: OrderedDict[bytes, bytes] = OrderedDict()  # keyed by hash, in the order of use
        self._num_children: Counter[bytes] = Counter()
        self._lock = Lock()  # taken to change the table; looking up a hash needs no lock
        self.num_failures = 0  # failures of the file system, and broken files
        self._find()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._parents

    def use(self, hashes: Iterable[bytes]) -> None:
        """Note that these blocks are in use, whether they are read or not."""
        with self._lock:
            for block_hash in hashes:
                if block_hash in self._parents:
                    self._parents.move_to_end(block_hash)

    def read(self, block_hash: bytes, content: memoryview) -> bool:
        """Read the content of a block. Return False if its file is missing or broken; a broken file is removed."""
        parent = self._parents.get(block_hash)
        if parent is None:
            return False
        head = bytearray(_HEAD_BYTES)
        path = self._path(block_hash, parent)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                num_bytes = self._preadv(descriptor, [head, content], 0)
            finally:
                os.close(descriptor)
            os.utime(path)  # keeps the order of use for the next start
        except FileNotFoundError:
            pass  # It was removed to make room, by this server or another one that uses the folder.
        except OSError as error:
            self._failed("read", path, error)
        else:
            if num_bytes == _HEAD_BYTES + len(content) and head == _head(block_hash, content):
                return True
            self._failed("read", path, "its checksum is another")
        with self._lock:
            self._remove(block_hash)
        return False

    def write(self, block_hash: bytes, parent: bytes, content: memoryview) -> bool:
        """Write a block. `parent` is the hash of the block before, whose file must exist; b"" for a first block.

        Return False if the block is not written: without its parent, it could never be found.
        """
        with self._lock:
            if block_hash in self._parents or (parent and parent not in self._parents) or not self._most_blocks:
                return False
            if parent:
                self._parents.move_to_end(parent)  # Otherwise the parent might be removed.
            while len(self._parents) >= self._most_blocks:
                self._remove(next(one for one in self._parents if not self._num_children[one]))
            if parent and parent not in self._parents:
                return False
        path = self._path(block_hash, parent)
        try:
            descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=".")
            try:
                if self._writev(descriptor, [_head(block_hash, content), content]) < _HEAD_BYTES + len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # Only a part fitted on the disk.
            finally:
                os.close(descriptor)
            os.replace(name, path)
        except OSError as error:
            # The start of another server may remove the file, since a killed process might have left it.
            if not isinstance(error, FileNotFoundError) or not self._folder.exists():
                self._failed("written", path, error)
            with suppress(OSError, UnboundLocalError):
                os.unlink(name)
            return False
        with self._lock:
            self._add(block_hash, parent)
        return True

    def _path(self, block_hash: bytes, parent: bytes) -> Path:
        return self._folder / f"{block_hash.hex()}-{parent.hex()}"

    def _add(self, block_hash: bytes, parent: bytes) -> None:
        self._parents[block_hash] = parent
        if parent:
            self._num_children[parent] += 1

    def _remove(self, block_hash: bytes) -> None:
        parent = self._parents.pop(block_hash, None)
        if parent is None:
            return
        self._num_children[parent] -= 1
        if self._num_children[parent] <= 0:
            del self._num_children[parent]
        with suppress(OSError):  # An error means that the file is gone already.
            os.unlink(self._path(block_hash, parent))

    def _failed(self, what: str, path: Path, reason: object) -> None:
        self.num_failures += 1
        if self.num_failures == 1:
            log.warning(
                "A block of the prefix cache could not be %s, and counts as missing: %s: %s", what, path, reason
            )

    def _find(self) -> None:
        """Read the files of earlier starts, and remove those that can never be used."""
        blocks: list[tuple[float, bytes, bytes]] = []
        for entry in os.scandir(self._folder):
            name, _, name_before = entry.name.partition("-")
            try:
                status = entry.stat(follow_symlinks=False)
                hashes = bytes.fromhex(name), bytes.fromhex(name_before)
            except (OSError, ValueError):
                hashes = b"", b""
            if hashes[0] and stat.S_ISREG(status.st_mode) and status.st_size == _HEAD_BYTES + self._content_bytes:
                blocks.append((status.st_mtime, *hashes))
            else:
                with suppress(OSError):  # A folder stays, and does no harm.
                    os.unlink(entry)  # a partial file of a killed process
        for _, block_hash, parent in sorted(blocks):
            self._remove(block_hash)  # A block has only one parent.
            self._add(block_hash, parent)
        following: dict[bytes, list[bytes]] = {}
        for block_hash, parent in self._parents.items():
            following.setdefault(parent, []).append(block_hash)
        ends = [b""]
        whole = set[bytes]()  # blocks whose chain of parents is complete
        while ends:
            found_next = following.get(ends.pop(), ())
            whole.update(found_next)
            ends += found_next
        for block_hash in self._parents.keys() - whole:
            self._remove(block_hash)
        while len(self._parents) > self._most_blocks:
            self._remove(next(one for one in self._parents if not self._num_children[one]))


def _head(block_hash: bytes, content: memoryview) -> bytearray:
    head = bytearray(_HEAD_BYTES)
    head[4 : 4 + len(block_hash)] = block_hash
    head[:4] = crc32(content, crc32(head)).to_bytes(4, "little")
    return head


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _sizes(folder: Path) -> list[int]:
    """Return the sizes of the files, in bytes. Raises OSError."""
    return [entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder) if not entry.is_dir()]


def _trim_others(folder: Path, kind: str, most_bytes: int) -> int:
    """Remove blocks of other kinds until the rest fit into `most_bytes`, and return the size of the rest.

    Their folders stay, because servers of these kinds may be running.
    """
    others = [path for path in folder.iterdir() if path.name != kind and path.is_dir() and not path.is_symlink()]
    kept_bytes = 0
    for path in sorted(others, key=_changed_at, reverse=True):
        try:
            sizes = _sizes(path)
            if sizes and kept_bytes + sum(sizes) > most_bytes:
                of_block = statistics.mode(sizes)  # A block that is being written has another size.
                BlockFiles(path, max(of_block - _HEAD_BYTES, 1), most_bytes - kept_bytes)
                sizes = _sizes(path)
        except OSError:  # Another process is removing files.
            continue
        kept_bytes += sum(sizes)
    return kept_bytes
