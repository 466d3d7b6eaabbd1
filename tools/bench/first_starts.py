"""Measures first starts beside llama.cpp's on the same GGUF files, in turns: python -m tools.bench.first_starts

A first start remembers no check, but has its native code. Each start is the time from the start of the process to a
whole answer of eight tokens over HTTP; the files are in the page cache. llama.cpp starts as it does by default, when it
packs some weights in another way, and with `--no-repack`, when it computes with the file's pages.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

from tools.bench import gguf_files, machine
from tools.bench.gguf_peers import llama_cpp
from tools.bench.start_up import ANSWER, COMPLETION, one_start
from tools.markdown import as_markdown
from tools.server_process import ROOT, exit_on_sigterm, free_port, running_process

OURS = "oaiserve"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [gguf_files.LLAMA, gguf_files.LARGER[-1]]
    parser.add_argument("--models", nargs="+", default=models, choices=list(gguf_files.MODELS))
    parser.add_argument("--format", default=gguf_files.LARGER_FORMAT, help="as llama.cpp's program names it")
    parser.add_argument("--rounds", type=int, default=3, help="of one start each (default 3)")
    parser.add_argument("--before", type=Path, help="the sources of another version, in the same turns")
    arguments = parser.parse_args()
    exit_on_sigterm()
    files = gguf_files.chosen(arguments.models, [arguments.format])
    rows = [row for name, path in files.items() for row in measured(name, path, arguments.rounds, arguments.before)]
    print(f"{machine.sentence()}; medians of {arguments.rounds} rounds in turns\n")
    print("\n".join(as_markdown([("file", "server", "s to the first answer", "times"), *rows])))


def measured(name: str, path: Path, rounds: int, before: Path | None) -> list[tuple[str, ...]]:
    """Return a row for each server: its seconds, and how many times llama.cpp's shorter ones this server takes."""
    starts: dict[str, Callable[[], float]] = {OURS: lambda: ours(path)}
    if before is not None:
        starts["before"] = lambda: ours(path, before)
    starts |= {"llama.cpp": lambda: llama(path), "llama.cpp --no-repack": lambda: llama(path, "--no-repack")}
    seconds: dict[str, list[float]] = {server: [] for server in starts}
    for number in range(rounds):
        # In turns forth and back, because a start finds the memory at hand that the one before it gave back.
        for server in list(starts) if number % 2 else reversed(list(starts)):
            seconds[server].append(starts[server]())
    mine = statistics.median(seconds[OURS])
    return [
        (name, server, f"{(median := statistics.median(found)):.1f} ({min(found):.1f} to {max(found):.1f})",
         "" if server == OURS else f"{mine / median:.2f}")
        for server, found in seconds.items()
    ]  # fmt: skip


def ours(path: Path, tree: Path = ROOT) -> float:
    """Start this server, and return the seconds to its first answer."""
    return one_start(str(path), ["--recheck"], tree)[ANSWER][1] / 1e3


def llama(path: Path, *flags: str) -> float:
    """Start llama.cpp's server, and return the seconds to its first answer."""
    port = free_port()
    command = llama_cpp(path, *flags).command(port)
    with running_process(command, port, ready_path="/v1/completions", question=COMPLETION) as server:
        return server.start_seconds


if __name__ == "__main__":
    main()
