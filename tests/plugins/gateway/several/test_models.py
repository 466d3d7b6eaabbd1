"""Which models are loaded: loaded models are doubles, and time is a number."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oaiserve.config import Bytes, Config, EngineOptions
from oaiserve.errors import ModelNotFound, StartupError, Unavailable
from oaiserve.plugins.gateway.options import ModelsOptions
from oaiserve.plugins.gateway.several.models import NEXT_SECONDS, Model, Models
from oaiserve.runtime import THREADS
from tests.world.loop import World

SIZE = 100


class Loaded:
    """A double of a loaded model."""

    def __init__(self) -> None:
        self.num_bytes = SIZE
        self.engine = SimpleNamespace(hang="", failure=None, adapters={})
        self.has_ended = asyncio.Event()
        self.ends = asyncio.Event()  # unless set, it takes a while to end
        self.ends.set()

    async def end(self) -> None:
        await self.ends.wait()
        self.has_ended.set()

    def fail(self) -> None:
        self.engine.failure = RuntimeError("Its processes have ended 3 times within a minute.")


class Machine:
    """Loads doubles, and has the time."""

    def __init__(self, names: str, load_timeout_seconds: float = 1800, **options: Any) -> None:
        self.now_ns = 10**9
        self.made: list[tuple[str, Loaded]] = []
        self.fails: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.hang: set[str] = set()
        engine = EngineOptions(load_timeout_seconds=load_timeout_seconds)
        models = [Model(name, Config(name, engine=engine), SIZE) for name in names]
        load: Any = self.load
        self.models = Models(models, ModelsOptions(**options), load, lambda: self.now_ns)

    async def load(self, config: Config) -> Loaded:
        self.made.append((config.model, loaded := Loaded()))
        if config.model in self.hang:
            await asyncio.Event().wait()
        await self.gate.wait()
        if config.model in self.fails:
            raise StartupError("Its process has ended with exit code 2.")
        return loaded

    @property
    def loaded(self) -> str:
        return "".join(self.models.loaded_by_name)

    @property
    def loads(self) -> str:
        return "".join(name for name, _ in self.made)

    async def use(self, name: str) -> int:
        async with self.models.in_use(name) as (_, waited_ns):
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
    load: Any = Machine("").load
    models = Models([Model("small", Config(str(file)), SIZE)], ModelsOptions(), load, THREADS.clock_ns)
    for name in ("", "small", str(file)):
        assert models.names_for(name) == ("small", str(file)), "the names that a key may have"
        assert models.name_for(name) == "small", "the name by which it is found"
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
    assert machine.models.by_name["a"].num_users == 0


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
    monkeypatch.setattr("oaiserve.plugins.gateway.several.models.LOOK_SECONDS", 0)
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
    monkeypatch.setattr("oaiserve.plugins.gateway.several.models.LOOK_SECONDS", 0)
    machine = Machine("abc", idle_unload_seconds=10, memory_budget=Bytes(2 * SIZE))
    await machine.use("a")
    first = machine.made[0][1]
    first.ends.clear()
    async with machine.models.in_use("c"):
        watching = asyncio.create_task(machine.models.watch())
        machine.now_ns += 10**10
        await settle()
        assert machine.loaded == "c"
        waiting = asyncio.create_task(machine.use(name))
        await settle()
        assert machine.loads == "ac", "the budget is for two, and the first model still needs memory"
        first.ends.set()
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


async def test_nothing_is_loaded_after_the_end() -> None:
    machine = Machine("a")
    await machine.models.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await machine.use("a")
    assert machine.loads == ""


async def test_load_that_is_cut_off_by_the_end_is_cancelled() -> None:
    machine = Machine("a")
    machine.gate.clear()
    waiting = asyncio.create_task(machine.use("a"))
    await settle()
    await machine.models.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert machine.loaded == ""


async def test_load_that_hangs_is_ended_and_holds_up_no_other_one(world: World) -> None:
    machine = Machine("ab", load_timeout_seconds=20)
    machine.hang.add("a")
    asking = asyncio.create_task(machine.use("a"))
    await settle()
    await machine.use("b")
    assert (machine.loaded, machine.loads) == ("b", "ab")
    before = world.now
    with pytest.raises(Unavailable, match=r"'a' could not be loaded: It was not loaded within 20 s"):
        await asking
    assert 19 < world.now - before < 21
    machine.hang.clear()
    machine.now_ns += 10**12
    await machine.use("a")
    assert machine.loaded == "ab"


async def test_load_that_hangs_at_the_start_holds_up_the_next_one_for_a_while(world: World) -> None:
    machine = Machine("ab")
    machine.hang.add("a")
    loading = asyncio.create_task(machine.models.load_all())
    await asyncio.sleep(NEXT_SECONDS + 1)
    assert machine.loaded == "b"
    await machine.models.close()
    loading.cancel()


async def test_model_waits_for_the_room_of_one_that_is_being_loaded() -> None:
    machine = Machine("ab", memory_budget=Bytes(SIZE))
    machine.gate.clear()
    asking = [asyncio.create_task(machine.use(name)) for name in "ab"]
    await settle()
    assert machine.loads == "a"
    machine.gate.set()
    await asyncio.gather(*asking)
    assert (machine.loaded, machine.loads) == ("b", "ab")


class Looks:
    """Lets `watch` look as often as a test says. Other pauses take no real time, and are noted."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._machine = machine
        self._allowed = asyncio.Semaphore(0)
        self.pauses: list[float] = []
        monkeypatch.setattr("oaiserve.plugins.gateway.several.models.sleep", self.sleep)
        self.watching = asyncio.create_task(machine.models.watch())

    async def sleep(self, seconds: float) -> None:
        if asyncio.current_task() is self.watching:
            await self._allowed.acquire()
        else:
            self.pauses.append(seconds)
            self._machine.now_ns += int(seconds * 1e9)

    async def look(self) -> None:
        await settle()
        self._allowed.release()
        await settle()

    async def end(self) -> None:
        self.watching.cancel()
        await self._machine.models.close()


