"""Overlap: a step is scheduled and launched while the step before is in flight.

Many tests of other files use the fixture `overlap`, which runs them with overlap and without.
"""

from collections.abc import Callable

import pytest

from oaiserve.engine.request import Aborted, Failed, Finished, Terminal, TokenChunk
from oaiserve.engine.request import Event as RequestEvent
from oaiserve.engine.sequences.blocks import hash_block
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Masks, Step, StepResult
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.step_record import StepRecord
from tests.engine.answers import collect
from tests.engine.doubles import (
    EOS,
    Clock,
    Inbox,
    Launched,
    ScriptedRunner,
    letter_id,
    make_engine,
    next_letter,
    request,
    stepping,
    third_step_fails,
)
from tests.engine.memory import launched, make, sequence


def test_a_block_is_published_when_all_its_ids_are_known() -> None:
    scheduler = make()
    one = sequence("a", 3, max_tokens=8)
    scheduler.add(one)
    prefill = launched(scheduler)
    decode = launched(scheduler)  # computes the fourth token, whose id is on its way
    assert scheduler.pool.num_cached == 0
    scheduler.commit(prefill.chunks[0], [7])
    assert scheduler.pool.num_cached == 0  # The answer may go on.
    scheduler.commit(decode.chunks[0], [8])
    assert scheduler.pool.find(hash_block(None, [*one.token_ids[:3], 7])) == one.blocks[0]


class TimedDevice(ScriptedRunner):
    """A device that computes one step after the other while the host works. Each takes `step_seconds` of the clock."""

    def __init__(self, clock: Clock, step_seconds: float, token_of: Callable[[Sequence], int] = next_letter) -> None:
        super().__init__(token_of, is_asynchronous=True)
        self._clock = clock
        self._step_ns = int(step_seconds * 1e9)
        self._ended_ns = 0
        self._times_ns: dict[Launched, tuple[int, int]] = {}  # the gap before a step, and its end
        self.has_clock = False
        self.num_pending: list[list[int]] = []  # at the launch of each step, of each sequence in it
        self.waiting: list[list[Sequence]] = []  # the sequences of each step whose draw waits
        self.calls: list[tuple[str, int]] = []  # with the number of the step

    def launch(self, step: Step) -> Launched:
        self.calls.append(("launch", len(self.launched)))
        self.num_pending.append([chunk.sequence.num_pending for chunk in step.chunks])
        self.waiting.append([c.sequence for c in step.chunks if c.sequence.needs_ids and c.sequence.num_pending])
        began_ns = max(self._clock.now_ns, self._ended_ns)
        gap_ns = began_ns - self._ended_ns
        self._ended_ns = began_ns + self._step_ns
        launched = super().launch(step)
        self._times_ns[launched] = gap_ns, self._ended_ns
        return launched

    def draw(self, launched: Launched, masks: Masks | None) -> None:
        super().draw(launched, masks)
        number = self.launched.index(launched.step)
        self.calls.append(("draw", number))
        assert all(one.num_pending <= 1 for one in self.waiting[number]), "an id before its draw is not known"

    def collect(self, launched: Launched) -> StepResult:
        self.calls.append(("collect", self.launched.index(launched.step)))
        gap_ns, ended_ns = self._times_ns.pop(launched)
        self._clock.now_ns = max(self._clock.now_ns, ended_ns)
        results = super().collect(launched).chunks
        return StepResult(results, self._step_ns, gap_ns) if self.has_clock else StepResult(results)


def chunks_of(inbox: Inbox, request_id: str = "r") -> list[TokenChunk]:
    events = (event for events in inbox.hand_overs for event in events)
    return [event for event in events if isinstance(event, TokenChunk) and event.request_id == request_id]


def timed(
    host_seconds: float, max_tokens: int, *, has_clock: bool = False, overlap: bool = True
) -> tuple[TimedDevice, Terminal, list[StepRecord], EngineNumbers]:
    """Run a request on a device with steps of 10 ms, whose hand-overs take the host `host_seconds`."""
    clock = Clock()
    inbox = Inbox(lambda _: clock.move(host_seconds))
    device = TimedDevice(clock, step_seconds=0.010)
    device.has_clock = has_clock
    with make_engine(device, clock_ns=clock, tokenize_workers=0, overlap=overlap) as engine:
        ended = collect(engine, [request(max_tokens=max_tokens)], inbox).ended["r"]
        return device, ended, engine.take_steps(), engine.snapshot()


@pytest.mark.parametrize("overlap", [True, False])
def test_the_host_works_while_the_device_does_which_waits_for_it_without_overlap(overlap: bool) -> None:
    device, ended, steps, _ = timed(0.004, 5, overlap=overlap)
    gap_ns = 0 if overlap else 4_000_000
    assert device.num_pending == [[0], *[[int(overlap)]] * 4]
    assert [(step.duration_ns, step.idle_ns) for step in steps] == [(10_000_000, 0), *[(10_000_000, gap_ns)] * 4]
    assert list(ended.account.inter_token_ns) == [10_000_000 + gap_ns] * 4
    times = ended.times
    assert times.first_token == times.scheduled + 10_000_000
    assert times.last_token == times.first_token + 4 * (10_000_000 + gap_ns)


