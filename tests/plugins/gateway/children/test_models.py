"""Which models are loaded: processes are doubles, and time is a number."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from oaiserve.commands.server_process import Activity
from oaiserve.config import Bytes, Config
from oaiserve.errors import ModelNotFound, StartupError, Unavailable
from oaiserve.plugins.gateway.children.models import ChildModels, Model
from oaiserve.plugins.gateway.options import ModelsOptions
from oaiserve.runtime import THREADS
from oaiserve.wire.address import Address

SIZE = 100


class Process:
    """A double of a model's process."""

    def __init__(self, config: Config, *, fails: bool, hangs: bool) -> None:
        self.how_ended = "with exit code 1"
        self.num_bytes = SIZE
        self.doing = Activity()
        self._fails = fails
        self._hangs = hangs
        self._ended = asyncio.Event()
        self.ends = asyncio.Event()  # unless set, it drains
        self.ends.set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def ready(self) -> None:
        if self._fails:
            raise StartupError("Its process has ended with exit code 2.")
        if self._hangs:
            await self._ended.wait()
            raise StartupError("Its process has ended by SIGKILL.")

    def activity(self) -> Activity:
        return self.doing

    def kill(self) -> None:
        self.how_ended = "by SIGKILL"
        self._ended.set()

    async def ended(self) -> None:
        await self._ended.wait()

    async def end(self, drain_seconds: float, /) -> None:
        await self.ends.wait()
        self._ended.set()

    def crash(self) -> None:
        self._ended.set()


class Machine:
    """Starts doubles, and has the time."""

    def __init__(self, names: str, **options: Any) -> None:
        self.now_ns = 10**9
        self.started: list[tuple[str, Process]] = []
        self.fails: set[str] = set()
        self.hangs_at_start: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.joins = asyncio.Event()  # unless set, no process can take requests yet
        self.joins.set()
        self.adapters: dict[str, list[str]] = {}  # by the address of a model
        self.hung: set[str] = set()  # addresses of models whose processes give no reports
        self.is_well_again = False  # New processes don't hang.
        models = [Model(name, Config(name), Address("127.0.0.1", ord(name), name), SIZE) for name in names]
        start: Any = self.start
        clock = lambda: self.now_ns  # noqa: E731
        hangs = self.hung.__contains__
        self.models = ChildModels(models, ModelsOptions(**options), start, self.changed, self.reported, hangs, clock)

    def reported(self, address: str) -> list[str]:
        return self.adapters.get(address, [])

    async def start(self, config: Config, address: Address) -> Process:
        await self.gate.wait()
        process = Process(config, fails=config.model in self.fails, hangs=config.model in self.hangs_at_start)
        self.started.append((config.model, process))
        return process

    async def changed(self) -> None:
        if self.is_well_again:
            self.hung.clear()
        if self.loaded:
            await self.joins.wait()

    @property
    def loaded(self) -> str:
        return "".join(model.name for model in self.models.models.values() if model.process is not None)

    @property
    def loads(self) -> str:
        return "".join(name for name, _ in self.started)

    def hang(self, name: str) -> None:
        self.hung.add(self.models.models[name].address.name)

    async def use(self, name: str) -> int:
        async with self.models.in_use(name) as waited_ns:
            return waited_ns


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_model_is_loaded_once_for_all_that_ask_and_they_are_told_how_long_it_took() -> None:
    machine = Machine("ab")
    machine.gate.clear()
    asking = [asyncio.create_task(machine.use("a")) for _ in range(3)]
    await settle()
    machine.now_ns += 5
    machine.gate.set()
    assert await asyncio.gather(*asking) == [5, 5, 5]
    assert await machine.use("a") == 0
    assert machine.loads == "a"
    await machine.models.close()
    assert machine.loaded == ""


