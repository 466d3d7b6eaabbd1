"""Tests that the demo model answers 32 requests in common steps exactly as it answers a third of them alone."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.runner import Launched, ModelRunner
from oaiserve.engine.request import Finished, Request, SamplingParams, TextPrompt, TokenChunk
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.load import load_model
from oaiserve.engine.step import Masks, Step, StepResult
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.files import demo
from tests.engine.doubles import Inbox
from tests.engine.model.runners import eager_runner

STREAMS = 32
NUM_BLOCKS, BLOCK_SIZE = 256, 16
ANIMALS = ("fox", "whale", "small green frog", "very old horse that lived on a hill by the sea")
OPENINGS = (
    "Once upon a time a {}",
    "The {}",
    "Question: what does a {} eat?\nAnswer:",
    "def {}(",
    "My favourite animal is the {}, because",
    "{} {} {}",
    "A short poem about the {}:\n\n",
    "1, 2, 3, {}",
)
PROMPTS = [opening.replace("{}", animal) for animal in ANIMALS for opening in OPENINGS]


class RecordingRunner:
    """A runner that records the number of sequences of each step, and holds the first step until `open` is set."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.is_exact = runner.is_exact
        self.is_asynchronous = runner.is_asynchronous
        self.kv_version = runner.kv_version
        self.held, self.open = Event(), Event()
        self.sequences_per_step: list[int] = []

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self._runner.copy_blocks(copies)

    def launch(self, step: Step) -> Launched:
        self.held.set()
        assert self.open.wait(60)
        self.sequences_per_step.append(len(step.chunks))
        return self._runner.launch(step)

    def draw(self, launched: Launched, masks: Masks | None) -> None:
        self._runner.draw(launched, masks)

    def collect(self, launched: Launched) -> StepResult:
        return self._runner.collect(launched)


@pytest.fixture(scope="module")
def runner() -> RecordingRunner:
    loaded = load_model(demo.resolve(), device="cpu", dtype="float32")
    return RecordingRunner(eager_runner(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))


@pytest.fixture(scope="module")
def engine(runner: RecordingRunner) -> Iterator[Engine]:
    tokenizer = Tokenizer.from_pretrained(demo.resolve())
    with Engine(
        ServedModel(
            tokenizer=tokenizer,
            runner=runner,
            num_blocks=NUM_BLOCKS,
            max_model_len=NUM_BLOCKS * BLOCK_SIZE,
            vocab_size=tokenizer.vocab_size,
        ),
        EngineOptions(tokenize_workers=0, block_size=BLOCK_SIZE),
    ) as engine:
        yield engine


def greedy(index: int) -> Request:
    """Make a greedy request for 5 to 10 tokens, so that sequences leave the batch one after the other."""
    params = SamplingParams(temperature=0.0, max_tokens=5 + index % 6, ignore_eos=True)
    return Request(f"r{index}", (TextPrompt(PROMPTS[index]),), params)


def test_32_requests_in_a_batch_get_the_same_text_as_alone(engine: Engine, runner: RecordingRunner) -> None:
    inbox = Inbox()
    engine.submit(greedy(0), inbox)
    assert runner.held.wait(60)  # so that all other requests enter the next step together
    for index in range(1, STREAMS):
        engine.submit(greedy(index), inbox)
    runner.open.set()
    ended = inbox.wait_terminal(*(f"r{index}" for index in range(STREAMS)))
    assert all(isinstance(event, Finished) for event in ended.values())
    steps = runner.sequences_per_step.copy()
    # All requests take part from the second step on, until the first of them ends.
    assert steps[:4] == [1, STREAMS, STREAMS, STREAMS]
    assert len(steps) == 11  # not one more than the longest answer takes

    batched = [""] * STREAMS
    for event in (event for events in inbox.hand_overs for event in events):
        if isinstance(event, TokenChunk):
            batched[int(event.request_id[1:])] += event.text
    alone = [
        "".join(event.text for event in engine.stream(greedy(index)) if isinstance(event, TokenChunk))
        for index in range(0, STREAMS, 3)
    ]
    assert set(runner.sequences_per_step[len(steps) :]) == {1}
    assert batched[::3] == alone
    assert len(set(batched)) > STREAMS / 2  # the prompts matter
