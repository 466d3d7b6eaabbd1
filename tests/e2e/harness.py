"""A server that holds each step until the test permits it, and in which any part can fail for one request.

Server and engine are real, in the world of the tests. The runner, the tokenizer and the receivers of events are
doubles. The prompt of a request decides what goes wrong for it. Companions run next to it, and their answers must stay
the same.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from string import ascii_lowercase
from typing import Any

import httpx
from starlette.applications import Starlette
from transformers import PreTrainedTokenizerFast

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.event_streams import LoopStreams
from oaiserve.engine.request import Deliver, Event, Prompt, Request, TextPrompt, TokenChunk
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Step
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.facts.record import Outcome, RequestRecord
from tests.engine.doubles import (
    EOS,
    TOKENIZER,
    Gate,
    ScriptedRunner,
    SimulatedEngine,
    make_engine,
    next_letter,
)
from tests.engine.text.tokenizers_for_tests import CHATML, byte_level
from tests.routes.doubles import FakeTelemetry
from tests.world.client import WorldSocket
from tests.world.loop import WorldTask
from tests.world.runtime import WorldWorker
from tests.world.serving import Place, PlacedServer

BAD_LOGITS = "The model produced no usable numbers."
TEMPLATE = (
    "{% if messages[0]['content'] == 'template refuses' %}{{ raise_exception('Unknown role.') }}{% endif %}"
    "{% if messages[0]['content'] == 'template has a bug' %}{{ messages[0]['nothing'].strip() }}{% endif %}"
) + CHATML


class Panic(BaseException):
    """An error that is no Exception, like a panic of Rust code."""


class BrokenId(int):
    """A token id that raises an error when it is looked up."""

    def __new__(cls, error: BaseException) -> BrokenId:
        self = super().__new__(cls, 7)
        self.error = error
        return self

    def __hash__(self) -> int:
        raise self.error


class FaultyTokenizer(Tokenizer):
    """A tokenizer that raises an error for some prompts, and waits for `release` at prompts that end in "blocks"."""

    def __init__(self) -> None:
        backend = byte_level()
        super().__init__(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>"), TEMPLATE)
        self.entered = Gate()
        self.release = Gate()

    def live_in(self, runtime: Any) -> None:
        self.entered.live_in(runtime)
        self.release.live_in(runtime)

    def encode_in_pieces(
        self, prompt: Prompt, most_tokens: int | None = None, expand: object = None
    ) -> Generator[None, None, list[int]]:
        match prompt:
            case TextPrompt("tokenizer raises"):
                raise RuntimeError("a bug in the tokenizer")
            case TextPrompt("tokenizer panics"):
                raise Panic("a panic in the tokenizer")
            case TextPrompt(text) if text.endswith("blocks"):
                self.entered.set()
                self.release.wait()
        return super().encode_in_pieces(prompt, most_tokens)


class FaultyRunner(ScriptedRunner):
    """A runner that answers with the alphabet. Companions get it without end until they are released."""

    def __init__(self) -> None:
        super().__init__(self._token_of, gated=True, computing=self._fail)
        self.companions_may_end = False
        self.error: BaseException | None = None  # raised by the next step, for all its sequences

    def _token_of(self, sequence: Sequence) -> int | str:
        position = sequence.num_generated
        match prompt_of(sequence):
            case prompt if prompt.startswith("companion") and self.companions_may_end and position:
                return EOS
            case "output raises at once":
                return BrokenId(LookupError("a bug in the output"))
            case "output raises" if position == 2:
                return BrokenId(LookupError("a bug in the output"))
            case "output panics" if position == 2:
                return BrokenId(Panic("a panic in the output"))
            case "bad logits at once":
                return BAD_LOGITS
            case "bad logits" if position == 2:
                return BAD_LOGITS
            case "output of one choice raises" if (position, sequence.index) == (2, 1):
                return BrokenId(LookupError("a bug in the output"))
        return next_letter(sequence)

    def _fail(self, _: Step) -> None:
        if self.error is not None:
            raise self.error


def prompt_of(sequence: Sequence) -> str:
    return TOKENIZER.decode(sequence.token_ids[: sequence.prompt_len])


def raises_at_the_third_token(deliver: Deliver) -> Deliver:
    """Return a receiver of events that passes them on, but raises an error at the third token."""
    num_tokens = 0

    def faulty(events: list[Event]) -> None:
        nonlocal num_tokens
        num_tokens += sum(isinstance(event, TokenChunk) for event in events)
        if num_tokens == 3:
            num_tokens += 1  # only once
            raise RuntimeError("a bug in the receiver of events")
        deliver(events)

    return faulty


def makes_text_unprintable(deliver: Deliver) -> Deliver:
    """Return a receiver of events that passes them on with text that JSON cannot encode."""

    def faulty(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokenChunk):
                event.text = "\ud800"  # half a surrogate pair
        deliver(events)

    return faulty


class FaultyEngine(SimulatedEngine):
    """An engine that delivers events which break the server, and notes which requests the server aborts."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.aborted = self.world.queue()

    def submit(self, request: Request, deliver: Deliver) -> None:
        match request.prompts[0]:
            case TextPrompt("receiver raises"):
                deliver = raises_at_the_third_token(deliver)
            case TextPrompt("rendering raises"):
                deliver = makes_text_unprintable(deliver)
        super().submit(request, deliver)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self.aborted.put(request_id)


