"""The disk tier of the prefix cache: prompts are found after a restart, and answers are the same bytes."""

from __future__ import annotations

import errno
import importlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Finished, Request, TokenPrompt
from oaiserve.engine.sequences.blocks import BlockHash, BlockPool, hash_block
from oaiserve.engine.start import kept_blocks
from oaiserve.engine.tiers.disk_tier import STOP_SECONDS, BlocksRead, DiskTier, KeptBlocks, Reading
from oaiserve.errors import StartupError
from oaiserve.facts.record import WaitReason
from oaiserve.runtime import AT_ONCE, Empty
from oaiserve.storage.block_files import BlockFiles, Buffer
from tests.engine.answers import collect
from tests.engine.doubles import SimulatedEngine
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.in_world import started_in
from tests.engine.memory import sequence
from tests.engine.model.runners import greedy, greedy_answers
from tests.engine.remembered import save
from tests.world.loop import World
from tests.world.schedules import ON_TIME, schedules

PROMPT = [(7 * i + 1) % 97 for i in range(110)]  # six full blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(FAMILIES["llama"]), tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Callable[..., Engine]:
    """Start an engine in a world, with blocks in a folder of this world."""

    def start(world: World, **options: Any) -> Engine:
        folder = tmp_path / f"blocks {world.seed}"
        given: dict[str, Any] = {"prefix_cache_dir": folder, "device": "cpu", "cpu_threads": 1, "kv_blocks": 64}
        return started_in(world, model, **given | options)

    return start


def finished(world: World, engine: Engine, prompt: list[int], **fields: Any) -> Finished:
    ended = collect(engine, [Request("r", (TokenPrompt(prompt),), greedy(8), **fields)]).ended["r"]
    assert isinstance(ended, Finished)
    return ended


@pytest.mark.compiler
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"block_size": 32}])
@schedules(2)
def test_after_a_restart_a_prompt_is_found_and_its_answer_is_the_same(
    world: World, start: Callable[..., Engine], options: dict[str, Any]
) -> None:
    with start(world, **options) as engine:
        expected = greedy_answers(engine, [PROMPT])
        assert finished(world, engine, [3, *PROMPT]).usage.cached_tokens == 0
    size = options.get("block_size", 16)
    with start(world, **options) as engine:
        ended = finished(world, engine, PROMPT)
        assert ended.usage.cached_tokens == 109 // size * size
        # Where workers wake up on time, a read may take no time, and nobody waits for it.
        assert WaitReason.PREFIX_READ in ended.account.waits_ns or world.most_late_seconds == ON_TIME
        assert ended.account.num_restored_tokens == ended.usage.cached_tokens
        assert greedy_answers(engine, [PROMPT]) == expected
        assert engine.snapshot().num_blocks_read == 109 // size


