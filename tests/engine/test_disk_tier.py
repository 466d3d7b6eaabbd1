"""The disk tier of the prefix cache: prompts are found after a restart, and answers are the same bytes."""

from __future__ import annotations

import importlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oaiserve.checkpoints.source import ModelSource
from oaiserve.config import EngineOptions
from oaiserve.engine import disk_tier
from oaiserve.engine.disk_tier import BlocksRead, DiskTier, KeptBlocks
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Finished, Request, TokenPrompt
from oaiserve.engine.scheduling.waits import QueueWaits
from oaiserve.engine.sequences.blocks import BlockHash, BlockPool, hash_block
from oaiserve.engine.start import kept_blocks
from oaiserve.errors import StartupError
from oaiserve.facts.record import WaitReason
from oaiserve.storage.block_files import BlockFiles, open_blocks
from tests.engine.answers import collect
from tests.engine.doubles import TIMEOUT_SECONDS
from tests.engine.executors.native.small_models import FAMILIES, make_model
from tests.engine.memory import sequence
from tests.engine.model.runners import greedy, greedy_answers
from tests.engine.remembered import save, started

PROMPT = [(7 * i + 1) % 97 for i in range(110)]  # six full blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(FAMILIES["llama"]), tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    monkeypatch.setattr(disk_tier, "STOP_SECONDS", 60.0)  # The writer may get no time for long on a busy machine.
    folder = tmp_path / "blocks"
    given: dict[str, Any] = {"prefix_cache_dir": folder, "device": "cpu", "cpu_threads": 1, "kv_blocks": 64}
    return lambda **options: started(model, **given | options)


def finished(engine: Engine, prompt: list[int], **fields: Any) -> Finished:
    ended = collect(engine, [Request("r", (TokenPrompt(prompt),), greedy(8), **fields)]).ended["r"]
    assert isinstance(ended, Finished)
    return ended


