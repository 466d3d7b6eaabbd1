"""A device that has no memory for some steps: answers are those of one that has, and nobody else is concerned."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest

from oaiserve.engine.request import (
    TERMINAL,
    Aborted,
    Event,
    Failed,
    Finished,
    PromptDone,
    Request,
    SamplingParams,
    TokenChunk,
    TokenPrompt,
)
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import ChunkResult, Logprobs, OutOfMemory, Step
from oaiserve.record import EngineAccount
from oaiserve.times import RequestTimes
from tests.engine.doubles import (
    EOS,
    LETTERS,
    TIMEOUT_SECONDS,
    Clock,
    Inbox,
    Leaver,
    ScriptedRunner,
    make_engine,
    request,
)

pytestmark = pytest.mark.usefixtures("overlap")

STAGES = ("before", "copied", "written")  # how far a step gets that there is no memory for
Slot = tuple[int, int]


class Device(ScriptedRunner):
    """Steps are computed by their launch, one after the other; what they draw is told when it is collected. A slot of
    the cache holds all ids up to its token. `has_room` says which steps fit."""

    def __init__(self, has_room: Callable[[Step], bool] = lambda _: True, *, seed: int = 0) -> None:
        super().__init__()
        self.has_room = has_room
        self.tried: list[tuple[int, bool]] = []  # tokens of each launch, and whether they fitted
        self.num_copied = 0
        self._random = random.Random(seed)
        self._size = 4
        self._slots: dict[Slot, tuple[int, ...]] = {}
        self._drawn: dict[Sequence, dict[int, int]] = {}  # ids by position

    def launch(self, step: Step) -> Callable[[], list[ChunkResult]]:
        fits = self.has_room(step)
        self.tried.append((step.num_tokens, fits))
        stage = None if fits else self._random.choice(STAGES)
        if stage != "before":
            self._copy(step)
        if stage == "written":
            for chunk in step.chunks:
                written = self._slots_of(chunk.sequence, chunk.start, chunk.end)
                self._slots |= dict.fromkeys(written, (-1,))  # some layers have it, others do not
        if stage is not None:
            raise OutOfMemory("2 GiB were asked for")
        results = self._compute(step)
        return lambda: results

    def _copy(self, step: Step) -> None:
        content = [[self._slots.get((source, i), ()) for i in range(self._size)] for source, _ in step.copies]
        for (_, target), tokens in zip(step.copies, content, strict=True):
            self._slots |= {(target, i): ids for i, ids in enumerate(tokens)}
        self.num_copied += len(step.copies)
        step.copies.clear()

    def _compute(self, step: Step) -> list[ChunkResult]:
        ids_of = {chunk.sequence: self._ids(chunk.sequence) for chunk in step.chunks}
        for chunk in step.chunks:
            ids = ids_of[chunk.sequence]
            assert chunk.end <= len(ids)
            for position, slot in enumerate(self._slots_of(chunk.sequence, chunk.start, chunk.end), chunk.start):
                self._slots[slot] = tuple(ids[: position + 1])
        results = []
        for chunk in step.chunks:
            sequence, ids = chunk.sequence, ids_of[chunk.sequence]
            read = [self._slots[slot] for slot in self._slots_of(sequence, 0, chunk.end)]
            assert read == [tuple(ids[: position + 1]) for position in range(chunk.end)], "it attends to its own tokens"
            result = ChunkResult()
            if chunk.samples:
                assert chunk.end == len(ids)
                letter = hash(tuple(ids)) % 29  # of integers: the same in every process
                result.token_id = LETTERS[letter] if letter < len(LETTERS) else EOS
                self._drawn.setdefault(sequence, {})[len(ids)] = result.token_id
                if sequence.params.logprobs is not None:
                    result.logprobs = Logprobs(result.token_id, -float(len(ids)), [], [])
            if sequence.wants_prompt_logprobs:
                last = min(chunk.end, sequence.prompt_len - 1)
                result.prompt_logprobs = [Logprobs(ids[i + 1], -float(i + 1), [], []) for i in range(chunk.start, last)]
            results.append(result)
        return results

    def _ids(self, sequence: Sequence) -> list[int]:
        """With those that steps before have drawn and the engine does not know yet."""
        ids, drawn = sequence.token_ids.copy(), self._drawn.get(sequence, {})
        while len(ids) < sequence.num_tokens:
            ids.append(drawn[len(ids)])
        return ids

    def _slots_of(self, sequence: Sequence, start: int, end: int) -> list[Slot]:
        return [(sequence.blocks[p // self._size], p % self._size) for p in range(start, end)]


class Answers(NamedTuple):
    text: dict[tuple[str, int], str]  # by request and choice
    token_ids: dict[tuple[str, int], list[int]]
    logprobs: dict[tuple[str, int], list[float]]
    reasons: dict[tuple[str, int], tuple[object, ...]]
    prompt_logprobs: dict[str, list[float]]
    ended: dict[str, Event]

    def of(self, request_id: str) -> list[object]:
        """All that a client sees of it."""
        found: list[object] = [
            {key: value for key, value in by_choice.items() if key[0] == request_id}
            for by_choice in (self.text, self.token_ids, self.logprobs, self.reasons)
        ]
        event = self.ended[request_id]
        assert isinstance(event, Finished)
        return [*found, self.prompt_logprobs.get(request_id), event.usage.prompt_tokens, event.usage.completion_tokens]


def some_requests(rng: random.Random, number: int = 40) -> list[Request]:
    """Choices, common beginnings, ends of every kind, edits that need the ids before, logprobs."""
    requests = []
    for i in range(number):
        prompt = [*range(rng.randrange(3) * 6), *(rng.randrange(50) for _ in range(rng.randint(1, 30)))]
        asked = rng.choice([*[{}] * 4, {"logprobs": 0}, {"prompt_logprobs": 0}, {"repetition_penalty": 1.2}])
        ends = rng.choice([*[{}] * 3, {"stop": ("a", "bc", "xyz")}, {"stop_token_ids": (LETTERS[3], LETTERS[4])}])
        params = SamplingParams(
            max_tokens=rng.choice([0, 1, 2, 8, 16]),
            n=rng.choice([1, 1, 2, 3]),
            **asked,
            **ends,  # type: ignore[arg-type]
        )
        requests.append(Request(f"r{i}", (TokenPrompt(prompt),), params))
    return requests


def answers(
    device: Device, requests: list[Request], leaves_after: dict[str, int] | None = None, **options: int
) -> Answers:
    """Nothing is left behind, and all that ended has ended once."""
    engine = make_engine(device, **{"max_running": 8, "max_step_tokens": 48, "tokenize_workers": 0, **options})
    inbox = Leaver(engine, leaves_after or {})
    requests = [replace(asked, times=RequestTimes(), account=EngineAccount()) for asked in requests]
    with engine:
        for asked in requests:
            engine.submit(asked, inbox)
        ended = inbox.wait_terminal(*(asked.request_id for asked in requests))
        num_steps = engine.snapshot().num_out_of_memory
    assert engine.failure is None
    assert num_steps <= sum(not fits for _, fits in device.tried)
    scheduler = engine._loop._scheduler
    scheduler.check_integrity()
    assert (scheduler.pool.num_used, len(scheduler.running), scheduler.num_waiting, scheduler.num_parked) == (0,) * 4
    found = Answers({}, {}, {}, {}, {}, ended)
    for event in (event for events in inbox.hand_overs for event in events):
        if isinstance(event, PromptDone) and event.logprobs:
            found.prompt_logprobs[event.request_id] = [row.logprob for row in event.logprobs[1:]]
        elif isinstance(event, TokenChunk):
            key = (event.request_id, event.index)
            found.text[key] = found.text.get(key, "") + event.text
            found.token_ids.setdefault(key, []).extend(event.token_ids)
            found.logprobs.setdefault(key, []).extend(row.logprob for row in event.logprobs or [])
            found.reasons[key] = (event.finish_reason, event.stop_reason)
    return found


def changing(rng: random.Random, rooms: list[int]) -> Callable[[Step], bool]:
    """One of these, in tokens, at each launch."""
    return lambda step: step.num_tokens <= rng.choice(rooms)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kv_blocks", [400, 30], ids=["much cache", "little cache"])
def test_answers_are_those_of_a_device_with_memory(seed: int, kv_blocks: int) -> None:
    rng = random.Random(seed)
    requests = some_requests(rng)
    expected = answers(Device(), requests, kv_blocks=400, max_model_len=80)
    device = Device(changing(rng, [1, 2, 8, 24, 48]), seed=seed)
    found = answers(device, requests, kv_blocks=kv_blocks, max_model_len=80)
    assert sum(not fits for _, fits in device.tried) > 20
    assert device.num_copied > 0
    for asked in requests:
        assert found.of(asked.request_id) == expected.of(asked.request_id)


@pytest.mark.parametrize("seed", range(6))
def test_whoever_fails_or_leaves_meanwhile_costs_nobody_else_anything(seed: int) -> None:
    """At times not one token fits."""
    rng = random.Random(seed)
    requests = some_requests(rng, 100)
    expected = answers(Device(), requests, kv_blocks=400, max_model_len=80)
    leaves = {asked.request_id: rng.randint(1, 6) for asked in requests if rng.random() < 0.3}
    device = Device(changing(rng, [0, 0, 2, 8, 48]), seed=seed)
    found = answers(device, requests, leaves, kv_blocks=30, max_model_len=80)
    kinds = [type(event) for event in found.ended.values()]
    assert {Finished, Failed, Aborted} == set(kinds)
    for asked in requests:
        event = found.ended[asked.request_id]
        if isinstance(event, Finished):
            assert found.of(asked.request_id) == expected.of(asked.request_id)
        elif isinstance(event, Failed):
            assert (event.error.status, event.error.code) == (503, "service_unavailable")
        for key, token_ids in found.token_ids.items():
            assert token_ids == expected.token_ids[key][: len(token_ids)]


def test_what_was_not_computed_is_not_in_the_prefix_cache() -> None:
    device, inbox = Device(), Inbox()
    with make_engine(device, tokenize_workers=0) as engine:
        device.has_room = lambda step: all(chunk.end <= 8 for chunk in step.chunks)
        failed = list(engine.stream(request("a", prompt_len=13)))[-1]
        device.has_room = lambda step: True
        *_, finished = list(engine.stream(request("b", prompt_len=13)))
        engine.submit(request("c", prompt_len=13), inbox)
        cached = inbox.wait_terminal("c")["c"]
    assert isinstance(failed, Failed)
    assert str(failed.error) == "The device has no memory left to go on with this request; try again later."
    assert (finished.usage.cached_tokens, cached.usage.cached_tokens) == (0, 12)


def test_all_choices_of_a_request_that_does_not_fit_leave_and_its_neighbour_goes_on() -> None:
    device, inbox = Device(), Inbox()
    device.has_room = lambda step: (
        not any(chunk.sequence.request_id == "large" and chunk.sequence.num_generated for chunk in step.chunks)
    )
    with make_engine(device, tokenize_workers=0) as engine:
        engine.submit(request("large", max_tokens=9, n=3, ignore_eos=True), inbox)
        engine.submit(request("small", max_tokens=9, ignore_eos=True), inbox)
        ended = inbox.wait_terminal("large", "small")
        assert engine.snapshot().blocks_used == 0
    assert isinstance(ended["large"], Failed)
    assert ended["small"].usage.completion_tokens == 9


def test_steps_that_follow_are_smaller_for_a_while_and_nobody_starves(caplog: pytest.LogCaptureFixture) -> None:
    clock, inbox = Clock(), Inbox()
    device = Device(lambda step: step.num_tokens <= 40)

    def deliver(events: list[Event]) -> None:
        clock.move(1)
        inbox(events)

    caplog.set_level(logging.WARNING, "oaiserve")
    names = [f"r{i}" for i in range(12)]
    options = {"max_running": 12, "max_step_tokens": 64, "kv_blocks": 400, "prefix_cache": False}
    with make_engine(device, clock_ns=clock, tokenize_workers=0, **options) as engine:
        for name in names:
            engine.submit(request(name, prompt_len=60, max_tokens=30, ignore_eos=True), deliver)
        ended = inbox.wait_terminal(*names)
        snapshot = engine.snapshot()
        steps = engine.take_steps()
    assert all(event.usage.completion_tokens == 30 for event in ended.values())
    sizes = [num_tokens for num_tokens, _ in device.tried]
    assert sizes[:3] == [64, 30, 30]
    failed = [place for place, (_, fits) in enumerate(device.tried) if not fits]
    assert snapshot.num_out_of_memory == len(failed) > 1
    assert sum(step.num_tokens > 40 for step in steps) == len(failed), "what follows is not scheduled larger"
    for first, second in pairwise(failed):
        assert second - first > 9, "a step a second: not tried again at once"
    assert len(caplog.messages) < len(failed), "not one line for each"
    assert "no memory for a step of 6" in caplog.messages[0]
    assert "2 GiB were asked for" in caplog.messages[0]
    assert "--gpu-memory-utilization" in caplog.messages[0]


def test_decodes_that_are_known_not_to_fit_together_are_not_tried_together() -> None:
    device, inbox = Device(), Inbox()
    device.has_room = lambda step: len(step.chunks) <= 20
    names = [f"r{i}" for i in range(40)]
    with make_engine(
        device, clock_ns=Clock(), tokenize_workers=0, max_running=40, max_step_tokens=80, kv_blocks=400
    ) as engine:
        for name in names:
            engine.submit(request(name, prompt_len=2, max_tokens=20, ignore_eos=True), inbox)
        ended = inbox.wait_terminal(*names)
    assert all(event.usage.completion_tokens == 20 for event in ended.values())
    assert sum(not fits for _, fits in device.tried) < 6


def test_an_end_in_the_step_before_is_no_part_of_the_step_that_does_not_fit() -> None:
    """With overlap, its chunk had been scheduled."""
    device, inbox = Device(), Inbox()
    stops = (*LETTERS, EOS)  # its first token is its last
    with make_engine(device, tokenize_workers=0) as engine:
        device.has_room = lambda step: all(chunk.num_tokens > 1 for chunk in step.chunks) or len(step.chunks) == 1
        engine.submit(request("short", max_tokens=9, stop_token_ids=stops, ignore_eos=True), inbox)
        engine.submit(request("long", max_tokens=5, ignore_eos=True), inbox)
        ended = inbox.wait_terminal("short", "long")
        assert engine.snapshot().blocks_used == 0
    assert (ended["short"].usage.completion_tokens, ended["long"].usage.completion_tokens) == (1, 5)


class Breaks(Device):
    """On the second launch, for another reason."""

    def launch(self, step: Step) -> Callable[[], list[ChunkResult]]:
        if len(self.tried) == 1:
            raise RuntimeError("the device is gone")
        return super().launch(step)


def test_another_error_in_a_part_is_the_end_as_always() -> None:
    device, inbox = Breaks(lambda step: step.num_tokens <= 2), Inbox()
    engine = make_engine(device, tokenize_workers=0)
    engine.start()
    engine.submit(request("a"), inbox)
    engine.submit(request("b"), inbox)
    ended = inbox.wait_terminal("a", "b")
    assert [event.error.status for event in ended.values() if isinstance(event, Failed)] == [500, 500]
    assert engine._loop.join(TIMEOUT_SECONDS)
    assert isinstance(engine.failure, RuntimeError)
    engine.stop()
    assert all(isinstance(event, TERMINAL) for event in ended.values())


def test_a_step_in_parts_is_one_step_for_all_who_count() -> None:
    device = Device(lambda step: step.num_tokens <= 3)
    with make_engine(device, tokenize_workers=0) as engine:
        asked = request(prompt_len=11, max_tokens=3, ignore_eos=True)
        list(engine.stream(asked))
        steps = engine.take_steps()
    assert [step.num_tokens for step in steps] == [11, 1, 1]
    assert asked.account.num_steps == 3
    assert asked.account.model_ns == sum(step.duration_ns for step in steps)
