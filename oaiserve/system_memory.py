"""Returns freed memory to the system, allocates pages before they are needed, and measures how much is available.

Without glibc, no memory is returned or taken.

The system maps each page when it is first written, which takes up to three milliseconds per megabyte. If Python code
writes it, the GIL is held meanwhile, and all threads wait.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from pathlib import Path

from oaiserve.system_cgroups import cgroups

# Parameters of mallopt(3)
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
MOST_MMAP_THRESHOLD_BYTES = 32 * 2**20  # the largest value that glibc accepts
TRIM_THRESHOLD_BYTES = 64 * 2**20  # room for the copies of the largest body that is allowed by default, and a bit more
MOST_ARENAS = 2
MOST_COPIES = 4  # copies of a large body, in different forms, while it is parsed and rendered
# Files with a cgroup's memory limits and usage, and the entries for file caches, which can be dropped, by interface
# version.
_OF_CGROUPS = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
}
# Messages of libraries when the system has no memory for them. On a GPU, torch says "CUDA out of memory".
_SHORT_OF_MEMORY = ("failed to map segment", "cannot allocate memory", "can't allocate memory", "bad_alloc")


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt, libc.malloc_trim  # noqa: B018
    except (OSError, TypeError, AttributeError):
        return None
    libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    return libc


_libc = _glibc()  # Calls through ctypes release the GIL.


def share_arenas() -> None:
    """Let all threads that start from now on share a few arenas, unless MALLOC_ARENA_MAX sets their number.

    By default, glibc spreads threads over up to eight arenas per core. Each arena keeps fragmented pages, in which few
    objects are still in use. After large bodies, these add up to a hundred megabytes, and slowly grow.
    """
    if _libc is not None and "MALLOC_ARENA_MAX" not in os.environ:
        _libc.mallopt(M_ARENA_MAX, MOST_ARENAS)


def keep_freed() -> None:
    """Keep freed memory in this process for the next allocations, until `give_back`."""
    if _libc is not None:
        _libc.mallopt(M_MMAP_THRESHOLD, MOST_MMAP_THRESHOLD_BYTES)
        _libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def take(num_bytes: int) -> None:
    """Have the system map the pages for this thread's next copies of a body. This only helps after `keep_freed`."""
    if _libc is None:
        return
    num_bytes = min(num_bytes, MOST_MMAP_THRESHOLD_BYTES // 2)
    taken = [_libc.malloc(num_bytes) for _ in range(MOST_COPIES)]
    for address in filter(None, taken):
        _libc.memset(address, 0, num_bytes)
    for address in taken:
        _libc.free(address)


def give_back() -> None:
    """Return all empty pages to the system.

    glibc keeps free memory that lies between two allocations, in every arena: after some large bodies, a gigabyte. The
    call takes milliseconds.
    """
    if _libc is not None:
        _libc.malloc_trim(0)


def available_bytes() -> int:
    """Return the bytes that this process can still use without swapping, within the limits of its container and of its
    address space."""
    limits = (free_bytes(), container_bytes(), address_space_bytes())
    return min(limit for limit in limits if limit is not None)


def free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes available on this machine, or all its memory if the system does not report them."""
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def container_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that the cgroups of this process leave, or None if none has a limit. Cached files don't count as
    used, because the system drops them when memory is short."""
    left = []
    for folder, version in cgroups("memory", root):
        limits, used, cached = _OF_CGROUPS[version]
        usage = _number(folder / used)
        found = [limit for name in limits if (limit := _number(folder / name)) is not None]
        if usage is not None and found:
            left.append(max(0, min(found) - usage + _cached(folder / "memory.stat", cached)))
    return min(left, default=None)


def limit_bytes(root: Path = Path("/")) -> int:
    """Return the most memory that this process may use: the machine's, or the lowest limit of its cgroups."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder, version in cgroups("memory", root):
        limits, _, _ = _OF_CGROUPS[version]
        found += [limit for name in limits if (limit := _number(folder / name)) is not None]
    return min(found)


def address_space_bytes() -> int | None:
    """Return how much address space the limit of this process (ulimit -v) leaves, in bytes, or None without a limit."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return None
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    return max(0, most - pages * os.sysconf("SC_PAGE_SIZE"))


def shortage(error: BaseException) -> str | None:
    """Return a sentence, without a full stop, if the error means that this process has too little memory, else None."""
    text = str(error).lower()
    is_short = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not is_short and not any(words in text for words in _SHORT_OF_MEMORY):
        return None
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        return (
            f"there is too little memory: this process may have {most / 2**30:.1f} GiB of address space (ulimit -v), "
            "which libraries take much of. Raise that limit"
        )
    return f"there is too little memory: {available_bytes() / 2**30:.1f} GiB are free"


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" means no limit
        return None


def _cached(path: Path, names: tuple[str, ...]) -> int:
    try:
        numbers = dict(line.split() for line in path.read_text().splitlines())
        return sum(int(numbers.get(name, 0)) for name in names)
    except (OSError, ValueError):
        return 0
