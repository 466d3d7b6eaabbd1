"""Where the memory of a server is: python -m tools.bench.memory_use

Starts `oaiserve serve demo`, and prints its resident memory by owner after the first answer and after a load, as /proc
says it. The system can drop memory of files, which the servers of a machine share.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

from tools.load import StreamsLoad
from tools.server_process import CHAT, QUESTION, ServerProcess, exit_on_sigterm, running_oaiserve

MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ (\S+) \d+ *(.*)$")
LARGE_KIB = 16 * 1024  # larger than what arenas hold in one piece


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="streams at once (default 64)")
    parser.add_argument("--flags", nargs="*", default=[], help="of the server, without their dashes")
    arguments = parser.parse_args()
    exit_on_sigterm()
    flags = [f"--{flag}" if index % 2 == 0 else flag for index, flag in enumerate(arguments.flags)]
    with running_oaiserve(*flags, ready_path=CHAT, question=QUESTION) as server:
        before = by_owner(server)
        StreamsLoad(arguments.streams, 128, 128).run(server.url, seed=1)
        after = by_owner(server)
        peak = peak_mib(server)
    print("| owner | after the start, MiB | after the load, MiB |\n|---|---|---|")
    for owner in sorted(before | after, key=lambda owner: -after[owner]):
        print(f"| {owner} | {before[owner]:.0f} | {after[owner]:.0f} |")
    print(f"| all | {before.total():.0f} | {after.total():.0f}, at most {peak:.0f} |")


def by_owner(server: ServerProcess) -> Counter[str]:
    """Return the MiB of resident memory by owner, from /proc/PID/smaps."""
    owners: Counter[str] = Counter()
    owner, size_kib = "", 0
    for line in Path(f"/proc/{server.process.pid}/smaps").read_text().splitlines():
        if mapping := MAPPING.match(line):
            owner, size_kib = mapping[2], 0
        elif line.startswith("Size:"):
            size_kib = int(line.split()[1])
        elif line.startswith("Rss:"):
            owners[name_of(owner, size_kib)] += int(line.split()[1]) / 1024
    return Counter({name: mib for name, mib in owners.items() if mib >= 0.5})


def name_of(path: str, size_kib: int) -> str:
    if path.endswith(".safetensors"):
        return "the model's file, mapped"
    if "/torch/" in path:
        return "libraries of torch"
    if path == "[heap]":
        return "heap: Python's and torch's objects"
    if path.startswith("["):
        return "stacks"
    if path:
        return "other libraries and files"
    if size_kib >= LARGE_KIB:
        return "large pieces: weights, KV cache"
    return "smaller pieces: arenas, stacks of threads"


def peak_mib(server: ServerProcess) -> float:
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise ValueError("the system does not say how much memory was in use at most")


if __name__ == "__main__":
    main()