@pytest.mark.compiler
@schedules(1)
def test_other_settings_and_other_salts_find_nothing(world: World, start: Callable[..., Engine]) -> None:
    with start(world) as engine:
        finished(world, engine, PROMPT)
    with start(world, kv_cache_dtype="int8") as engine:
        assert finished(world, engine, PROMPT).usage.cached_tokens == 0
    with start(world) as engine:
        assert finished(world, engine, PROMPT, cache_salt="another").usage.cached_tokens == 0


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["decoder/rotary.py", "decoder/defaults.json", "executors/native/native.py"])
@schedules(1)
def test_other_code_finds_nothing(
    world: World, start: Callable[..., Engine], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (kept_blocks._ENGINE / name).is_file()
    code = tmp_path / "engine" / name
    code.parent.mkdir(parents=True, exist_ok=True)
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(kept_blocks, "_ENGINE", tmp_path / "engine")
        for content in ("one", "one", "another"):
            code.write_text(content)
            with start(world) as engine:
                found.append(finished(world, engine, PROMPT).usage.cached_tokens > 0)
    assert found == [False, True, False]


def test_other_files_and_other_code_that_read_images_find_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    mmproj = tmp_path / "mmproj-model.gguf"
    code = tmp_path / "own_tower.py"
    file.touch()
    mmproj.touch()
    code.write_text("class Tower: ...")
    monkeypatch.syspath_prepend(tmp_path)
    tower = importlib.import_module("own_tower").Tower()
    source = ModelSource(str(tmp_path), file.name, is_local=True)

    def kind(media: object) -> str:
        served: Any = SimpleNamespace(media=media)
        return kept_blocks._kind(served, "library", source, EngineOptions(), [32])

    kinds = [kind(None), kind(SimpleNamespace(tower=tower))]
    for path in (mmproj, code):
        path.write_bytes(b"# another")
        assert kind(None) == kinds[0], "of texts alone"
        kinds.append(kind(SimpleNamespace(tower=tower)))
    assert len(set(kinds)) == 4


@pytest.mark.compiler
@schedules(3)
def test_beneath_a_small_cache_answers_stay_the_same_whatever_is_read_and_written(
    world: World, start: Callable[..., Engine]
) -> None:
    """Prompts with common beginnings come at random, some at once, and memory holds a fifth of them."""
    chance = random.Random(5)
    common = [[chance.randrange(97) for _ in range(80)] for _ in range(6)]
    prompts = [
        [*chance.choice(common), *(chance.randrange(97) for _ in range(chance.randrange(1, 30)))] for _ in range(40)
    ]
    with start(world, prefix_cache_dir=None) as engine:
        expected = greedy_answers(engine, prompts)
    with start(world, kv_blocks=20) as engine:
        outcome = [answer for i in range(0, 40, 4) for answer in greedy_answers(engine, prompts[i : i + 4])]
        assert engine.snapshot().num_blocks_read > 0
    with start(world, kv_blocks=20) as engine:  # What the first one wrote at its end is on disk.
        outcome += [answer for prompt in prompts for answer in greedy_answers(engine, [prompt])]
        assert engine.snapshot().num_blocks_read > 0
    assert outcome == expected * 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"compile": False}, "needs the native step"), ({"prefix_cache": False}, "blocks of that cache")],
)
def test_it_is_refused_where_it_could_do_nothing(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        SimulatedEngine.from_pretrained("demo", prefix_cache_dir=tmp_path, **options)


@pytest.mark.compiler
def test_a_folder_of_others_is_refused_with_its_reason(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StartupError, match="cannot be used: other users can write to"):
        SimulatedEngine.from_pretrained(model, prefix_cache_dir=folder, device="cpu", cpu_threads=1, kv_blocks=64)


# -- the tier alone ---------------------------------------------------------------------------------------------------

NUM_BLOCKS = 12
BLOCK_BYTES = (40, 24)
FILE_BYTES = sum(BLOCK_BYTES) + 32
ON_THEIR_WAY = 2  # pieces that may be on their way to the engine thread


class Disk:
    """A disk whose calls take time. It may be full, and `meanwhile` is called during each."""

    def __init__(self, world: World, seconds: float) -> None:
        self._world = world
        self.seconds = seconds  # the longest call
        self.is_full = False
        self.meanwhile: Callable[[], object] = lambda: None

    def writev(self, descriptor: int, parts: Sequence[Buffer]) -> int:
        self._take_time()
        if not self.is_full:
            return os.writev(descriptor, parts)
        if self._world.random.random() < 0.5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, b"".join(parts)[: self._world.random.randrange(FILE_BYTES)])

    def preadv(self, descriptor: int, parts: Sequence[Buffer], offset: int) -> int:
        self._take_time()
        return os.preadv(descriptor, parts, offset)

    def _take_time(self) -> None:
        self._world.sleep(self.seconds * self._world.random.random())
        self.meanwhile()


