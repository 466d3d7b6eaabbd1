"""Answers prompts with oaiserve, on an emulated CPU: PROGRAM MODEL VARIANT PROMPT_TOKENS ANSWER_TOKENS

The counter's sections are a prompt, and another one with as many tokens after its first as ANSWER_TOKENS.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Event, Finished, Grammar, Request, SamplingParams, TokenPrompt
from tools.arm.answers import OPTIONS, use_variant


def main() -> None:
    model, variant, *numbers = sys.argv[1:]
    num_prompt_tokens, num_answer_tokens = map(int, numbers)
    with TemporaryDirectory() as folder:
        use_variant(variant, Path(folder))
        with Engine.from_pretrained(model, **OPTIONS) as engine:
            # The first request also pays for what a process does once. It needs a grammar to wait for the thread that
            # prepares the model's tokens for grammars, which would be counted with a later request otherwise.
            answer(engine, prompt(0, num_prompt_tokens), 1 + num_answer_tokens, Grammar("regex", "(?s:.*)"))
            for number, num_tokens in ((1, 1), (2, 1 + num_answer_tokens)):
                os.getppid()  # ends a section of the counter
                answer(engine, prompt(number, num_prompt_tokens), num_tokens)
                os.getppid()
            print(engine.model_info["dtype"].removeprefix("torch."))


def prompt(number: int, num_tokens: int) -> list[int]:
    """Return the prompt that peer_steps.cpp also has for this number. No two begin alike, so none is cached."""
    return [1000 + (number * num_tokens + i) * 7 % 20_000 for i in range(num_tokens)]


def answer(engine: Engine, token_ids: list[int], num_tokens: int, grammar: Grammar | None = None) -> None:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, grammar=grammar)
    inbox: SimpleQueue[list[Event]] = SimpleQueue()
    engine.submit(Request("steps", (TokenPrompt(token_ids),), params), inbox.put)
    while True:
        for event in inbox.get():
            if isinstance(event, Finished):
                return
            if isinstance(event, TERMINAL):
                raise RuntimeError(f"The request did not finish: {event}")


if __name__ == "__main__":
    main()
