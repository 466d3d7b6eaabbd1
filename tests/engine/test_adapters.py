"""Adapters in the engine: sequences with several of them share steps, but not the prefix cache."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oaiserve.engine.request import Finished, Request, TokenPrompt
from oaiserve.engine.tokenize import TokenizeStage
from oaiserve.engine.types.adapters import MOST_ADAPTERS, AdapterTable
from oaiserve.errors import AdapterUnloaded, InvalidRequest, NotFound
from tests.engine.answers import answers_of, collect
from tests.engine.doubles import Inbox, SimulatedEngine
from tests.engine.model.runners import eager_runner, greedy, make_engine
from tests.models.adapters import adaptable, merged, random_adapter
from tests.models.decoders import FAMILIES, generate, random_model
from tests.models.described import described

MODEL = random_model(FAMILIES["llama"])
PROMPT = [(7 * i + 1) % 97 for i in range(40)]
SHAPES = adaptable(MODEL)
ADAPTERS = {name: random_adapter(SHAPES, seed) for seed, name in enumerate(["one", "two"])}


class Held:
    """A model whose runner's adapters are known."""

    def __init__(self) -> None:
        self.loaded = described(MODEL)
        self.runner = eager_runner(self.loaded, num_blocks=64, block_size=16)
        self.dropped: list[int] = []

    def add(self, number: int, name: str, path: Path) -> None:
        self.runner.add_adapter(number, ADAPTERS[path.name])

    def drop(self, number: int) -> None:
        self.runner.drop_adapter(number)
        self.dropped.append(number)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def engine(held: Held) -> Iterator[SimulatedEngine]:
    table = AdapterTable(held.add, held.drop, SHAPES)
    with make_engine(held.loaded, held.runner, adapters=table, drafts="lookup") as engine:
        yield engine


def request(name: str, adapter: int, *, num_tokens: int = 6, n: int = 1) -> Request:
    return Request(name, (TokenPrompt(PROMPT),), greedy(num_tokens, n=n), adapter=adapter)


def test_requests_with_several_adapters_and_none_are_answered_together(engine: SimulatedEngine) -> None:
    numbers = {name: engine.load_adapter(name, Path(name)).number for name in ADAPTERS}
    requests = [request("base", 0), request("one", numbers["one"]), request("two", numbers["two"], n=2)]
    for _ in range(2):  # the second time, all of their prompts are in the prefix cache
        outcome = collect(engine, requests)
        for (name, _), answer in outcome.token_ids.items():
            model = merged(MODEL, ADAPTERS[name]) if name in ADAPTERS else MODEL
            assert [answer] == generate(model, [PROMPT], 6)
    assert all(isinstance(end, Finished) and end.usage.cached_tokens == 32 for end in outcome.ended.values())


def test_the_prefix_cache_is_not_shared_between_adapters(engine: SimulatedEngine) -> None:
    first = engine.load_adapter("one", Path("one")).number
    for number, num_cached in [(0, 0), (first, 0), (first, 32), (0, 32)]:
        assert collect(engine, [request("r", number)]).ended["r"].usage.cached_tokens == num_cached
    engine.unload_adapter("one")
    again = engine.load_adapter("one", Path("one")).number
    assert collect(engine, [request("r", again)]).ended["r"].usage.cached_tokens == 0


