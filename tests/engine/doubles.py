"""Doubles for the engine's tests: a runner that follows a script, a consumer that can wait, a clock that is moved."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import count
from queue import SimpleQueue
from typing import Any

from transformers import PreTrainedTokenizerFast

from oaiserve.config import EngineOptions
from oaiserve.engine.accounts.machine_time import MachineTime
from oaiserve.engine.engine import Engine
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.request import (
    TERMINAL,
    Event,
    Prompt,
    Request,
    SamplingParams,
    Terminal,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
    TooManyTokens,
)
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import ChunkResult, Logprobs, Masks, Step, StepResult
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.explain.step_cost_fit import at_once
from oaiserve.runtime import THREADS, Empty, Threads
from tests.engine.memory import NEVER
from tests.engine.text.tokenizers_for_tests import CHATML, byte_level
from tests.waiting import wait_until
from tests.world.loop import World

TIMEOUT_SECONDS = 60  # limit of waits that end at once unless a test fails

TOKENIZER = Tokenizer(
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>", chat_template=CHATML)
)
EOS: int = TOKENIZER.eos_token_id


def letter_id(letter: str) -> int:
    (token_id,) = TOKENIZER.encode(TextPrompt(letter))
    return token_id


LETTERS = [letter_id(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]


def next_letter(sequence: Sequence) -> int:
    """Return the token a, b, c, ... by position in the answer."""
    return LETTERS[sequence.num_generated % len(LETTERS)]


def queue_in(runtime: Any) -> Any:
    """Return a queue whose reader waits in this runtime, and which nobody takes for one of the product."""
    return SimpleQueue() if isinstance(runtime, Threads) else runtime.queue()


@dataclass(eq=False)
class Launched:
    step: Step
    results: list[ChunkResult] | None = None
    is_drawn: bool = False


class ScriptedRunner:
    """A runner whose results are those that `token_of` returns: a token, several, a vector, or the text of an error.

    With `gated`, each step waits for `permit()`. An asynchronous one computes a step when its results are collected.
    With `max_draws`, sequences without a grammar get drafts of that many tokens less one, which never come true.
    `launching` is called with each step that is launched, `computing` with each that is computed. They may move a
    clock, or raise the error of a device.
    """

    is_exact = True
    is_asynchronous = False

    def __init__(
        self,
        token_of: Callable[[Sequence], int | list[int] | array[float] | str] = next_letter,
        *,
        gated: bool = False,
        max_draws: int = 1,
        is_asynchronous: bool | None = None,
        launching: Callable[[Step], object] = lambda _: None,
        computing: Callable[[Step], object] = lambda _: None,
    ) -> None:
        self.token_of = token_of
        self.max_draws = max_draws
        if is_asynchronous is not None:
            self.is_asynchronous = is_asynchronous
        self.launched: list[Step] = []
        self.steps: list[list[tuple[str, int, int]]] = []  # (request id, choice, tokens) of each chunk
        self._launching = launching
        self._computing = computing
        self.is_gated = gated
        self._last: Launched | None = None
        self.live_in(THREADS)

    def live_in(self, runtime: Any) -> None:
        """Let steps wait in this runtime."""
        self.started = queue_in(runtime)
        self._permits = queue_in(runtime)

    def permit(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._permits.put(None)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        assert copies

    def launch(self, step: Step) -> Launched:
        self._launching(step)
        launched = self.begin(step)
        if not self.is_asynchronous:
            launched.results = self.run(step)
        return launched

    def begin(self, step: Step) -> Launched:
        assert self._last is None or self._last.is_drawn, "a step is launched before the draw of the one before"
        self.launched.append(step)
        for chunk in step.chunks:
            if chunk.sequence.constraint is None:
                chunk.sequence.draft = [NEVER] * (self.max_draws - 1)
        self._last = Launched(step)
        return self._last

    def draw(self, launched: Launched, masks: Masks | None) -> None:
        assert launched is self._last, "only the step that was launched last can wait for its draw"
        assert not launched.is_drawn, "a step is drawn twice"
        launched.is_drawn = True

    def collect(self, launched: Launched) -> StepResult:
        assert launched.is_drawn, "a step is collected before it is drawn"
        return StepResult(self.run(launched.step) if launched.results is None else launched.results)

    def run(self, step: Step) -> list[ChunkResult]:
        self.steps.append([(c.sequence.request_id, c.sequence.index, c.num_tokens) for c in step.chunks])
        self.started.put(step)
        if self.is_gated:
            self._permits.get()
        self._computing(step)
        results = []
        for chunk in step.chunks:
            result = ChunkResult()
            sequence = chunk.sequence
            if chunk.max_draws or sequence.is_whole:
                drawn = self.token_of(sequence)
                if isinstance(drawn, str):
                    result.error = drawn
                elif isinstance(drawn, array):
                    result.vector = drawn
                else:
                    result.token_ids = drawn[: chunk.max_draws] if isinstance(drawn, list) else [drawn]
                if sequence.params.logprobs is not None:
                    result.logprobs = [Logprobs(token_id, -0.5, [token_id], [-0.5]) for token_id in result.token_ids]
            if sequence.wants_prompt_logprobs:
                last = min(chunk.end, sequence.prompt_len - 1)
                result.prompt_logprobs = [
                    Logprobs(sequence.token_ids[i + 1], -float(i + 1), [], []) for i in range(chunk.start, last)
                ]
            results.append(result)
        return results


def device_is_gone(_: Step) -> None:
    """Raise the error of a device that is gone, as `computing` of a runner."""
    raise RuntimeError("the device is gone")


def third_step_fails() -> Callable[[Step], object]:
    """`launching` or `computing` of a runner that raises an error in its third step."""
    numbers = count(1)
    return lambda step: device_is_gone(step) if next(numbers) == 3 else None


class Gate:
    """A gate that is closed until it is set, for a worker or for a test."""

    def __init__(self) -> None:
        self._is_open = False
        self.live_in(THREADS)

    def live_in(self, runtime: Any) -> None:
        self._opened = queue_in(runtime)

    def set(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._opened.put(None)

    def is_set(self) -> bool:
        return self._is_open

    def wait(self, timeout: float | None = None) -> bool:
        with suppress(Empty):
            self._opened.put(self._opened.get(timeout=timeout))  # for others who wait
        return self._is_open


class BlockedTokenizer:
    """A tokenizer that encodes like the real one, but stops at the prompt "blocked" until it is released."""

    def __init__(self) -> None:
        self.backend = TOKENIZER.backend
        self.eos_token_id = EOS
        self.vocab_size = TOKENIZER.vocab_size
        self.chat_template = None
        self.special_token_ids = TOKENIZER.special_token_ids
        self.entered = Gate()
        self.release = Gate()

    def live_in(self, runtime: Any) -> None:
        self.entered.live_in(runtime)
        self.release.live_in(runtime)

    def encode(self, prompt: Prompt) -> list[int]:
        if prompt == TextPrompt("blocked"):
            self.entered.set()
            self.release.wait()
        return TOKENIZER.encode(prompt)

    def encode_bad_words(self, words: tuple[str, ...]) -> list[list[int]]:
        return TOKENIZER.encode_bad_words(words)

    def encode_in_pieces(self, prompt: Prompt, most_tokens: int, expand: object) -> Generator[None, None, list[int]]:
        yield from ()
        token_ids = self.encode(prompt)
        if len(token_ids) > most_tokens:
            raise TooManyTokens(len(token_ids), is_exact=True)
        return token_ids


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def move(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


class Inbox:
    """A consumer that keeps the events of each hand-over in a list of its own. It calls `taking` with them before."""

    def __init__(self, taking: Callable[[list[Event]], object] = lambda _: None) -> None:
        self._taking = taking
        self.hand_overs: list[list[Event]] = []
        self._home: Any = None
        self.live_in(THREADS)

    def live_in(self, runtime: Any) -> None:
        """Wait in this runtime, that of the engine."""
        if runtime is not self._home:
            self._home = runtime
            self._queue = queue_in(runtime)

    def __call__(self, events: list[Event]) -> None:
        self._taking(events)
        self._queue.put(events)

    def wait(self) -> list[Event]:
        """Wait for the next hand-over, and return its events. In a world, the engine goes on as far as it can."""
        events = self._queue.get()
        if isinstance(self._home, World):
            self._home.settle()
        self.hand_overs.append(events)
        return events

    def wait_terminal(self, *request_ids: str) -> dict[str, Terminal]:
        """Wait until each of the requests has its terminal event, and return these."""
        ended: dict[str, Terminal] = {}
        while not set(request_ids) <= ended.keys():
            for event in self.wait():
                if isinstance(event, TERMINAL):
                    assert event.request_id not in ended, "two terminal events"
                    ended[event.request_id] = event
        return ended


class Leaver(Inbox):
    """A consumer that aborts requests after a number of tokens, during the hand-over of a step."""

    def __init__(self, engine: Engine, leaves_after: dict[str, int]) -> None:
        super().__init__()
        self._engine = engine
        self._left = dict(leaves_after)

    def __call__(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokenChunk) and event.request_id in self._left:
                self._left[event.request_id] -= len(event.token_ids)
                if self._left[event.request_id] <= 0:
                    self._engine.abort(event.request_id)
        super().__call__(events)


def new_world(clock_ns: Callable[[], int] | None = None) -> World:
    return World(int(os.environ.get("SEED", "0")), clock_ns=clock_ns)


class SimulatedEngine(Engine):
    """An engine in a world, which goes on while the test waits for it."""

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        """Load a model, in a world of its own unless `runtime` is another."""
        return super().from_pretrained(*arguments, **{"runtime": new_world(), **options})

    @property
    def world(self) -> World:
        return self._parts.runtime

    def submit(self, request: Request, deliver: Any) -> None:
        if isinstance(deliver, Inbox):
            deliver.live_in(self.world)
        super().submit(request, deliver)

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self.world.leave()


OF_MODEL = {field.name for field in fields(ServedModel)}


def make_engine(
    runner: ScriptedRunner | None = None,
    *,
    kind: type[Engine] | None = None,
    clock_ns: Callable[[], int] | None = None,
    machine: MachineTime | None = None,
    cores_ns: Callable[[], int] = time.process_time_ns,
    drafter: Any = None,
    kv_blocks: int = 64,
    runtime: Any = None,
    **options: Any,
) -> Any:
    """Return an engine with blocks of 4 tokens. Options are those of the engine, or fields of the model.

    Without a runtime, it is in a world of its own, where no time passes unless the test waits. It learns what steps
    cost on the engine thread, so that a test knows what is learnt.
    """
    if runtime is None:
        runtime = new_world(clock_ns)
        kind = kind or SimulatedEngine
    elif clock_ns is not None:
        runtime = Threads(clock_ns)
    runner = runner or ScriptedRunner()
    for double in (runner, options.get("tokenizer")):
        if hasattr(double, "live_in"):
            double.live_in(runtime)
    of_model = {name: options.pop(name) for name in OF_MODEL & options.keys()}
    of_engine = {"block_size": 4, "max_running": 8, "max_step_tokens": 16}
    pools = "pooling" in of_model
    if pools:
        of_engine["prefix_cache"] = False
    model = {
        "tokenizer": TOKENIZER,
        "runner": runner,
        "num_blocks": 0 if pools else kv_blocks,
        "max_model_len": 4 * kv_blocks,
        "vocab_size": TOKENIZER.vocab_size,
        "eos_token_ids": frozenset([EOS]),
    }
    engine_options = EngineOptions(**{**of_engine, **options})
    of_test = {"machine": machine, "cores_ns": cores_ns, "learn": at_once, "drafts": drafter}
    of_test["runtime"] = runtime
    return (kind or Engine)(EngineParts.of(ServedModel(**{**model, **of_model}), engine_options, **of_test))


@contextmanager
def stepping(
    first: Request, *others: Request, runner: ScriptedRunner | None = None, **options: Any
) -> Iterator[tuple[Any, ScriptedRunner, Inbox]]:
    """Run an engine that gets the others while the step of the first waits, as later steps do, for `permit()`."""
    runner = runner or ScriptedRunner(gated=True)
    inbox = Inbox()
    with make_engine(runner, **options) as engine:
        engine.submit(first, inbox)
        runner.started.get()
        for other in others:
            engine.submit(other, inbox)
        yield engine, runner, inbox


def wait_until_idle(engine: Any) -> None:
    """Wait until the snapshot shows that the engine thread waits for a command."""
    wait = engine.world.wait_for if isinstance(engine, SimulatedEngine) else wait_until
    wait(lambda: engine.snapshot().idle_since_ns is not None)


def request(request_id: str = "r", prompt_len: int = 5, *, stream_interval: int = 1, **params: object) -> Request:
    """Return a request of token ids, which passes the tokenize stage at once."""
    params = {"max_tokens": 3, "temperature": 0.0, **params}
    prompts = (TokenPrompt([1] * prompt_len),)
    return Request(request_id, prompts, SamplingParams(**params), stream_interval=stream_interval)