class Array:
    """An array of blocks. `meanwhile` is called when the writer copies one."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape = array.shape
        self.meanwhile: Callable[[], object] = lambda: None

    def __getitem__(self, block: int) -> np.ndarray:
        half = self.array[block].copy()
        self.meanwhile()
        half[1::2] = self.array[block][1::2]
        return half

    def __setitem__(self, blocks: Any, rows: Any) -> None:
        self.array[blocks] = rows


class Tier:
    """A tier in a world, on a pool of small blocks, which it reads in pieces of three, and its engine thread."""

    def __init__(
        self,
        world: World,
        folder: Path,
        *,
        most_blocks: int = 1000,
        seconds: float = 0.01,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.world = world
        self.disk = Disk(world, seconds)
        self.files = self.opened(most_blocks)
        self.pool = BlockPool(num_blocks, 16)
        self.arrays = [Array(np.zeros((num_blocks, size), np.uint8)) for size in BLOCK_BYTES]
        self.engine = world.worker("engine", self._turn)
        storage: Any = KeptBlocks(self.files, self.arrays)
        self.tier = DiskTier(storage, self.pool, self.engine.post, world, piece_bytes=3 * sum(BLOCK_BYTES))
        self.num_offered = 0  # to be written
        self.pieces: list[BlocksRead] = []
        self.awaited: list[BlockHash | None] = []  # One for each piece.
        self.on_take: Callable[[BlocksRead], object] = lambda read: None

    def opened(self, most_blocks: int = 1000) -> BlockFiles:
        calls: dict[str, Any] = {"writev": self.disk.writev, "preadv": self.disk.preadv}
        return BlockFiles(self.folder, sum(BLOCK_BYTES), most_blocks * FILE_BYTES, **calls)

    def start(self) -> None:
        self.engine.start()
        self.tier.start()

    def stop(self) -> None:
        """Stop as an engine does, and check that nothing is left."""
        self.engine.end()
        self.tier.stop()
        assert not self.tier._reader.is_alive
        assert not self.tier._writer.is_alive
        self.pool.check_integrity()

    def _turn(self) -> int | None:
        try:
            read = self.engine.take()
        except Empty:
            return None
        self.awaited.append(self.tier.take(read))
        self.pieces.append(read)
        self.on_take(read)
        return AT_ONCE

    def fill(self, hashes: list[BlockHash], num_cached: int = 0) -> list[int] | None:
        """Compute blocks with these hashes after those that are cached, and publish and offer them."""
        cached = [block for one in hashes[:num_cached] if (block := self.pool.find(one)) is not None]
        blocks = self.pool.allocate(len(hashes) - num_cached, cached)
        if blocks is None:
            return None
        for i in range(num_cached, len(hashes)):
            self.set(blocks[i], hashes[i])
            self.num_offered += hashes[i] not in self.files
            self.tier.offer(blocks[i], hashes[i], hashes[i - 1] if i else None)
        self.pool.release(blocks)
        return blocks

    def set(self, block: int, block_hash: BlockHash) -> None:
        for array, content in zip(self.arrays, contents_of(block_hash), strict=True):
            array.array[block] = content
        self.pool.publish(block, block_hash)

    def written(self, length: int) -> list[BlockHash]:
        """Compute a chain of blocks, which are written. Return their hashes."""
        self.fill(hashes := chain(length))
        self.start()
        self.world.run_until()
        assert self.tier.num_written + self.tier.num_skipped == self.num_offered
        return hashes

    def check_contents(self) -> None:
        for block_hash, block in self.pool._published.items():
            for array, content in zip(self.arrays, contents_of(block_hash), strict=True):
                assert (array.array[block] == content).all(), "a block has the content of another one"


def contents_of(block_hash: BlockHash) -> list[np.ndarray]:
    """Return the content of a block in each array."""
    return [np.resize(np.frombuffer(block_hash, np.uint8), size) for size in BLOCK_BYTES]


def chain(length: int, salt: str = "", before: tuple[BlockHash, ...] = ()) -> list[BlockHash]:
    hashes = [*before] or [hash_block(None, [0], salt)]
    while len(hashes) < length:
        hashes.append(hash_block(hashes[-1], [len(hashes)], salt))
    return hashes


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[World], Path]:
    """Return the folder for the files of a world."""
    return lambda world: tmp_path / f"{world.seed}"


@schedules(20)
def test_what_was_written_gets_into_an_empty_cache_in_pieces(world: World, folder: Callable[[World], Path]) -> None:
    tier = Tier(world, folder(world))
    hashes = tier.written(8)
    tier.stop()
    again = Tier(world, folder(world))
    one = sequence("a")
    assert again.tier.ask(one, hashes, 0) == hashes[-1]
    assert again.tier.ask(sequence("b"), hashes, 0) == hashes[-1], "another one waits for the same"
    again.start()
    world.run_until()
    assert [len(read.hashes) for read in again.pieces] == [3, 3, 2]
    assert again.awaited == [None, None, hashes[-1]]
    assert all(again.pool.find(one) is not None for one in hashes)
    again.check_contents()
    assert again.tier.ask(one, hashes, 0) is None, "a sequence asks once"
    again.stop()


@schedules(20)
def test_all_that_waits_is_written_at_a_stop(world: World, folder: Callable[[World], Path]) -> None:
    tier = Tier(world, folder(world))
    tier.fill(hashes := chain(8))
    tier.start()
    world.run_until(most_seconds=0.05 * world.random.random())
    tier.stop()
    assert all(one in tier.files for one in hashes)
    assert (tier.tier.num_written, tier.tier.num_skipped) == (8, 0)
    assert not tier.tier._writer.num_waiting()


@schedules(20)
def test_a_stop_waits_only_for_some_seconds_for_a_slow_disk(world: World, folder: Callable[[World], Path]) -> None:
    tier = Tier(world, folder(world), seconds=4.0)
    tier.fill(chain(12))
    tier.start()
    world.run_until(most_seconds=8 * world.random.random())
    began_ns = world.clock_ns()
    tier.engine.end()
    tier.tier.stop()
    assert world.clock_ns() - began_ns <= (STOP_SECONDS + 4.0) * 1e9
    world.run_until()
    assert not tier.tier._writer.is_alive


@schedules(20)
def test_a_block_that_memory_has_lost_before_it_was_written_is_skipped(
    world: World, folder: Callable[[World], Path]
) -> None:
    tier = Tier(world, folder(world))
    tier.fill(chain(8))
    tier.fill(chain(NUM_BLOCKS, "other"))  # takes all blocks
    tier.start()
    world.run_until()
    # More than there are blocks never wait.
    assert (tier.tier.num_written, tier.tier.num_skipped) == (4, 8 + 8)
    assert not any(one in tier.files for one in chain(8))
    tier.stop()


@schedules(20)
def test_what_is_read_does_not_take_the_place_of_what_comes_before_it(
    world: World, folder: Callable[[World], Path]
) -> None:
    tier = Tier(world, folder(world))
    hashes = tier.written(9)
    tier.fill(chain(NUM_BLOCKS, "other"))
    blocks = tier.pool.allocate(5)  # Seven blocks are left.
    assert blocks is not None
    tier.fill(hashes[:2])
    assert tier.tier.ask(sequence("a"), hashes, 2) == hashes[-1]
    world.run_until()
    assert tier.awaited.count(hashes[-1]) == 1, "waiting requests are informed, although there was no room"
    in_memory = [tier.pool.find(one) is not None for one in hashes]
    assert in_memory == sorted(in_memory, reverse=True), "a beginning without a gap"
    assert sum(in_memory) >= 5
    tier.pool.release(blocks)
    tier.stop()


@schedules(20)
def test_blocks_of_a_piece_that_are_in_memory_do_not_make_room_for_the_others(
    world: World, folder: Callable[[World], Path]
) -> None:
    tier = Tier(world, folder(world))
    hashes = tier.written(4)
    other = chain(NUM_BLOCKS, "other")
    tier.fill(other)
    held = tier.pool.allocate(NUM_BLOCKS - 3)
    assert held is not None
    assert tier.tier.ask(sequence("a"), hashes, 0) == hashes[-1]
    computed = tier.pool.allocate(1)
    assert computed is not None
    tier.set(computed[0], hashes[1])  # by another sequence
    tier.pool.release(computed)
    used_later = tier.pool.allocate(0, [block for one in other if (block := tier.pool.find(one)) is not None])
    assert used_later is not None
    tier.pool.release(used_later)
    assert len(used_later) == 2
    world.run_until()
    assert [tier.pool.find(one) is not None for one in hashes] == [True, True, True, False], "there is room for three"
    tier.check_contents()
    tier.pool.release(held)
    tier.stop()


@schedules(20)
def test_a_prompt_whose_rest_is_being_read_gets_the_beginning_that_memory_has_lost(
    world: World, folder: Callable[[World], Path]
) -> None:
    tier = Tier(world, folder(world))
    hashes = tier.written(9)
    tier.fill(chain(NUM_BLOCKS, "other"))
    tier.fill(hashes[:4])
    assert tier.tier.ask(sequence("a"), hashes, 4) == hashes[-1]
    tier.fill(chain(NUM_BLOCKS, "other"))
    assert tier.tier.ask(sequence("b"), hashes, 0) == hashes[3]
    world.run_until()
    assert not world.wrong
    assert [one for one in tier.awaited if one is not None] == [hashes[-1], hashes[3]]
    assert not tier.tier.on_their_way
    tier.check_contents()
    tier.stop()


@schedules(20)
def test_of_a_row_with_a_broken_block_the_blocks_before_it_are_taken(
    world: World, folder: Callable[[World], Path]
) -> None:
    tier = Tier(world, folder(world))
    hashes = tier.written(8)
    tier.fill(chain(NUM_BLOCKS, "other"))
    (broken,) = folder(world).glob(f"{hashes[4].hex()}-*")
    broken.write_bytes(b"")
    tier.tier.ask(sequence("a"), hashes, 0)
    world.run_until()
    assert tier.awaited == [None, hashes[-1]]
    assert [tier.pool.find(one) is not None for one in hashes] == [True] * 4 + [False] * 4
    assert not tier.tier.on_their_way
    tier.stop()


@schedules(5)
def test_a_short_beginning_is_computed(world: World, folder: Callable[[World], Path]) -> None:
    tier = Tier(world, folder(world))
    assert tier.tier.ask(sequence("a"), tier.written(3), 0) is None


@schedules(20)
def test_a_chain_is_written_in_its_order(world: World, folder: Callable[[World], Path]) -> None:
    hashes = Tier(world, folder(world)).written(5)
    result = {path.name for path in folder(world).iterdir()}
    assert result == {f"{hashes[0].hex()}-", *(f"{b.hex()}-{a.hex()}" for a, b in pairwise(hashes))}


# -- whatever the order -----------------------------------------------------------------------------------------------

FIRST = chain(3, "common")
PROMPTS = [chain(length, salt, (*FIRST[:common],)) for salt, length, common in (("a", 9, 3), ("b", 8, 3), ("c", 6, 0))]


@dataclass
class Engines:
    """What an engine and a disk with faults do, in any order: compute, wait for blocks, evict, spoil files."""

    tier: Tier
    has_faults: bool
    waits: dict[str, BlockHash] = field(default_factory=dict)  # by sequence
    over: list[Reading] = field(default_factory=list)
    accepted: list[tuple[int, int, BlockHash, BlockHash | None]] = field(default_factory=list)
    held: list[list[int]] = field(default_factory=list)
    num_asked: int = 0

    def act(self) -> None:
        """Do one thing that can happen at any time."""
        draw = self.tier.world.random
        acts = [self.compute, self.compute, self.ask, self.ask, self.evict, self.hold, self.let_go]
        if self.has_faults:
            acts += [self.damage, self.fill_disk]
        draw.choice(acts)()
        self.check()

    def check(self) -> None:
        self.tier.pool.check_integrity()
        self.tier.check_contents()

    def prompt(self) -> tuple[list[BlockHash], int]:
        """Return the hashes of a prompt, and how many are in memory before the first that isn't."""
        draw = self.tier.world.random
        hashes = draw.choice(PROMPTS)
        hashes = hashes[: draw.randint(1, len(hashes))]
        num_cached = next((i for i, one in enumerate(hashes) if self.tier.pool.find(one) is None), len(hashes))
        return hashes, num_cached

    def compute(self) -> None:
        hashes, num_cached = self.prompt()
        tier = self.tier
        has_room = tier.tier._writer.num_waiting() + len(hashes) <= tier.pool.num_blocks
        on_disk = {one for one in hashes if one in tier.files}
        blocks = tier.fill(hashes, num_cached)
        if blocks is not None and has_room:
            for i in range(num_cached, len(hashes)):
                if hashes[i] not in on_disk and tier.pool.find(hashes[i]) == blocks[i]:
                    parent = hashes[i - 1] if i else None
                    self.accepted.append((blocks[i], tier.pool.allocations[blocks[i]], hashes[i], parent))

    def ask(self) -> None:
        hashes, num_cached = self.prompt()
        self.num_asked += 1
        name = f"{self.num_asked}"
        awaited = self.tier.tier.ask(sequence(name), hashes, num_cached)
        if awaited is not None:
            self.waits[name] = awaited

    def evict(self) -> None:
        self.hold()
        self.let_go()

    def hold(self) -> None:
        """Let a sequence without cached blocks write to some."""
        tier = self.tier
        blocks = tier.pool.allocate(tier.world.random.randint(1, 6))
        if blocks is not None:
            self.held.append(blocks)
            for array in tier.arrays:
                array.array[blocks] = 255

    def let_go(self) -> None:
        if self.held:
            self.tier.pool.release(self.held.pop())

    def damage(self) -> None:
        draw = self.tier.world.random
        paths = sorted(path for path in self.tier.folder.iterdir() if not path.name.startswith("."))
        if not paths:
            return
        path = draw.choice(paths)
        how = draw.choice(["changed", "cut", "gone"])
        if how == "gone":
            path.unlink()
        elif how == "cut":
            os.truncate(path, draw.randrange(FILE_BYTES))
        elif content := bytearray(path.read_bytes()):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)

    def fill_disk(self) -> None:
        self.tier.disk.is_full = not self.tier.disk.is_full

    def taken(self, read: BlocksRead) -> None:
        """Note what the engine thread has taken: a reading ends once, and nothing of it comes after."""
        awaited = self.tier.awaited[-1]
        if read.hashes and read.reading.before[-len(read.hashes) :] == read.hashes:
            in_memory = [self.tier.pool.find(one) is not None for one in read.hashes]
            assert all(in_memory), "blocks of a piece make room for others of it"
        if awaited is None:
            return self.check()
        assert not any(read.reading is other for other in self.over), "a reading has ended twice"
        self.over.append(read.reading)
        assert awaited == read.reading.hashes[-1]
        self.waits = {name: one for name, one in self.waits.items() if one != awaited}
        self.check()