def test_an_adapter_is_freed_when_its_last_request_has_ended(
    engine: SimulatedEngine, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(TokenizeStage, "give_back_later", lambda _: given_back.append(len(held.dropped)))
    number = engine.load_adapter("one", Path("one")).number
    assert given_back == [0]  # what its files were read into
    counted: list[dict[str, tuple[int, int]]] = []
    inbox = Inbox(lambda _: counted.append(dict(engine.snapshot().adapters)))
    engine.submit(request("open", number, num_tokens=50), inbox)
    engine.world.wait_for(lambda: counted)
    assert counted == [{"one": (1, 0)}]  # running and waiting
    engine.unload_adapter("one")
    assert engine.adapters.get("one") is None
    assert engine.snapshot().adapters == {}
    assert isinstance(inbox.wait_terminal("open")["open"], Finished)
    assert held.dropped == [number]
    assert given_back == [0, 1]  # its memory, to the system


def test_a_request_whose_adapter_was_unloaded_on_its_way_fails(engine: SimulatedEngine, held: Held) -> None:
    number = engine.load_adapter("one", Path("one")).number
    engine.unload_adapter("one")
    engine.world.settle()
    assert held.dropped == [number]
    end = collect(engine, [request("late", number)]).ended["late"]
    assert isinstance(end.error, AdapterUnloaded)


def test_an_adapter_that_is_replaced_stays_with_its_open_requests(engine: SimulatedEngine, held: Held) -> None:
    number = engine.load_adapter("one", Path("one")).number
    expected = collect(engine, [request("alone", number, num_tokens=50)])
    answered: list[object] = []
    inbox = Inbox(answered.append)
    engine.submit(request("open", number, num_tokens=50), inbox)
    engine.world.wait_for(lambda: answered)
    replacing = engine.load_adapter("one", Path("two"), in_place=True).number
    engine.submit(request("new", replacing), inbox)
    inbox.wait_terminal("open", "new")
    assert held.dropped == [number]
    assert engine.snapshot().adapters == {"one": (0, 0)}
    answers = answers_of(engine, [], inbox).token_ids
    assert answers["open", 0] == expected.token_ids["alone", 0]
    assert answers["new", 0] == generate(merged(MODEL, ADAPTERS["two"]), [PROMPT], 6)[0]


def test_a_table_has_each_name_once_and_a_bounded_number() -> None:
    added: list[tuple[int, str]] = []
    table = AdapterTable(lambda number, name, path: added.append((number, name)))
    table.load("a", Path("a"), 0)
    with pytest.raises(InvalidRequest, match="loaded already"):
        table.load("a", Path("b"), 0)
    with pytest.raises(NotFound):
        table.unload("b")
    for index in range(MOST_ADAPTERS - 1):
        table.load(f"{index}", Path("x"), 0)
    with pytest.raises(InvalidRequest, match="which is the most"):
        table.load("one more", Path("x"), 0)
    table.unload("a")
    assert table.load("a", Path("a"), 0).number == len(added) == MOST_ADAPTERS + 1


def test_each_adapter_that_is_replaced_comes_out_of_the_table_once() -> None:
    table = AdapterTable(lambda *_: None)
    with ThreadPoolExecutor(4) as threads:
        pairs = [*threads.map(lambda index: table.replace("a", Path(f"{index}"), 0), range(8))]
    (last,) = table.served
    replaced = [before.number for _, before in pairs if before is not None]
    assert sorted([*replaced, last.number]) == [new.number for new, _ in sorted(pairs, key=lambda pair: pair[0].number)]


def test_adapters_have_a_bounded_memory_with_those_that_open_requests_still_have() -> None:
    table = AdapterTable(lambda *_: None, lambda _: None, size=lambda path: int(path.name))
    table.max_bytes = 100
    first = table.load("a", Path("60"), 0)
    table.unload("a")
    message = "takes 41 bytes, and those that are loaded or in use take 60 of 100 .--lora-memory.; unload one first"
    with pytest.raises(InvalidRequest, match=message):
        table.load("a", Path("41"), 0)
    table.load("a", Path("40"), 0)
    table.drop(first.number)
    table.load("b", Path("60"), 0)


def test_an_adapter_that_cannot_be_loaded_leaves_nothing() -> None:
    def fail(number: int, name: str, path: Path) -> None:
        raise MemoryError

    table = AdapterTable(fail)
    with pytest.raises(MemoryError):
        table.load("a", Path("a"), 0)
    assert table.served == []
    assert not table.holds(1)
