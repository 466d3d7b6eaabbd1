"""The watchdog reports a step that never ends, and none that only takes long."""

import os
from collections.abc import Iterator

import pytest

from oaiserve.engine import watchdog
from oaiserve.engine.accounts.host_time import HostTime
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Finished
from oaiserve.engine.sequences.step import Step
from oaiserve.engine.watchdog import Watchdog
from oaiserve.errors import Unavailable
from oaiserve.explain.step_cost import KNOTS, Load, StepCost
from oaiserve.facts.step_record import HostPart
from oaiserve.runtime import THREADS
from tests.engine.doubles import Clock, Inbox, ScriptedRunner, make_engine, request

LEAST_SECONDS = 30


@pytest.fixture(autouse=True)
def dogs(monkeypatch: pytest.MonkeyPatch) -> list[Watchdog]:
    """Return the watchdogs of engines, whose threads do not start."""
    dogs: list[Watchdog] = []
    monkeypatch.setattr(Watchdog, "start", lambda dog: dogs.append(dog))
    return dogs


@pytest.fixture
def runner() -> ScriptedRunner:
    return ScriptedRunner(gated=True)


@pytest.fixture
def engine(runner: ScriptedRunner) -> Iterator[Engine]:
    with make_engine(runner, watchdog_seconds=LEAST_SECONDS, explain=False) as engine:
        yield engine
        runner.permit(1000)


def looks(dog: Watchdog, seconds: float) -> str:
    for _ in range(int(seconds / watchdog.LOOK_SECONDS)):
        dog.look()
    return dog.hang


def test_an_engine_that_hangs_is_not_ready_until_it_goes_on(
    dogs: list[Watchdog], runner: ScriptedRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """The threads are real ones, because the log has their stacks."""
    inbox = Inbox()
    engine = make_engine(runner, runtime=THREADS, watchdog_seconds=LEAST_SECONDS, explain=False)
    engine.start()
    engine.submit(request("held"), inbox)
    runner.started.get()
    (dog,) = dogs
    assert (looks(dog, watchdog.UNKNOWN_SECONDS), engine.is_ready) == ("", True)
    assert "1 sequence" in looks(dog, 2)
    assert (engine.is_ready, engine.failure, engine.snapshot().num_hangs) == (False, None, 1)
    with pytest.raises(Unavailable):
        engine.submit(request("late"), inbox)
    looks(dog, 1000)
    (message,) = [one.getMessage() for one in caplog.records if "hangs" in one.getMessage()]
    assert all(part in message for part in ("engine:\n", "stepper.py", "MainThread:\n"))
    runner.permit(1000)
    assert isinstance(inbox.wait_terminal("held")["held"], Finished)
    assert (looks(dog, 1), engine.is_ready, engine.snapshot().num_hangs) == ("", True, 1)
    engine.stop()


def test_numbers_have_the_request_of_a_first_step_that_hangs(engine: Engine, runner: ScriptedRunner) -> None:
    """The alert on a stalled engine asks for work, and for no steps."""
    engine.submit(request("held"), Inbox())
    runner.started.get()
    numbers = engine.snapshot()
    assert (numbers.num_running, numbers.num_waiting, numbers.num_steps) == (1, 0, 0)


@pytest.mark.usefixtures("engine")
def test_an_idle_engine_does_not_hang(dogs: list[Watchdog]) -> None:
    assert looks(dogs[0], 100_000) == ""


@pytest.mark.parametrize(
    ("part", "expected_seconds", "most_seconds"),
    [
        (HostPart.WAIT, 0.01, LEAST_SECONDS),
        (HostPart.WAIT, 10, 10 * watchdog.MULTIPLE),
        (HostPart.WAIT, None, watchdog.UNKNOWN_SECONDS),
        (HostPart.COMMANDS, 10, LEAST_SECONDS),
    ],
)
def test_a_part_may_take_what_its_step_is_expected_to_and_much_more(
    part: HostPart, expected_seconds: float | None, most_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "load_of", lambda step: Load(decodes=1))
    host = HostTime(Clock())
    cost = None if expected_seconds is None else StepCost((expected_seconds * 1e9,) * len(KNOTS))
    dog = Watchdog(host, lambda: cost, LEAST_SECONDS, runtime=THREADS)
    host.enter(part, Step() if part is HostPart.WAIT else None)
    dog.look()  # The watchdog sees it for the first time.
    assert not looks(dog, most_seconds)
    assert looks(dog, 1)


def test_a_hang_ends_the_process_where_a_supervisor_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    host = HostTime(Clock())
    dog = Watchdog(host, lambda: None, LEAST_SECONDS, exits=True, runtime=THREADS)
    host.enter(HostPart.COMMANDS)
    looks(dog, LEAST_SECONDS + 3)
    assert ended == [watchdog.EXIT_CODE]
