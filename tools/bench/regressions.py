"""Compares this tree with an earlier commit by twelve figures: python -m tools.bench.regressions [COMMIT]

Both have an engine of the demo model and a server at rest, which measure in turns, so that other work of the machine
hits both alike. A time is the least of all turns, since noise only adds to it. Work in Python is counted in bytecode
instructions, which hardly differ from run to run. The exit code is 1 if a figure has grown beyond its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from tools.bench.earlier import checked_out
from tools.bench.process_usage import peak_rss_mib
from tools.markdown import as_markdown, number, write_json
from tools.server_process import CHAT, QUESTION, ROOT, exit_on_sigterm, free_port, running_process

TIME_BOUND = 1.05  # ratio of a figure to the other tree's
COUNT_BOUND = 1.02
DECODES = (1, 8, 64)
PROMPTS = (128, 512)
PROMPT_TOKENS = 64
ANSWER_TOKENS = 12
COUNTED_TOKENS = (4, 20)
COUNTED_REQUESTS = 20
ENGINE_THREAD = "engine"
COUNTS = ("instructions a token", "instructions a request", "imported modules")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD~1", help="default: the one before")
    parser.add_argument("--turns", type=int, default=8, help="of each tree (default 8)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--figures", choices=("count", "time"), help=argparse.SUPPRESS)  # in a tree's own process
    arguments = parser.parse_args()
    exit_on_sigterm()
    if arguments.figures:
        answer_turns() if arguments.figures == "time" else print(json.dumps(counts()))
        return 0
    with checked_out(arguments.commit) as before, ExitStack() as trees:
        both = [trees.enter_context(measured_tree(path)) for path in (before, ROOT)]
        for turn in range(arguments.turns):
            for tree in both[:: -1 if turn % 2 else 1]:
                tree.turn(turn)
        earlier, now = (tree.found | {"memory, MiB": tree.memory_mib()} for tree in both)
    rows = [["figure", arguments.commit, "now", "ratio", ""]]
    failed = []
    for name, value in now.items():
        ratio = value / earlier[name]
        bound = COUNT_BOUND if name in COUNTS else TIME_BOUND
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
def measured_tree(tree: Path) -> Iterator[MeasuredTree]:
    """Count, start the engine and the server of a tree, and stop them at the end."""
    env = os.environ | {"PYTHONPATH": str(tree)}
    port = free_port()
    program = [sys.executable, "-P", str(Path(__file__)), "--figures"]  # -P: this folder's modules are no one's
    values = json.loads(subprocess.run([*program, "count"], env=env, cwd=tree, capture_output=True, check=True).stdout)
    command = [sys.executable, "-m", "oaiserve", "serve", "demo", "--drafts", "off", "--port", str(port)]
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


def answer_turns() -> None:
    """Answer each line of the standard input, a seed, with the times of one turn of this tree's engine."""
    from oaiserve.engine.engine import Engine
    from tools.engine_load import complete, random_prompts

    with Engine.from_pretrained("demo", drafts="off", kv_blocks=2048) as engine:
        for line in sys.stdin:
            durations: dict[str, float] = {}
            for count in DECODES:  # with one prompt, which the prefix cache has, so that all decode at once
                prompts = random_prompts(1, PROMPT_TOKENS, engine.vocab_size) * count
                complete(engine, prompts, ANSWER_TOKENS)
                steps = [step for step in engine.take_steps() if step.kind.value == "decode"]
                full = [step for step in steps if step.num_sequences == count]
                durations[f"decode of {count}, ms"] = min(step.duration_ns for step in full) / 1e6
                durations["engine beside a step, ms"] = min(step.idle_ns for step in full) / 1e6
            for length in PROMPTS:
                # Its seed is no other prompt's, or it would begin with that one, which is in the prefix cache.
                complete(engine, random_prompts(1, length, engine.vocab_size, 1000 * length + int(line)), 1)
                durations[f"prompt of {length}, ms"] = sum(step.duration_ns for step in engine.take_steps()) / 1e6
            print(json.dumps(durations), flush=True)


def counts() -> dict[str, float]:
    """Return the bytecode instructions of the engine thread, by token and by request, and the imported modules."""
    import_module("oaiserve.app")
    modules = len(sys.modules)
    counted = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal counted
        if threading.current_thread().name != ENGINE_THREAD:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        counted += event == "opcode"
        return trace

    threading.settrace(trace)
    from oaiserve.engine.engine import Engine
    from tools.engine_load import complete, random_prompts

    with Engine.from_pretrained("demo", drafts="off", kv_blocks=2048) as engine:
        prompts = random_prompts(64 + COUNTED_REQUESTS, 8, engine.vocab_size)
        of_tokens = []
        for num_tokens in (COUNTED_TOKENS[0], *COUNTED_TOKENS):  # at first with an empty prefix cache
            counted = 0
            complete(engine, prompts[:64], num_tokens)
            of_tokens.append(counted)
        of_requests = []
        for prompt in prompts[64:]:
            counted = 0
            complete(engine, [prompt], 1)
            of_requests.append(counted)
    a_token = (of_tokens[2] - of_tokens[1]) / (64 * (COUNTED_TOKENS[1] - COUNTED_TOKENS[0]))
    return dict(zip(COUNTS, (a_token, min(of_requests), modules), strict=True))


if __name__ == "__main__":
    sys.exit(main())