@pytest.mark.compiler
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"block_size": 32}])
def test_after_a_restart_a_prompt_is_found_and_its_answer_is_the_same(
    start: Callable[..., Engine], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_parked = threading.Event()
    park = QueueWaits.park
    read = BlockFiles.read

    def parking(waits: QueueWaits, *given: Any) -> None:
        park(waits, *given)
        is_parked.set()

    def reading(files: BlockFiles, *given: Any) -> bool:
        assert is_parked.wait(60)  # a faster read is over before the step in which the prompt would wait for it
        return read(files, *given)

    monkeypatch.setattr(QueueWaits, "park", parking)
    monkeypatch.setattr(BlockFiles, "read", reading)
    with start(**options) as engine:
        expected = greedy_answers(engine, [PROMPT])
        assert finished(engine, [3, *PROMPT]).usage.cached_tokens == 0
    size = options.get("block_size", 16)
    with start(**options) as engine:
        ended = finished(engine, PROMPT)
        assert ended.usage.cached_tokens == 109 // size * size
        assert ended.account.waits_ns[WaitReason.PREFIX_READ] > 0
        assert ended.account.num_restored_tokens == ended.usage.cached_tokens
        assert greedy_answers(engine, [PROMPT]) == expected
        assert engine.snapshot().num_blocks_read == 109 // size


@pytest.mark.compiler
def test_other_settings_and_other_salts_find_nothing(start: Callable[..., Engine]) -> None:
    with start() as engine:
        finished(engine, PROMPT)
    with start(kv_cache_dtype="int8") as engine:
        assert finished(engine, PROMPT).usage.cached_tokens == 0
    with start() as engine:
        assert finished(engine, PROMPT, cache_salt="another").usage.cached_tokens == 0


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["decoder/rotary.py", "decoder/defaults.json", "executors/native/native.py"])
def test_other_code_finds_nothing(
    start: Callable[..., Engine], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (kept_blocks._ENGINE / name).is_file()
    code = tmp_path / "engine" / name
    code.parent.mkdir(parents=True)
    monkeypatch.setattr(kept_blocks, "_ENGINE", tmp_path / "engine")
    found = []
    for content in ("one", "one", "another"):
        code.write_text(content)
        with start() as engine:
            found.append(finished(engine, PROMPT).usage.cached_tokens > 0)
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
def test_beneath_a_small_cache_answers_stay_the_same_whatever_is_read_and_written(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with common beginnings come at random, some at once, and memory holds a fifth of them."""
    # On a busy machine, a thread that runs when all others are idle would write nothing.
    monkeypatch.setattr("os.sched_setscheduler", lambda *_: None)
    chance = random.Random(5)
    common = [[chance.randrange(97) for _ in range(80)] for _ in range(6)]
    prompts = [
        [*chance.choice(common), *(chance.randrange(97) for _ in range(chance.randrange(1, 30)))] for _ in range(40)
    ]
    with start(prefix_cache_dir=None) as engine:
        expected = greedy_answers(engine, prompts)
    with start(kv_blocks=20) as engine:
        outcome = [answer for i in range(0, 40, 4) for answer in greedy_answers(engine, prompts[i : i + 4])]
        num_read = engine.snapshot().num_blocks_read
    with start(kv_blocks=20) as engine:  # what the first one wrote at its end is on disk
        outcome += [answer for prompt in prompts for answer in greedy_answers(engine, [prompt])]
        assert num_read + engine.snapshot().num_blocks_read > 0
    assert outcome == expected * 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"compile": False}, "needs the native step"), ({"prefix_cache": False}, "blocks of that cache")],
)
def test_it_is_refused_where_it_could_do_nothing(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        Engine.from_pretrained("demo", prefix_cache_dir=tmp_path, **options)


@pytest.mark.compiler
def test_a_folder_of_others_is_refused_with_its_reason(start: Callable[..., Engine], tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks").chmod(0o777)
    with pytest.raises(StartupError, match="cannot be used: other users can write to"):
        start()


# -- the tier alone ---------------------------------------------------------------------------------------------------

NUM_BLOCKS = 12
BLOCK_BYTES = (40, 24)


class Tier:
    """A tier on a pool of small blocks, which it reads in pieces of three. Its threads start with the first write."""

    def __init__(self, folder: Path) -> None:
        self.pool = BlockPool(NUM_BLOCKS, 16)
        self.arrays = [np.zeros((NUM_BLOCKS, size), np.uint8) for size in BLOCK_BYTES]
        self.arrived: SimpleQueue[BlocksRead] = SimpleQueue()
        self.files = open_blocks(folder, "kind", sum(BLOCK_BYTES), 1 << 20)
        self.tier = DiskTier(KeptBlocks(self.files, self.arrays), self.pool, self.arrived.put)
        self.num_offered = 0

    def fill(self, hashes: list[BlockHash]) -> None:
        """Compute blocks with these hashes, publish and offer them."""
        blocks = self.pool.allocate(len(hashes))
        assert blocks is not None
        for i, (block, one) in enumerate(zip(blocks, hashes, strict=True)):
            for array in self.arrays:
                array[block] = one[0]
            self.pool.publish(block, one)
            self.tier.offer(block, one, hashes[i - 1] if i else None)
        self.pool.release(blocks)
        self.num_offered += len(hashes)

    def written(self, length: int) -> list[BlockHash]:
        """Compute a chain of blocks, which are written. Return their hashes."""
        self.fill(hashes := chain(length))
        self.write_all()
        return hashes

    def write_all(self) -> None:
        self.tier.start()
        until = time.monotonic() + TIMEOUT_SECONDS
        while self.tier.num_written + self.tier.num_skipped < self.num_offered:
            assert time.monotonic() < until, "not all blocks are written"
            time.sleep(0.001)

    def take_all(self) -> tuple[list[BlocksRead], list[BlockHash | None]]:
        """Take a reading as the engine thread does. Return its pieces, and what each of them was awaited for."""
        pieces = []
        awaited = []
        while not pieces or not (pieces[-1].is_last or pieces[-1].reading.is_over):
            pieces.append(self.arrived.get(timeout=TIMEOUT_SECONDS))
            awaited.append(self.tier.take(pieces[-1]))
        return pieces, awaited


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    monkeypatch.setattr(disk_tier, "PIECE_BYTES", 3 * sum(BLOCK_BYTES))
    # On a busy machine, a thread that runs when all others are idle would write nothing.
    monkeypatch.setattr("os.sched_setscheduler", lambda *_: None)
    result = Tier(tmp_path)
    yield result
    result.tier.stop()
    result.pool.check_integrity()


def chain(length: int, salt: str = "") -> list[BlockHash]:
    hashes = [hash_block(None, [0], salt)]
    while len(hashes) < length:
        hashes.append(hash_block(hashes[-1], [len(hashes)]))
    return hashes


def test_what_was_written_gets_into_an_empty_cache_in_pieces(tmp_path: Path, tier: Tier) -> None:
    hashes = tier.written(8)
    again = Tier(tmp_path)
    one = sequence("a")
    assert again.tier.ask(one, hashes, 0) == hashes[-1]
    assert again.tier.ask(sequence("b"), hashes, 0) == hashes[-1], "another one waits for the same"
    again.tier.start()
    pieces, awaited = again.take_all()
    again.tier.stop()
    assert [len(read.hashes) for read in pieces] == [3, 3, 2]
    assert awaited == [None, None, hashes[-1]]
    for block_hash in hashes:
        block = again.pool.find(block_hash)
        assert block is not None
        assert all((array[block] == block_hash[0]).all() for array in again.arrays)
    assert again.tier.ask(one, hashes, 0) is None, "a sequence asks once"
    again.pool.check_integrity()


def test_all_that_waits_is_written_at_a_stop_without_the_right_to_set_priorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who is not root may lower the priority of a thread, but not raise it. A sandbox may forbid both."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.sched_setscheduler", refuse)
    tier = Tier(tmp_path)
    tier.fill(hashes := chain(8))
    tier.tier.start()
    tier.tier.stop()
    assert all(one in tier.files for one in hashes)
    assert (tier.tier.num_written, tier.tier.num_skipped) == (8, 0)


def test_a_block_that_memory_has_lost_before_it_was_written_is_skipped(tier: Tier) -> None:
    tier.fill(chain(8))
    tier.fill(chain(NUM_BLOCKS, "other"))  # takes all blocks
    tier.write_all()
    # More than there are blocks never wait.
    assert (tier.tier.num_written, tier.tier.num_skipped) == (4, 8 + 8)
    assert not any(one in tier.files for one in chain(8))


def test_what_is_read_does_not_take_the_place_of_what_comes_before_it(tier: Tier) -> None:
    hashes = tier.written(9)
    tier.fill(chain(NUM_BLOCKS, "other"))
    blocks = tier.pool.allocate(5)  # Seven blocks are left.
    assert blocks is not None
    tier.fill(hashes[:2])
    assert tier.tier.ask(sequence("a"), hashes, 2) == hashes[-1]
    _, awaited = tier.take_all()
    assert awaited[-1] == hashes[-1], "waiting requests are informed, although there was no room"
    in_memory = [tier.pool.find(one) is not None for one in hashes]
    assert in_memory == sorted(in_memory, reverse=True), "a beginning without a gap"
    assert sum(in_memory) >= 5
    tier.pool.release(blocks)


def test_of_a_row_with_a_broken_block_the_blocks_before_it_are_taken(tier: Tier, tmp_path: Path) -> None:
    hashes = tier.written(8)
    tier.fill(chain(NUM_BLOCKS, "other"))
    (broken,) = (tmp_path / "kind").glob(f"{hashes[4].hex()}-*")
    broken.write_bytes(b"")
    tier.tier.ask(sequence("a"), hashes, 0)
    assert tier.take_all()[1] == [None, hashes[-1]]
    assert [tier.pool.find(one) is not None for one in hashes] == [True] * 4 + [False] * 4
    assert not tier.tier.on_their_way


def test_a_short_beginning_is_computed(tier: Tier) -> None:
    assert tier.tier.ask(sequence("a"), tier.written(3), 0) is None


def test_a_chain_is_written_in_its_order(tier: Tier, tmp_path: Path) -> None:
    hashes = tier.written(5)
    result = {path.name for path in (tmp_path / "kind").iterdir()}
    assert result == {f"{hashes[0].hex()}-", *(f"{b.hex()}-{a.hex()}" for a, b in pairwise(hashes))}
