"""Finds the cgroups of this process, whose limits hold in containers and for services of systemd.

Stdlib only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TOP = "sys/fs/cgroup"


class Cgroup(NamedTuple):
    folder: Path
    version: int  # The names of its files depend on the version of its interface, 1 or 2.


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[Cgroup]:
    """Yield each cgroup whose limits for `controller` hold for this process: its own, and those around it.

    `root` is the folder that has proc/ and sys/. Some of the folders may be missing.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top = Cgroup(root / _TOP, 2)
        elif controller in controllers.split(","):
            top = Cgroup(root / _TOP / controller, 1)
        else:
            continue
        # A container may report the path on its host. Inside, only the top folder exists then.
        yield top
        for prefix in _prefixes(path):
            yield Cgroup(top.folder / prefix, top.version)


def _prefixes(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/".join(parts[: number + 1]) for number in range(len(parts))]
