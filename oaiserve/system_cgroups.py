"""Finds the cgroups of this process, which limit containers and systemd services. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TOP = "sys/fs/cgroup"


class Cgroup(NamedTuple):
    folder: Path
    version: int  # version of the interface, 1 or 2, which determines the names of the files


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[Cgroup]:
    """Yield each cgroup whose limits for `controller` apply to this process: its own and all ancestors.

    `root` is the folder that contains proc/ and sys/. Some of the cgroups' folders may be missing.
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
        # A container may report its path on the host, of which only the top folder exists inside.
        yield top
        for prefix in _prefixes(path):
            yield Cgroup(top.folder / prefix, top.version)


def _prefixes(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return ["/".join(parts[: number + 1]) for number in range(len(parts))]