@dataclass
class Harness:
    """The server, and every part of it that a request can occupy."""

    place: Place
    app: Starlette
    server: PlacedServer
    engine: FaultyEngine
    runner: FaultyRunner
    tokenizer: FaultyTokenizer
    telemetry: FakeTelemetry
    streams: LoopStreams
    threads: Executor
    tasks_before: set[WorldTask] = field(default_factory=set)
    workers_before: set[WorldWorker[Any]] = field(default_factory=set)
    step: Step | None = None  # the held one
    companions: dict[str, Future[httpx.Response]] = field(default_factory=dict)  # by request id
    records: dict[str, RequestRecord] = field(default_factory=dict)  # by request id

    def ask(self, request_id: str, path: str = "/v1/completions", **fields: Any) -> Future[httpx.Response]:
        client = self.place.plain(self.server.url)
        return self.threads.submit(client.post, path, json=fields, headers={"x-request-id": request_id})

    def connect(self) -> WorldSocket:
        """Return a connection that leaves unread what arrives."""
        connection = self.place.connect(self.server.url)
        connection.stop_reading()
        return connection

    def settle(self) -> None:
        """Let happen what can happen while the step is held."""
        self.place.world.settle()

    def record(self, request_id: str) -> RequestRecord:
        """Wait for the record of the request and return it. Fail if a request has a second one."""
        while request_id not in self.records:
            record = self.telemetry.next_record()
            assert record.request_id not in self.records, "a second record"
            self.records[record.request_id] = record
        return self.records[request_id]

    # -- steps --------------------------------------------------------------------------------------------------------

    def run_steps(self, number: int = 1) -> None:
        """Permit `number` steps, the held one first. The step after them is held."""
        for _ in range(number):
            self.runner.permit()
            self.step = self.runner.started.get()

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Permit steps until the condition holds."""
        self.settle()
        while not condition():
            self.run_steps()
            self.settle()

    def run_until_in_step(self, prompt: str) -> None:
        """Permit steps until the held one computes the prompt."""
        self.run_until(lambda: any(prompt in prompt_of(chunk.sequence) for chunk in self.step.chunks))

    # -- clients ------------------------------------------------------------------------------------------------------

    def start_companion(self, **fields: Any) -> None:
        """Start a companion, a request that decodes until `release`."""
        name = f"companion-{len(self.companions)}"
        self.companions[name] = self.ask(name, prompt=name, max_tokens=10_000, **fields)
        if self.step is None:
            self.step = self.runner.started.get()
        self.run_until_in_step(name)
        self.run_steps(1)  # now the snapshot counts it as running

    def start_companion_in_tokenizer(self) -> None:
        """Start a companion that stays in the tokenizer until `release`, and occupies its only worker."""
        name = f"companion-{len(self.companions)}"
        self.companions[name] = self.ask(name, prompt=f"{name} blocks", max_tokens=10_000)
        self.tokenizer.entered.wait()

    def disconnect(self, client: WorldSocket) -> None:
        """Close the connection, and wait until the server has noticed."""
        client.close()
        self.wait_for_abort()

    def wait_for_abort(self) -> None:
        """Wait until the server has aborted one request."""
        self.engine.aborted.get()

    def is_writing_paused(self) -> bool:
        return any(connection.flow.write_paused for connection in self.server.server_state.connections)

    def release(self) -> None:
        """Stop holding steps and prompts, and let the companions finish."""
        self.tokenizer.release.set()
        self.runner.companions_may_end = True
        self.runner.permit(10_000)

    # -- what must hold for companions, and afterwards ----------------------------------------------------------------

    def check_no_side_effects(self) -> None:
        """Check that the companions still run and get the same answers as alone, and that nothing is left."""
        assert not any(companion.done() for companion in self.companions.values())
        self.release()
        for name, companion in self.companions.items():
            texts = texts_of(companion.result())
            assert all(text and text == alphabet(len(text)) for text in texts)
            record = self.record(name)
            assert (record.outcome, record.finish_reasons) == (Outcome.FINISHED, ("stop",) * len(texts))
            assert record.completion_tokens == sum(len(text) + 1 for text in texts)
        self.settle()
        now = self.engine.snapshot()
        assert (now.blocks_used, now.num_running, now.num_waiting, now.num_tokenizing) == (0, 0, 0, 0)
        assert len(self.streams) == 0
        assert self.tasks() <= self.tasks_before
        assert self.workers() <= self.workers_before

    def tasks(self) -> set[WorldTask]:
        return set(self.server.process.tasks)

    def workers(self) -> set[WorldWorker[Any]]:
        return {worker for worker in self.place.world.workers if worker.is_alive}


@contextmanager
def running_harness(place: Place) -> Iterator[Harness]:
    """Run the server with two companions, one of them a stream.

    Four sequences run at once, with 32 tokens a step, and one prompt is tokenized at a time. The end of the block
    checks that every request had exactly one record.
    """
    runner = FaultyRunner()
    tokenizer = FaultyTokenizer()
    telemetry = FakeTelemetry(place.world)
    options = {"kv_blocks": 6000, "max_running": 4, "max_step_tokens": 32, "tokenize_workers": 1}
    engine: FaultyEngine = make_engine(runner, tokenizer=tokenizer, kind=FaultyEngine, runtime=place.world, **options)
    app = create_app(Config("demo"), engine, telemetry, runtime=place.world)
    callbacks = {"on_drain": engine.drain, "failure": lambda: engine.failure}
    with (
        PlacedServer(place, app, ServerOptions(drain_timeout_seconds=5), **callbacks) as server,
        place.threads() as threads,
    ):
        streams = app.state.serving.streams
        harness = Harness(place, app, server, engine, runner, tokenizer, telemetry, streams, threads)
        harness.tasks_before = harness.tasks()
        harness.workers_before = harness.workers()
        try:
            harness.start_companion(stream=True)
            harness.start_companion()
            yield harness
        finally:
            harness.release()  # so that a test that fails half-way does not hang
    assert telemetry.records.empty()


def alphabet(length: int) -> str:
    """Return the text that every request gets."""
    return "".join(islice(cycle(ascii_lowercase), length))


def events_of(answer: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line]


def texts_of(answer: httpx.Response) -> list[str]:
    """Return the text of each choice of a whole answer or of a complete stream."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        return [choice["text"] for choice in answer.json()["choices"]]
    *chunks, done = events_of(answer)
    assert done == "[DONE]"
    return texts_in(chunks)


def texts_in(chunks: list[str]) -> list[str]:
    """Return the text of each choice in these events of a stream, on either route."""
    texts: defaultdict[int, str] = defaultdict(str)
    for choice in (choice for chunk in chunks for choice in json.loads(chunk)["choices"]):
        texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return [texts[index] for index in sorted(texts)]