@schedules(300)
def test_no_block_is_lost_or_another_ones_whatever_happens(world: World, folder: Callable[[World], Path]) -> None:
    draw = world.random
    has_faults = draw.random() < 0.5
    most_blocks = draw.choice([4, 10, 1000])
    tier = Tier(world, folder(world), most_blocks=most_blocks, seconds=draw.choice([0.0, 0.001, 0.05]))
    engines = Engines(tier, has_faults)
    tier.on_take = engines.taken
    for part in (tier.disk, *tier.arrays):
        part.meanwhile = lambda: engines.act() if tier.engine.is_alive and draw.random() < 0.05 else None
    world.call_later(0.5 * draw.random(), tier.start)
    for _ in range(40):
        world.call_later(draw.random(), lambda: engines.act() if not tier.engine.has_ended else None)
    if draw.random() < 0.5:
        world.run_until()
        assert not world.wrong
        assert not engines.waits, "a sequence waits for a block that nobody brings"
        assert not tier.tier.on_their_way
        assert len(tier.tier._room) == ON_THEIR_WAY
    else:
        world.run_until(most_seconds=0.5 + 0.5 * draw.random())
    tier.stop()
    world.run_until()
    assert not world.wrong
    assert tier.tier._writer.num_waiting() == tier.tier._reader.num_waiting() == 0
    assert tier.tier.num_written + tier.tier.num_skipped == tier.num_offered
    files = tier.opened()
    if not has_faults and most_blocks == 1000:
        for block, allocation, block_hash, parent in engines.accepted:
            if tier.pool.allocations[block] == allocation and (parent is None or parent in files):
                assert block_hash in files
    for block_hash in {one for hashes in PROMPTS for one in hashes}:
        content = bytearray(sum(BLOCK_BYTES))
        if files.read(block_hash, memoryview(content)):
            assert content == b"".join(part.tobytes() for part in contents_of(block_hash))
