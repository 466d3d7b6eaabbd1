"""Figures of one tree's engine, in a process of its own: python -P tools/bench/engine_figures.py MODEL count|time

`tools.bench.regressions` runs this file with each tree's own modules, so it imports nothing that an earlier tree lacks.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import replace
from importlib import import_module
from types import FrameType
from typing import Any

DECODES = (1, 8, 64)
PROMPTS = (128, 512)
PROMPT_TOKENS = 64
ANSWER_TOKENS = 12
COUNTED_TOKENS = (4, 20)
COUNTED_REQUESTS = 20
ENGINE_THREAD = "engine"
COUNTS = ("instructions a token", "instructions a request", "imported modules")


def main() -> None:
    model, kind = sys.argv[1:]
    if kind == "time":
        answer_turns(model)
    else:
        print(json.dumps(counts(model)))


def answer_turns(model: str) -> None:
    """Answer each line of the standard input, a seed, with the times of one turn of this tree's engine."""
    from oaiserve.engine.engine import Engine
    from tools.engine_load import complete, greedy, random_prompts

    with Engine.from_pretrained(model, drafts="off", kv_blocks=2048) as engine:
        for line in sys.stdin:
            durations: dict[str, float] = {}
            for count in DECODES:  # as choices of one prompt, which begin at once; prompts may begin one a step
                prompts = random_prompts(1, PROMPT_TOKENS, engine.vocab_size)
                choices = replace(greedy(ANSWER_TOKENS), n=count)
                complete(engine, prompts, count * ANSWER_TOKENS, params=choices)
                steps = [step for step in engine.take_steps() if step.kind.value == "decode"]
                full = [step for step in steps if step.num_sequences == count]
                durations[f"decode of {count}, ms"] = min(step.duration_ns for step in full) / 1e6
                durations["engine beside a step, ms"] = min(step.idle_ns for step in full) / 1e6
            for length in PROMPTS:
                # Its seed is no other prompt's, or it would begin with that one, which is in the prefix cache.
                complete(engine, random_prompts(1, length, engine.vocab_size, 1000 * length + int(line)), 1)
                durations[f"prompt of {length}, ms"] = sum(step.duration_ns for step in engine.take_steps()) / 1e6
            print(json.dumps(durations), flush=True)


def counts(model: str) -> dict[str, float]:
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

    with Engine.from_pretrained(model, drafts="off", kv_blocks=2048) as engine:
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
    main()