def test_a_device_with_a_clock_reports_how_long_it_waited_for_the_host() -> None:
    _, ended, steps, snapshot = timed(0.025, 5, has_clock=True)
    assert [step.duration_ns for step in steps] == [10_000_000] * 5
    # The first two were launched one after the other. Each later one had to wait until the host was done with the step
    # before last, which it began when that had ended.
    assert [step.idle_ns for step in steps] == [0, 0, 15_000_000, 15_000_000, 15_000_000]
    assert (snapshot.model_ns, snapshot.idle_with_work_ns) == (50_000_000, 45_000_000)
    assert ended.account.model_ns == 50_000_000


def test_time_without_requests_is_not_a_gap_of_the_device() -> None:
    clock = Clock()
    inbox = Inbox()
    device = TimedDevice(clock, step_seconds=0.010)
    device.has_clock = True
    with make_engine(device, clock_ns=clock, tokenize_workers=0) as engine:
        for name in ("a", "b"):
            clock.move(60)
            engine.submit(request(name, max_tokens=2), inbox)
            inbox.wait_terminal(name)
        assert [step.idle_ns for step in engine.take_steps()] == [0] * 4


@pytest.mark.parametrize("n", [1, 3])
def test_an_answer_of_full_length_takes_as_many_steps_as_without_overlap(n: int) -> None:
    steps = []
    for overlap in (False, True):
        device = TimedDevice(Clock(), 0.01)
        with make_engine(device, overlap=overlap, tokenize_workers=0) as engine:
            list(engine.stream(request(prompt_len=11, max_tokens=4, n=n)))
        steps.append(device.steps)
    assert steps[0] == steps[1]


@pytest.mark.parametrize("edits", [{}, {"repetition_penalty": 1.1}], ids=["plain", "edited"])
def test_an_end_that_only_the_token_shows_costs_one_step_and_leaks_nothing(edits: dict[str, float]) -> None:
    events = []
    for overlap in (False, True):
        device = TimedDevice(Clock(), 0.01, lambda s: EOS if s.num_generated == 2 else letter_id("x"))
        with make_engine(device, overlap=overlap, tokenize_workers=0) as engine:
            one_request = request(max_tokens=50, logprobs=1, **edits)
            events.append(list(engine.stream(one_request)))
            for _ in range(3 + overlap):
                device.started.get()
            snapshot = engine.snapshot()
        assert (len(device.steps), events[-1][-1].account.num_steps) == (3 + overlap, 3)
        assert (snapshot.blocks_used, snapshot.num_running, snapshot.num_waiting) == (0, 0, 0)
    assert [event for event in events[0] if isinstance(event, TokenChunk)] == [
        event for event in events[1] if isinstance(event, TokenChunk)
    ]
    assert events[0][-1].usage == events[1][-1].usage


@pytest.mark.parametrize(
    ("params", "waits"),
    [
        *(({name: 1.1}, True) for name in ("repetition_penalty", "frequency_penalty", "presence_penalty")),
        ({"bad_words": ("ab",)}, True),
        *(({name: value}, False) for name, value in (("min_tokens", 3), ("seed", 3), ("allowed_token_ids", (5, 6)))),
        ({"logit_bias": {5: 1.0}}, False),
    ],
)
def test_a_draw_that_is_edited_by_ids_waits_for_them_and_its_forward_does_not(
    params: dict[str, object], waits: bool
) -> None:
    device = TimedDevice(Clock(), 0.01)
    with make_engine(device, tokenize_workers=0) as engine:
        list(engine.stream(request(max_tokens=4, **params)))
    assert device.num_pending == [[0], [1], [1], [1]]
    assert [len(sequences) for sequences in device.waiting] == [0, *[int(waits)] * 3]


def by_ids(sequence: Sequence) -> int:
    return letter_id(chr(ord("a") + sum(sequence.token_ids) % 26))


def batch_of_8(*, penalty: bool, overlap: bool = True) -> tuple[TimedDevice, list[StepRecord], list[str]]:
    """Run 8 requests that enter one step together. Each hand-over takes the host 4 ms, each step the device 10 ms."""
    clock = Clock()
    device = TimedDevice(clock, 0.010, by_ids)
    inbox = Inbox(lambda _: clock.move(0.004))
    with make_engine(device, clock_ns=clock, tokenize_workers=0, overlap=overlap) as engine:

        def submit_all(events: list[RequestEvent]) -> None:
            if isinstance(events[-1], Finished):
                for number in range(8):
                    edits = {"repetition_penalty": 1.1} if penalty and number == 5 else {}
                    one_request = request(f"{number}", prompt_len=1 + number % 2, max_tokens=12, **edits)
                    engine.submit(one_request, inbox)

        inbox.live_in(engine.world)
        engine.submit(request("first", max_tokens=1), submit_all)
        inbox.wait_terminal(*(f"{number}" for number in range(8)))
        steps = engine.take_steps()
    texts = ["".join(chunk.text for chunk in chunks_of(inbox, f"{number}")) for number in range(8)]
    return device, steps, texts


