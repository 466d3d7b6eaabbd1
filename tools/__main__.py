"""Lists the measurements and checks, or runs one: python -m tools [NAME ...]

Each is a module that runs by its own name, too. What one writes with --json is a record: `name`, `command`, `created`,
`machine` and `version`, besides its results.
"""

from __future__ import annotations

import runpy
import sys

COMMANDS = {
    "bench.compare": "against other servers: `make bench-peers`",
    "bench.regressions": "twelve figures of this tree and of an earlier commit, in turns: before a release",
    "bench.host": "what streams cost the host, on a device that computes nothing: docs/measurements.md",
    "bench.prompts": "a lone prompt by its length: docs/measurements.md",
    "bench.limits": "products beside what a CPU's instructions multiply at most: docs/performance.md",
    "arm": "whole models on emulated CPUs of aarch64, compared with x86-64: `make test-arm`",
    "bench.step": "where a step's time goes, and its floor: `make bench`",
    "quality": "KL divergence and top-1 agreement with float32, next to llama.cpp's: docs/benchmarks.md",
    "gpu_check": "right and how fast on a GPU; --dry-run needs none, and compiles all kernels",
    "gpu.kernels": "compiles every kernel for five kinds of cards, and shows what each takes",
    "gpu.pack": "packages and compiled kernels for the GPU check on a machine without a network",
    "config_defaults": "renews the defaults of model types that engine/decoder keeps",
    "config_mutants": "changes each setting of each described type; fails where a description is wrong",
    "described_types": "which executors compute each described type, from which files: docs/reference/models.md",
    "clients": "the first examples of other people's clients: `make clients`",
    "clients.sessions": "sessions of agents with a scripted model: `make clients`",
    "attack": "attacks beside a neighbour; fails where one harms it: docs/security.md",
    "attack.fuzz": "spoiled files and bodies for their readers and for starts, 60 s each; fails where one raises more",
    "attack.growth": "functions and routes with n and 8n bytes; fails where they take more than linear time",
    "engines": "a gateway before llama.cpp, vLLM or transformers: bytes, accounts, a kill, panels: docs/any-engine.md",
    "kills": "servers killed in mid-stream, and their streams compared: docs/gateway.md",
    "retry_failed": "runs pytest, and tries up to three failed tests once more: for CI",
    "ranges": "tests with the lowest and newest versions of packages: `make test-range`",
    "reference": "writes the tables of docs/reference",
    "charts": "draws the bars of docs/benchmarks.md",
    "drawn": "reduces docs/benchmarks to the numbers that tables and charts need",
    "quick": "the tests that a change can break, for at most 90 s: `make quick`",
    "style": "statements and words that are hard to read, with file and line: `make check`",
}


def listing() -> str:
    """Return a line for each command."""
    width = max(map(len, COMMANDS))
    return "\n".join(f"{name:{width}}  {about}" for name, about in COMMANDS.items())


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in COMMANDS:
        print(listing())
        return 2 if argv and argv[0] not in ("-h", "--help") else 0
    sys.argv = argv
    runpy.run_module(f"tools.{argv[0]}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
