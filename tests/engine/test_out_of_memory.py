"""Steps that the device has no memory for: answers stay the same, and only requests that never fit fail."""

import logging
import random
from itertools import pairwise

import pytest

from oaiserve.engine.request import Aborted, Failed, Finished, Request
from oaiserve.engine.sequences.step import Step
from tests.engine.answers import collect_together
from tests.engine.device import Device, answers, check_answers, some_requests
from tests.engine.doubles import Clock, Inbox, device_is_gone, make_engine, request

pytestmark = pytest.mark.usefixtures("overlap")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("kv_blocks", "rooms", "share_leaving"),
    [(400, [1, 2, 8, 24, 48], 0), (30, [1, 2, 8, 24, 48], 0), (30, [0, 0, 2, 8, 48], 0.8)],
    ids=["much cache", "little cache", "at times not a token fits"],
)
def test_answers_are_those_of_a_device_with_memory(
    seed: int, kv_blocks: int, rooms: list[int], share_leaving: float
) -> None:
    rng = random.Random(seed)
    requests = some_requests(rng, 100 if share_leaving else 40)
    device = Device(lambda step: step.num_tokens <= rng.choice(rooms), seed=seed)
    outcome = check_answers(rng, requests, device, share_leaving=share_leaving, kv_blocks=kv_blocks)
    assert sum(not fits for _, fits in device.tried) > 20
    assert device.num_copied > 0
    kinds = {type(event) for event in outcome.ended.values()}
    assert kinds == ({Finished, Failed, Aborted} if share_leaving else {Finished})
    errors = [event.error for event in outcome.ended.values() if isinstance(event, Failed)]
    assert {(error.status, error.code) for error in errors} <= {(503, "service_unavailable")}


def test_tokens_that_were_not_computed_are_not_in_the_prefix_cache() -> None:
    device = Device()
    with make_engine(device, tokenize_workers=0) as engine:
        device.has_room = lambda step: all(chunk.end <= 8 for chunk in step.chunks)
        *_, failed = engine.stream(request("a", prompt_len=13))
        device.has_room = lambda step: True
        *_, finished = engine.stream(request("b", prompt_len=13))
        *_, cached = engine.stream(request("c", prompt_len=13))
    assert str(failed.error) == "The device has no memory left to go on with this request; try again later."
    assert (finished.usage.cached_tokens, cached.usage.cached_tokens) == (0, 12)


@pytest.mark.parametrize("seed", range(3))
def test_where_there_are_states_a_step_without_memory_ends_what_runs(seed: int) -> None:
    """It may have changed states. Later requests are computed from the start, without cached prefixes."""
    device = Device(seed=seed)
    with make_engine(device, tokenize_workers=0, num_states=8, max_step_tokens=512, kv_blocks=100) as engine:
        *_, first = list(engine.stream(request("a", prompt_len=130)))
        *_, cached = list(engine.stream(request("b", prompt_len=130)))
        device.has_room = lambda step: not any(chunk.sequence.num_generated == 2 for chunk in step.chunks)
        *_, failed = engine.stream(request("c", prompt_len=130, max_tokens=9, n=2, ignore_eos=True))
        device.has_room = lambda step: True
        *_, finished = list(engine.stream(request("d", prompt_len=130)))
    assert (failed.error.status, failed.error.code) == (503, "service_unavailable")
    assert [event.usage.cached_tokens for event in (first, cached, finished)] == [0, 128, 0]


def test_later_steps_are_smaller_for_a_while_and_no_request_starves(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    device = Device(lambda step: step.num_tokens <= 40)
    inbox = Inbox(lambda _: clock.move(1))
    caplog.set_level(logging.WARNING, "oaiserve")
    options = {"max_running": 12, "max_step_tokens": 64, "kv_blocks": 400, "prefix_cache": False}
    engine = make_engine(device, clock_ns=clock, tokenize_workers=0, **options)
    requests = [request(f"r{i}", prompt_len=60, max_tokens=30, ignore_eos=True) for i in range(12)]
    ended = collect_together(engine, requests, inbox).ended
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
    assert "no memory for a step of 64" in caplog.messages[0]
    assert "2 GiB were asked for" in caplog.messages[0]
    assert "--gpu-memory-utilization" in caplog.messages[0]


def test_decodes_that_did_not_fit_in_one_step_are_not_tried_in_one_step_again() -> None:
    device = Device()
    device.has_room = lambda step: len(step.chunks) <= 20
    requests = [request(f"r{i}", prompt_len=2, max_tokens=20, ignore_eos=True) for i in range(40)]
    outcome = answers(device, requests, clock_ns=Clock(), max_running=40, max_step_tokens=80, kv_blocks=400)
    assert all(event.usage.completion_tokens == 20 for event in outcome.ended.values())
    assert sum(not fits for _, fits in device.tried) < 6


def test_any_other_error_in_a_part_fails_the_engine() -> None:
    def has_room(step: Step) -> bool:
        if len(device.tried) == 1:
            device_is_gone(step)
        return step.num_tokens <= 2

    device = Device(has_room)
    engine = make_engine(device, tokenize_workers=0)
    ended = collect_together(engine, [request("a"), request("b")]).ended
    assert [event.error.status for event in ended.values() if isinstance(event, Failed)] == [500, 500]
    assert isinstance(engine.failure, RuntimeError)


def test_a_step_in_parts_is_counted_as_one_step() -> None:
    device = Device(lambda step: step.num_tokens <= 3)
    with make_engine(device, tokenize_workers=0) as engine:
        *_, ended = engine.stream(request(prompt_len=11, max_tokens=3, ignore_eos=True))
        steps = engine.take_steps()
    assert [step.num_tokens for step in steps] == [11, 1, 1]
    assert ended.account.num_steps == 3
    assert ended.account.model_ns == sum(step.duration_ns for step in steps)


def copying_request() -> Request:
    """Return a request of two choices whose prompt does not fill its last block, so that one of them copies it."""
    return request("copies", prompt_len=6, n=2, max_tokens=4, ignore_eos=True)


def test_blocks_are_copied_in_parts_where_there_is_little_memory() -> None:
    rng = random.Random(1)
    device = Device()
    device.can_copy = lambda copies: len(copies) <= 1
    outcome = check_answers(rng, [copying_request(), *some_requests(rng)], device)
    assert device.num_copied > 0
    assert all(isinstance(event, Finished) for event in outcome.ended.values())


def test_a_block_that_cannot_be_copied_ends_the_requests_of_its_step_and_no_later_one() -> None:
    device = Device()
    device.can_copy = lambda copies: False
    with make_engine(device, tokenize_workers=0) as engine:
        *_, failed = engine.stream(copying_request())
        assert failed.error.status == 503
        assert engine.snapshot().num_out_of_memory == 1
        device.can_copy = lambda copies: True
        assert isinstance(list(engine.stream(copying_request()))[-1], Finished)
        assert engine.snapshot().blocks_used == 0