def test_one_row_that_waits_for_ids_leaves_the_overlap_of_the_others_as_it_is() -> None:
    device, steps, texts = batch_of_8(penalty=True)
    without, steps_without, texts_without = batch_of_8(penalty=False)
    assert [len(step.chunks) for step in device.launched] == [1, *[8] * 12]
    # The first of the two is the prompt's, whose ids are all known.
    assert [len(sequences) for sequences in device.waiting] == [0, 0, *[1] * 11]
    assert device.num_pending == without.num_pending == [[0], [0] * 8, *[[1] * 8] * 11]
    per_step = [[("launch", n + 1), ("collect", n), ("draw", n + 1)] for n in range(1, 12)]
    in_order = [("launch", 1), ("draw", 1), *(call for calls in per_step for call in calls), ("collect", 12)]
    assert device.calls[3:] == without.calls[3:] == in_order
    times, times_without = (
        [(step.started_ns, step.duration_ns, step.idle_ns) for step in each] for each in (steps, steps_without)
    )
    assert times == times_without
    assert [(duration_ns, idle_ns) for _, duration_ns, idle_ns in times[1:]] == [(10_000_000, 0)] * 12
    in_turn, _, texts_in_turn = batch_of_8(penalty=True, overlap=False)
    assert in_turn.num_pending == [[0], *[[0] * 8] * 12]
    assert texts == texts_without == texts_in_turn
    assert len(set(texts)) == 2


def test_only_a_draw_that_has_waited_is_a_part_of_its_own_in_the_time_of_the_host(parts_entered: list[str]) -> None:
    names = []
    for edits in ({}, {"repetition_penalty": 1.1}):
        parts_entered.clear()
        with make_engine(TimedDevice(Clock(), 0.01), tokenize_workers=0) as engine:
            list(engine.stream(request(max_tokens=3, **edits)))
        names.append([name.split()[0] for name in parts_entered if name.startswith(("launch", "wait"))])
    assert names[0] == ["launch", "launch", "wait", "launch", "wait", "wait"]
    assert names[1] == ["launch", "launch", "wait", "launch", "launch", "wait", "launch", "wait"]


def held(token_of: Callable[[Sequence], int] = next_letter) -> ScriptedRunner:
    """A runner whose steps wait for `permit()` when they are collected."""
    return ScriptedRunner(token_of, is_asynchronous=True, gated=True)


def test_a_request_that_is_aborted_during_its_first_step_was_in_no_step() -> None:
    first = request("first", max_tokens=9)
    gone = request("gone", max_tokens=9)
    with stepping(first, runner=held(), tokenize_workers=0) as (engine, runner, inbox):
        assert engine.snapshot().num_running == 1  # Two steps are under way, and the host waits for the first.
        engine.submit(gone, inbox)
        runner.permit(1)
        runner.started.get()  # the third has been launched
        assert {chunk.sequence.request_id for chunk in runner.launched[2].chunks} == {"first", "gone"}
        engine.abort("gone")
        runner.permit(100)
        ended = inbox.wait_terminal("gone", "first")
    assert isinstance(ended["gone"], Aborted)
    account = ended["gone"].account
    times = ended["gone"].times
    assert (account.first_step, account.num_steps, account.model_ns) == (None, 0, 0)
    assert sum(account.waits_ns.values()) == times.scheduled - times.tokenized
    assert (ended["first"].account.first_step, ended["first"].account.num_steps) == (0, 9)


def test_a_request_gets_nothing_of_an_ended_one_with_its_id_whose_step_is_under_way() -> None:
    """Request ids are unique among open requests only."""
    runner = held(lambda s: EOS if s.params.max_tokens == 9 else letter_id("b"))
    inbox = Inbox()
    with make_engine(runner, tokenize_workers=0) as engine:
        engine.submit(request("r", max_tokens=9), inbox)
        runner.permit(1)
        assert isinstance(inbox.wait_terminal("r")["r"], Finished)
        inbox.hand_overs.clear()
        engine.submit(request("r", max_tokens=2), inbox)
        runner.permit(100)
        finished = inbox.wait_terminal("r")["r"]
    assert "".join(chunk.text for chunk in chunks_of(inbox)) == "bb"
    assert finished.usage.completion_tokens == 2


def test_a_launch_that_fails_with_a_step_under_way_ends_each_request_once() -> None:
    runner = ScriptedRunner(is_asynchronous=True, launching=third_step_fails())
    with make_engine(runner, tokenize_workers=0) as engine:
        failed = collect(engine, [request(max_tokens=9)]).ended["r"]
        assert isinstance(failed, Failed)
        assert failed.usage.completion_tokens == 1  # what had come back by then
        engine.world.wait_for(lambda: engine.failure is not None)
        assert isinstance(engine.failure, RuntimeError)