def test_a_request_may_name_a_model_by_its_path_which_stands_for_its_name(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    file.touch()
    machine = Machine("")
    model = Model("small", Config(str(file)), Address("127.0.0.1", 1, "small"), SIZE)
    models = ChildModels(
        [model],
        ModelsOptions(),
        machine.start,  # type: ignore[arg-type]
        machine.changed,
        machine.reported,
        bool,
        THREADS.clock_ns,
    )
    for name in ("", "small", str(file)):
        assert models.names_for(name) == ("small", str(file)), "the names that a key may have"
        assert models.name_for(name) == "small", "the name by which its process is found"
    with pytest.raises(ModelNotFound, match="This server serves 'small'\\."):
        models.name_for("other")


async def test_whoever_leaves_does_not_end_the_load_of_the_others() -> None:
    machine = Machine("a")
    machine.gate.clear()
    first, second = (asyncio.create_task(machine.use("a")) for _ in range(2))
    await settle()
    first.cancel()
    machine.gate.set()
    assert await second == 0
    assert machine.models.models["a"].num_users == 0


async def test_the_least_recently_used_model_makes_room_and_a_busy_one_when_its_requests_have_ended() -> None:
    machine = Machine("abc", memory_budget=Bytes(2 * SIZE))
    for name in "abca":
        machine.now_ns += 1
        await machine.use(name)
    assert (machine.loaded, machine.loads) == ("ac", "abca")  # c took the place of a, and a that of b
    async with machine.models.in_use("a"), machine.models.in_use("c"):
        waiting = asyncio.create_task(machine.use("b"))
        await settle()
        assert machine.loaded == "ac"
        late = asyncio.create_task(machine.use("c"))  # c leaves for b first: its turn is over
        await settle()
        assert not late.done()
    await asyncio.gather(waiting, late)
    assert machine.loads == "abcabc"


async def test_a_model_that_is_larger_than_the_budget_is_loaded_alone() -> None:
    machine = Machine("ab", memory_budget=Bytes(SIZE - 1))
    await machine.use("a")
    await machine.use("b")
    assert machine.loaded == "b"


async def test_all_are_loaded_at_the_start_as_far_as_there_is_room() -> None:
    machine = Machine("abc", memory_budget=Bytes(2 * SIZE))
    await machine.models.load_all()
    assert machine.loaded == "ab"


async def test_idle_models_are_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oaiserve.plugins.gateway.children.models.LOOK_SECONDS", 0)
    machine = Machine("ab", idle_unload_seconds=10)
    await machine.use("a")
    async with machine.models.in_use("b"):
        watching = asyncio.create_task(machine.models.watch())
        machine.now_ns += 9 * 10**9
        await settle()
        assert machine.loaded == "ab"
        machine.now_ns += 10**9
        await settle()
        assert machine.loaded == "b"  # its request is still open
    watching.cancel()
    assert await machine.use("a") == 0
    assert machine.loads == "aba"


@pytest.mark.parametrize("name", ["a", "b"])
async def test_model_loads_after_the_process_of_an_idle_one_has_given_back_its_memory(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("oaiserve.plugins.gateway.children.models.LOOK_SECONDS", 0)
    machine = Machine("abc", idle_unload_seconds=10, memory_budget=Bytes(2 * SIZE))
    await machine.use("a")
    process = machine.started[0][1]
    process.ends.clear()
    async with machine.models.in_use("c"):
        watching = asyncio.create_task(machine.models.watch())
        machine.now_ns += 10**10
        await settle()
        assert machine.loaded == "c"
        waiting = asyncio.create_task(machine.use(name))
        await settle()
        assert machine.loads == "ac", "the budget is for two, and the first process still needs memory"
        process.ends.set()
        await waiting
        assert (machine.loaded, machine.loads) == ("".join(sorted(name + "c")), "ac" + name), "c could stay"
        watching.cancel()
    await machine.models.close()


async def test_a_model_that_cannot_be_loaded_is_tried_again_after_growing_pauses() -> None:
    machine = Machine("ab")
    machine.fails = {"a"}
    for tries, pause_seconds in ((1, 1), (2, 2), (3, 4)):
        with pytest.raises(Unavailable, match="'a' could not be loaded: Its process has ended with exit code 2"):
            await machine.use("a")
        assert machine.loads == "a" * tries
        with pytest.raises(Unavailable) as refused:  # without another try
            await machine.use("a")
        assert refused.value.retry_after_seconds == pause_seconds
        assert machine.loads == "a" * tries
        machine.now_ns += pause_seconds * 10**9
    assert machine.models.failure is None  # b may still be loaded
    machine.fails = set()
    assert await machine.use("a") == 0


async def test_it_is_a_failure_if_no_model_can_be_loaded() -> None:
    machine = Machine("ab")
    machine.fails = {"a", "b"}
    await machine.models.load_all()
    assert isinstance(machine.models.failure, StartupError)


async def test_process_that_ends_before_it_can_take_requests_is_a_failed_load_and_holds_up_nobody() -> None:
    machine = Machine("ab")
    machine.joins.clear()
    first = asyncio.create_task(machine.use("a"))
    second = asyncio.create_task(machine.use("b"))
    await settle()
    machine.started[0][1].crash()
    with pytest.raises(Unavailable, match="'a' could not be loaded: Its process has ended with exit code 1"):
        await first
    machine.joins.set()
    assert await second == 0
    assert machine.loaded == "b"
    await machine.models.close()


async def test_requests_wait_until_the_process_can_take_them() -> None:
    machine = Machine("a")
    machine.joins.clear()
    using = [asyncio.create_task(machine.use("a"))]
    await settle()
    assert machine.loaded == "a"
    using.append(asyncio.create_task(machine.use("a")))
    await settle()
    assert not any(each.done() for each in using)
    machine.joins.set()
    assert await asyncio.gather(*using) == [0, 0]
    await machine.models.close()


async def test_nothing_is_loaded_after_the_end() -> None:
    machine = Machine("a")
    await machine.models.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await machine.use("a")
    assert machine.loads == ""


async def test_process_that_ends_during_the_drain_is_started_again_only_for_its_requests() -> None:
    machine = Machine("ab")
    await machine.use("b")
    async with machine.models.in_use("a"):
        machine.models.is_draining = True
        for _, process in [*machine.started]:
            process.crash()
        await settle()
        assert machine.loads == "baa"
    await machine.models.close()


async def test_process_that_ends_is_started_again_at_once() -> None:
    machine = Machine("ab")
    await machine.use("a")
    machine.started[0][1].crash()
    await settle()
    assert (machine.loads, machine.loaded) == ("aa", "a")
    await machine.models.close()


async def test_process_that_soon_ends_again_is_started_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("a")
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        machine.now_ns += int(seconds * 1e9)

    monkeypatch.setattr("oaiserve.plugins.gateway.children.models.sleep", sleep)
    await machine.use("a")
    for number in range(3):
        machine.started[number][1].crash()
        await settle()
    assert machine.loads == "aaaa"
    machine.now_ns += 61 * 10**9  # it has been stable
    machine.started[3][1].crash()
    await settle()
    assert pauses == [0, 1, 2, 0]
    await machine.models.close()


async def test_process_loaded_on_demand_is_started_again_only_for_its_requests() -> None:
    machine = Machine("ab", load_on_demand=True)
    async with machine.models.in_use("a"):
        machine.started[0][1].crash()
        await settle()
        assert machine.loads == "aa"
        assert machine.loaded == "a"
    machine.now_ns += 61 * 10**9
    machine.started[1][1].crash()
    await settle()
    assert machine.loaded == ""
    assert await machine.use("a") == 0


async def test_model_without_room_is_not_started_again_until_a_request_needs_it() -> None:
    machine = Machine("ab", memory_budget=Bytes(2 * SIZE))
    await machine.use("a")
    machine.models.models["a"].num_bytes = machine.started[0][1].num_bytes = 3 * SIZE
    machine.started[0][1].crash()
    await settle()
    assert machine.loaded == ""


async def test_a_name_that_no_model_has_is_refused_and_no_name_is_the_first_that_is_loaded() -> None:
    machine = Machine("ab")
    with pytest.raises(ModelNotFound, match="serves 'a', 'b'"):
        machine.models.name_for("c")
    assert machine.models.name_for("") == "a"
    await machine.use("b")
    assert machine.models.name_for("") == "b"


class Looks:
    """Lets `watch` look as often as a test says. Other pauses take no real time."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._machine = machine
        self._allowed = asyncio.Semaphore(0)
        monkeypatch.setattr("oaiserve.plugins.gateway.children.models.sleep", self.sleep)
        self.watching = asyncio.create_task(machine.models.watch())

    async def sleep(self, seconds: float) -> None:
        if asyncio.current_task() is self.watching:
            await self._allowed.acquire()
        else:
            self._machine.now_ns += int(seconds * 1e9)

    async def look(self, number: int) -> None:
        for _ in range(number):
            self._allowed.release()
            await settle()


async def test_model_whose_process_hangs_is_refused_and_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine("ab", hang_seconds=9)
    looks = Looks(machine, monkeypatch)
    await machine.use("a")
    machine.hang("a")

    await looks.look(2)
    with pytest.raises(Unavailable, match="'a' does not respond") as refused:
        await machine.use("a")
    assert refused.value.retry_after_seconds == 7
    assert await machine.use("b") == 0
    assert [model.name for model in machine.models.hung] == ["a"]
    await looks.look(6)
    assert machine.loads == "ab"
    machine.is_well_again = True
    await looks.look(1)

    assert machine.loads == "aba"
    assert await machine.use("a") == 0
    assert machine.models.models["a"].num_hangs == 1
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert lines == [
        "The process of the model a is killed: it has hung for 9 s",
        "The process of the model a has ended by SIGKILL",
    ]
    looks.watching.cancel()
    await machine.models.close()


async def test_hours_of_a_suspended_machine_are_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("a", hang_seconds=5)
    looks = Looks(machine, monkeypatch)
    await machine.use("a")
    machine.hang("a")
    await looks.look(1)

    machine.now_ns += 8 * 3600 * 10**9
    await looks.look(1)
    machine.hung.clear()
    await looks.look(10)

    assert (machine.loads, machine.loaded) == ("a", "a")
    looks.watching.cancel()
    await machine.models.close()


async def test_start_that_hangs_is_killed_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine("ab", hang_seconds=3)
    looks = Looks(machine, monkeypatch)
    machine.hangs_at_start = {"a"}
    loading = asyncio.create_task(machine.models.load_all())
    await settle()
    await looks.look(1)
    machine.started[0][1].doing = Activity(is_stopped=True)
    await looks.look(2)
    assert machine.loads == "a"
    waiting = asyncio.create_task(machine.use("a"))
    await settle()
    machine.hangs_at_start = set()

    await looks.look(1)
    with pytest.raises(Unavailable, match=r"'a' could not be loaded: Its start hung for 3 s\."):
        await waiting
    await loading
    await settle()

    assert sorted(machine.loads) == ["a", "a", "b"]
    assert machine.loaded == "ab"
    assert machine.models.models["a"].num_hangs == 1
    assert "The model a could not be loaded: Its start hung for 3 s." in caplog.text
    looks.watching.cancel()
    await machine.models.close()


async def test_process_that_hangs_before_its_first_report_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("a", hang_seconds=3, load_on_demand=True)
    looks = Looks(machine, monkeypatch)
    machine.joins.clear()
    waiting = asyncio.create_task(machine.use("a"))
    await settle()
    machine.hang("a")

    await looks.look(3)

    with pytest.raises(Unavailable, match="Its start hung for 3 s"):
        await waiting
    assert machine.loaded == ""
    looks.watching.cancel()
    await machine.models.close()


async def test_process_that_hangs_before_its_first_report_is_killed_while_an_idle_model_is_unloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine("ab", hang_seconds=3, idle_unload_seconds=10)
    looks = Looks(machine, monkeypatch)
    await machine.use("a")
    machine.joins.clear()
    waiting = asyncio.create_task(machine.use("b"))
    await settle()
    machine.hang("b")
    machine.now_ns += 10 * 10**9

    await looks.look(3)

    assert waiting.done()
    with pytest.raises(Unavailable, match="Its start hung for 3 s"):
        await waiting
    assert machine.loaded == ""
    looks.watching.cancel()
    await machine.models.close()


async def test_model_that_is_about_to_take_requests_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("a", idle_unload_seconds=10)
    machine.now_ns = 60 * 10**9
    looks = Looks(machine, monkeypatch)
    machine.joins.clear()
    loading = asyncio.create_task(machine.models.load_all())
    await settle()
    await looks.look(1)
    machine.joins.set()
    await loading
    assert machine.loaded == "a"
    machine.now_ns += 10 * 10**9
    await looks.look(1)
    assert machine.loaded == ""
    looks.watching.cancel()
    await machine.models.close()


async def test_process_that_hangs_is_unloaded_without_a_drain() -> None:
    machine = Machine("a")
    await machine.use("a")
    machine.hang("a")
    await machine.models.close()
    assert machine.started[0][1].how_ended == "by SIGKILL"
