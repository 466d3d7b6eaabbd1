"""Ranges for a profiler, which --nvtx asks for: those of steps on the engine thread, and the phases of requests."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import itt

from oaiserve.config import EngineOptions
from oaiserve.engine.accounts.host_time import HostTime
from oaiserve.engine.accounts.step_account import RequestNotes
from oaiserve.engine.model.torch_ranges import NvtxRanges, ranges_on
from oaiserve.engine.request import Aborted, Failed, Request, SamplingParams, TextPrompt
from oaiserve.errors import StartupError
from tests.engine.doubles import (
    BlockedTokenizer,
    Clock,
    Inbox,
    ScriptedRunner,
    SimulatedEngine,
    device_is_gone,
    make_engine,
    new_world,
    request,
    stepping,
    third_step_fails,
    wait_until_idle,
)
from tests.engine.model.runners import greedy_answers
from tests.engine.remembered import OPTIONS, save, started
from tests.models.decoders import FAMILIES, random_model

PHASES = ["tokenize", "queue", "prefill", "decode"]


class RecordedRanges:
    """Ranges that are noted: those of the engine thread with their depth, and the phases with the time at both ends."""

    def __init__(self, clock_ns: Callable[[], int] | None = None) -> None:
        self.world = new_world(clock_ns)
        self.open: list[str] = []  # those of the engine thread
        self.begun: list[tuple[int, str]] = []
        self.phases: list[list[Any]] = []  # phase, request id, begin, end

    def push(self, name: str) -> None:
        assert self.world.worker_now.name == "engine"
        self.begun.append((len(self.open), name))
        self.open.append(name)

    def pop(self) -> None:
        assert self.world.worker_now.name == "engine"
        self.open.pop()

    def start(self, phase: str, request_id: str) -> list[Any]:
        self.phases.append([phase, request_id, self.world.clock_ns(), None])
        return self.phases[-1]

    def end(self, started: list[Any]) -> None:
        assert started[-1] is None, "a phase ends twice"
        started[-1] = self.world.clock_ns()

    @property
    def unended(self) -> list[Any]:
        return [*self.open, *(phase for phase in self.phases if phase[-1] is None)]

    @property
    def steps(self) -> list[list[str]]:
        """The ranges within each step."""
        steps: list[list[str]] = []
        for depth, name in self.begun:
            if name == "step":
                assert depth == 0
                steps.append([])
            elif depth == 1:
                steps[-1].append(name)
        return steps


def in_world(ranges: RecordedRanges) -> dict[str, Any]:
    return {"ranges": ranges, "runtime": ranges.world, "kind": SimulatedEngine}


def test_a_step_contains_its_parts_in_order() -> None:
    ranges = RecordedRanges()
    with make_engine(tokenize_workers=0, **in_world(ranges)) as engine:
        list(engine.stream(request(max_tokens=2)))
        wait_until_idle(engine)
        assert ranges.open == [], "a thread that waits is in no range"
    computed = ["schedule", "launch", "collect", "process", "hand_over"]
    assert [step for step in ranges.steps if len(step) > 1] == [computed, computed]
    assert {name for depth, name in ranges.begun if depth == 0} <= {"commands", "step", "hand_over"}
    assert ranges.unended == []


def test_with_overlap_a_step_is_launched_before_the_results_of_the_one_before() -> None:
    ranges = RecordedRanges()
    runner = ScriptedRunner(is_asynchronous=True)
    with make_engine(runner, tokenize_workers=0, **in_world(ranges)) as engine:
        list(engine.stream(request(max_tokens=2)))
    results = ["collect", "process", "hand_over"]
    steps = [step for step in ranges.steps if len(step) > 1]
    assert steps == [["schedule", "launch"], ["schedule", "launch", *results], ["schedule", *results]]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_phases_of_a_request_agree_with_its_stamps(workers: int) -> None:
    clock = Clock()
    ranges = RecordedRanges(clock)
    runner = ScriptedRunner(computing=lambda _: clock.move(0.003))
    texts = Request("r", (TextPrompt("abc"),), SamplingParams(max_tokens=3))
    with make_engine(runner, tokenize_workers=workers, **in_world(ranges)) as engine:
        times = list(engine.stream(texts))[-1].times
    stamps = [times.tokenize_started, times.tokenized, times.scheduled, times.first_token, times.last_token]
    assert ranges.phases == [[phase, "r", *ends] for phase, ends in zip(PHASES, pairwise(stamps), strict=True)]
    assert [end - begin for _, _, begin, end in ranges.phases[2:]] == [3_000_000, 6_000_000]


def test_a_tokenize_worker_begins_and_ends_its_phase_while_a_step_runs() -> None:
    ranges = RecordedRanges()
    texts = Request("b", (TextPrompt("abc"),), SamplingParams(max_tokens=1))
    with stepping(request("a"), tokenize_workers=1, **in_world(ranges)) as (engine, runner, inbox):
        engine.submit(texts, inbox)
        engine.run_in_turns(_nothing(), client="", num_bytes=0).result()  # It takes its turn after the prompt.
        assert [row[0] for row in ranges.phases if row[1] == "b"] == PHASES[:2]
        runner.permit(10)
        inbox.wait_terminal("b")
    assert [row[0] for row in ranges.phases if row[1] == "b"] == PHASES
    assert ranges.unended == []


def _nothing() -> Iterator[None]:
    yield None


def test_a_range_of_a_request_ends_where_the_request_is_aborted() -> None:
    ranges = RecordedRanges()
    tokenizer = BlockedTokenizer()
    inbox = Inbox()
    blocked = Request("r", (TextPrompt("blocked"),), SamplingParams(max_tokens=1))
    with make_engine(tokenizer=tokenizer, **in_world(ranges)) as engine:
        engine.submit(blocked, inbox)
        tokenizer.entered.wait()
        engine.abort("r")
        assert isinstance(inbox.wait_terminal("r")["r"], Aborted)
        assert [row[0] for row in ranges.phases] == ["tokenize"]
        assert ranges.phases[0][-1] is not None
        tokenizer.release.set()
    assert len(ranges.phases) == 1, "the worker begins no other one"


@pytest.mark.parametrize("failing", ["launching", "computing"])
def test_every_range_ends_where_a_step_fails(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    ranges = RecordedRanges()
    runner = ScriptedRunner(**{failing: third_step_fails()})
    inbox = Inbox()
    with make_engine(runner, tokenize_workers=0, **in_world(ranges)) as engine:
        engine.submit(request("r", max_tokens=9), inbox)
        assert isinstance(inbox.wait_terminal("r")["r"], Failed)
    assert [row[0] for row in ranges.phases] == PHASES
    assert ranges.unended == []
    assert "The engine has stopped" in caplog.text


def test_every_range_ends_where_the_first_step_fails(caplog: pytest.LogCaptureFixture) -> None:
    ranges = RecordedRanges()
    inbox = Inbox()
    runner = ScriptedRunner(launching=device_is_gone)
    with make_engine(runner, tokenize_workers=0, **in_world(ranges)) as engine:
        engine.submit(request("r"), inbox)
        assert isinstance(inbox.wait_terminal("r")["r"], Failed)
    assert [row[0] for row in ranges.phases] == PHASES[:3]
    assert ranges.unended == []


def test_without_ranges_the_engine_runs_the_same_code_as_ever() -> None:
    with make_engine() as engine:
        assert type(engine._loop._host) is HostTime
        assert engine._loop.requests._new_notes is RequestNotes
        assert engine._tokenize._post == engine._loop.post


# -- what marks them --------------------------------------------------------------------------------------------------


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the calls of NVTX and ITT, which reach no profiler."""
    calls: list[Any] = []
    for name in ("range_push", "range_pop", "range_start", "range_end"):
        noted = lambda *arguments, name=name: calls.append((f"nvtx {name}", *arguments)) or len(calls)  # noqa: E731
        monkeypatch.setattr(torch.cuda.nvtx, name, noted)
    for name in ("range_push", "range_pop", "mark"):
        noted = lambda *arguments, name=name: calls.append((f"itt {name}", *arguments))  # noqa: E731
        monkeypatch.setattr(itt, name, noted)
    return calls