async def test_model_whose_engine_fails_is_loaded_again_and_soon_after_a_load_only_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine("ab")
    looks = Looks(machine, monkeypatch)
    await machine.use("a")
    for number in range(3):
        machine.made[number][1].fail()
        await looks.look()
        assert machine.made[number][1].has_ended.is_set()
    assert (machine.loads, machine.loaded) == ("aaaa", "a")
    machine.now_ns += 61 * 10**9  # it has been stable
    machine.made[3][1].fail()
    await looks.look()
    assert looks.pauses == [0, 1, 2, 0]
    await looks.end()


async def test_failed_engine_is_replaced_during_the_drain_only_for_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine("ab")
    looks = Looks(machine, monkeypatch)
    await machine.use("b")
    async with machine.models.in_use("a"):
        machine.models.is_draining = True
        for _, loaded in [*machine.made]:
            loaded.fail()
        await looks.look()
        assert machine.loads == "baa"
    await looks.end()


async def test_model_loaded_on_demand_is_loaded_again_only_for_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("ab", load_on_demand=True)
    looks = Looks(machine, monkeypatch)
    async with machine.models.in_use("a"):
        machine.made[0][1].fail()
        await looks.look()
        assert (machine.loads, machine.loaded) == ("aa", "a")
    machine.now_ns += 61 * 10**9
    machine.made[1][1].fail()
    await looks.look()
    assert machine.loaded == ""
    assert await machine.use("a") == 0
    await looks.end()


async def test_model_without_room_is_not_loaded_again_until_a_request_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine("ab", memory_budget=Bytes(2 * SIZE))
    looks = Looks(machine, monkeypatch)
    await machine.use("a")
    machine.models.by_name["a"].num_bytes = machine.made[0][1].num_bytes = 3 * SIZE
    machine.made[0][1].fail()
    await looks.look()
    assert machine.loaded == ""
    await looks.end()


async def test_models_whose_engine_hangs_are_named() -> None:
    machine = Machine("ab")
    await machine.use("a")
    await machine.use("b")
    machine.made[1][1].engine.hang = "The engine thread hangs."
    assert machine.models.hung == ["b"]
    await machine.models.close()


async def test_adapter_names_the_model_that_has_loaded_it() -> None:
    machine = Machine("ab")
    await machine.use("b")
    machine.made[0][1].engine.adapters["sql"] = "an adapter"
    assert machine.models.name_for_adapter("", "sql", is_new=False) == "b"
    with pytest.raises(ModelNotFound):
        machine.models.name_for("other")
    await machine.models.close()


async def test_a_name_that_no_model_has_is_refused_and_no_name_is_the_first_that_is_loaded() -> None:
    machine = Machine("ab")
    with pytest.raises(ModelNotFound, match="serves 'a', 'b'"):
        machine.models.name_for("c")
    assert machine.models.name_for("") == "a"
    await machine.use("b")
    assert machine.models.name_for("") == "b"
