"""Compares this tree with an earlier commit by twelve figures: python -m tools.bench.regressions [COMMIT]

Both have an engine of one model and a server at rest, which measure in turns, so that other work of the machine
hits both alike. A time is the least of all turns, since noise only adds to it. Work in Python is counted in bytecode
instructions, which hardly differ from run to run. The exit code is 1 if a figure has grown beyond its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tools.bench import engine_figures
from tools.bench.earlier import checked_out
from tools.bench.process_usage import peak_rss_mib
from tools.markdown import as_markdown, number, write_json
from tools.server_process import CHAT, QUESTION, ROOT, exit_on_sigterm, free_port, running_process

TIME_BOUND = 1.05  # ratio of a figure to the other tree's
COUNT_BOUND = 1.02
ENGINE_FIGURES = Path(engine_figures.__file__)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD~1", help="default: the one before")
    parser.add_argument("--model", default="demo", help="a GGUF file, a folder, or demo (default: demo)")
    parser.add_argument("--turns", type=int, default=8, help="of each tree (default 8)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    exit_on_sigterm()
    path = Path(arguments.model)
    model = str(path.resolve()) if path.exists() else arguments.model  # Each tree's processes run in its folder.
    with checked_out(arguments.commit) as before, ExitStack() as trees:
        both = [trees.enter_context(measured_tree(tree, model)) for tree in (before, ROOT)]
        for turn in range(arguments.turns):
            for tree in both[:: -1 if turn % 2 else 1]:
                tree.turn(turn)
        earlier, now = (tree.found | {"memory, MiB": tree.memory_mib()} for tree in both)
    rows = [["figure", arguments.commit, "now", "ratio", ""]]
    failed = []
    for name, value in now.items():
        ratio = value / earlier[name]
        bound = COUNT_BOUND if name in engine_figures.COUNTS else TIME_BOUND
        failed += [name] if ratio > bound else []
        rows.append([name, number(earlier[name]), number(value), f"{ratio:.3f}", "**slower**" if ratio > bound else ""])
    print("\n".join(as_markdown(rows)))
    write_json(arguments.json, {"before": earlier, "now": now})
    return 1 if failed else 0


class MeasuredTree:
    """A tree with its engine's process and its server. `found` has the least of each figure."""

    def __init__(self, engine: subprocess.Popen[str], server: Any, found: dict[str, float]) -> None:
        self._engine = engine
        self._server = server
        self.found = found

    def turn(self, seed: int) -> None:
        assert self._engine.stdin is not None
        assert self._engine.stdout is not None
        print(seed, file=self._engine.stdin, flush=True)
        figures = json.loads(self._engine.stdout.readline()) | {"answer over HTTP, ms": self._answer_ms()}
        self.found |= {name: min(value, self.found.get(name, value)) for name, value in figures.items()}

    def memory_mib(self) -> float:
        return peak_rss_mib(self._server.process.pid)

    def _answer_ms(self) -> float:
        times = []
        with httpx.Client(base_url=self._server.url, trust_env=False) as client:
            for _ in range(20):
                began = time.perf_counter()
                client.post(CHAT, json=QUESTION | {"max_tokens": 1}).raise_for_status()
                times.append(time.perf_counter() - began)
        return min(times) * 1e3


@contextmanager
def measured_tree(tree: Path, model: str) -> Iterator[MeasuredTree]:
    """Count, start the engine and the server of a tree, and stop them at the end."""
    env = os.environ | {"PYTHONPATH": str(tree)}
    port = free_port()
    program = [sys.executable, "-P", str(ENGINE_FIGURES), model]  # -P: its folder's modules are no one's
    values = json.loads(subprocess.run([*program, "count"], env=env, cwd=tree, capture_output=True, check=True).stdout)
    command = [sys.executable, "-m", "oaiserve", "serve", model, "--served-model-name", QUESTION["model"]]
    command += ["--drafts", "off", "--port", str(port)]
    pipe = subprocess.PIPE
    for _ in range(2):
        with running_process(command, port, env=env, cwd=tree, ready_path=CHAT, question=QUESTION) as server:
            values["start, s"] = min(values.get("start, s", 1e9), server.start_seconds)
    with (
        running_process(command, port, env=env, cwd=tree, ready_path=CHAT, question=QUESTION) as server,
        subprocess.Popen([*program, "time"], env=env, cwd=tree, stdin=pipe, stdout=pipe, text=True) as engine,
    ):
        try:
            yield MeasuredTree(engine, server, values)
        finally:
            engine.terminate()


if __name__ == "__main__":
    sys.exit(main())