def test_on_a_gpu_ranges_are_nvtx_with_the_ids_of_requests(marks: list[Any]) -> None:
    ranges = ranges_on("cuda:0")
    assert isinstance(ranges, NvtxRanges)
    with make_engine(ranges=ranges, tokenize_workers=0) as engine:
        list(engine.stream(request("r", max_tokens=1)))
    assert {call[0].split()[0] for call in marks} == {"nvtx"}
    assert [call[1] for call in marks if call[0] == "nvtx range_start"] == [f"{phase} r" for phase in PHASES]
    started = [number for number, call in enumerate(marks, 1) if call[0] == "nvtx range_start"]
    assert [call[1] for call in marks if call[0] == "nvtx range_end"] == started
    names = [call[0] for call in marks]
    assert names.count("nvtx range_push") == names.count("nvtx range_pop") > 5


def test_on_a_cpu_ranges_are_tasks_of_itt(marks: list[Any]) -> None:
    if not itt.is_available():
        pytest.skip("this build of torch has no ITT: run it with PyTorch's own wheel for x86-64")
    with make_engine(ranges=ranges_on("cpu"), tokenize_workers=0) as engine:
        list(engine.stream(request("r", max_tokens=1)))
    assert {call[0].split()[0] for call in marks} == {"itt"}
    ends = [f"{phase} {end}" for phase in PHASES for end in ("begins", "ends")]
    assert [call[1] for call in marks if call[0] == "itt mark"] == ends, "no name has an id, as ITT keeps all names"
    assert ("itt range_push", "step") in marks


def test_the_flag_gives_a_model_on_a_cpu_ranges_that_profilers_get(tmp_path: Path, marks: list[Any]) -> None:
    """The order of the calls is that of the engine's own tests. Without a profiler, torch does nothing with them."""
    folder = save(random_model(FAMILIES["llama"]), tmp_path)
    with started(folder, EngineOptions(**OPTIONS, compile=False, nvtx=True)) as engine:
        greedy_answers(engine, [[5, 9, 3, 17]])
    assert ("itt range_push", "launch") in marks
    assert ("itt mark", "decode ends") in marks


def test_a_torch_without_itt_is_a_reason_not_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(itt, "is_available", lambda: False)
    with pytest.raises(StartupError, match="--nvtx marks ranges by ITT on a CPU, and this build of torch has none."):
        ranges_on("cpu")
