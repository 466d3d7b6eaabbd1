"""Tests of how fast wrong lines of batches are refused, in simulated time."""

import asyncio
import json
from itertools import pairwise
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from oaiserve.http.refusals import MOST_DELAY_NS, SHARE
from oaiserve.plugins.batches.objects import BatchObject, Counts, Line
from oaiserve.plugins.batches.refused_lines import FORGET_NS, LINE_NS, RefusedLines
from oaiserve.plugins.batches.runner import AHEAD, BatchRunner
from oaiserve.plugins.batches.store import Owned, Result
from tests.batching import CHAT, line
from tests.world.loop import START_SECONDS, World

MS = 1_000_000
NUM_LINES = 2000
USAGE = b'{"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
WRONG = "wrong"
MAX_RUNNING = 16
PLACES = MAX_RUNNING + AHEAD
OWNER = "owner"


class Clock:
    now_ns = 1_000_000 * MS

    def __call__(self) -> int:
        return self.now_ns


def test_owner_without_refused_lines_never_waits() -> None:
    accounts = RefusedLines(Clock())
    assert [accounts.begin(OWNER) for _ in range(1000)] == [0] * 1000
    assert accounts.wait_ns(OWNER) == 0


@pytest.mark.parametrize("cpu_ms", [0, 5, 30])
def test_refused_lines_take_a_small_share_of_a_core(cpu_ms: int) -> None:
    clock = Clock()
    accounts = RefusedLines(clock)
    accounts.refuse(OWNER, cpu_ms * MS, 0)
    began_ns = clock.now_ns
    number = 100
    for _ in range(number):
        clock.now_ns += accounts.wait_ns(OWNER)
        charged_ns = accounts.begin(OWNER)
        clock.now_ns += MS
        accounts.refuse(OWNER, cpu_ms * MS, charged_ns)
    share = number * (LINE_NS + cpu_ms * MS) / (clock.now_ns - began_ns)
    assert share == pytest.approx(SHARE, rel=0.05)


def test_wait_after_refused_lines_is_never_long() -> None:
    clock = Clock()
    accounts = RefusedLines(clock)
    for _ in range(1000):
        accounts.refuse(OWNER, 1000 * MS, 0)
    assert accounts.wait_ns(OWNER) == MOST_DELAY_NS
    clock.now_ns += MOST_DELAY_NS
    assert accounts.wait_ns(OWNER) == 0


def test_lines_begin_without_pauses_a_second_after_the_last_refused_one() -> None:
    clock = Clock()
    accounts = RefusedLines(clock)
    accounts.refuse(OWNER, 0, 0)
    clock.now_ns += FORGET_NS - 1
    assert accounts.wait_ns(OWNER) == 0
    assert accounts.begin(OWNER) == LINE_NS
    clock.now_ns += int(LINE_NS / SHARE)
    assert accounts.wait_ns(OWNER) == 0
    assert accounts.begin(OWNER) == 0


class Batches:
    """A store of batches by owner, and the server that answers them: it refuses the lines of WRONG, and takes a second
    for those of other owners."""

    capacity = {"max_running": MAX_RUNNING}  # noqa: RUF012
    is_ready = True
    is_shared = False
    keys = None

    def __init__(self, *owners: str, has_others: bool) -> None:
        self.engine = self
        self.has_others = lambda client: has_others
        self.seconds: dict[str, list[float]] = {owner: [] for owner in owners}  # when lines were done
        self._open = [Owned(self._batch(owner), owner) for owner in owners]

    def _batch(self, owner: str) -> BatchObject:
        expires_at = 2**60
        counts = Counts(NUM_LINES)
        return BatchObject(
            id=owner, endpoint=CHAT, input_file_id="a", created_at=0, expires_at=expires_at, request_counts=counts
        )

    def may_compute(self) -> bool:
        return True

    async def open_batches(self) -> list[Owned]:
        return self._open

    async def next_lines(self, batch_id: str, after: int) -> list[Line]:
        return [Line(number, str(number), 0, 100) for number in range(after + 1, min(after + 64, NUM_LINES) + 1)]

    async def slice(self, file: int, start: int, num_bytes: int) -> bytes:
        return json.dumps(line(1)).encode()

    async def put(self, owned: Owned, answered: Result) -> None:
        owned.batch.request_counts.failed += 1
        self.seconds[owned.owner].append(asyncio.get_running_loop().time() - START_SECONDS)

    async def end(self, owned: Owned, *given: str) -> bool:
        self._open.remove(owned)
        return True

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_wrong = scope["state"]["owner"] == WRONG
        if not is_wrong:
            await asyncio.sleep(1)
        await send({"type": "http.response.start", "status": 400 if is_wrong else 200, "headers": []})
        await send({"type": "http.response.body", "body": USAGE})


def computed(*owners: str, has_others: bool, seconds: float) -> Batches:
    """Return the batches after this time of a runner."""
    batches: Any = Batches(*owners, has_others=has_others)
    world = World(0)
    batches.runtime = world
    runner = BatchRunner(Starlette(), batches, batches)

    async def live() -> None:
        running = asyncio.create_task(runner.run())
        await asyncio.sleep(seconds)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    world.run_until_complete(live())
    world.end()
    assert not world.wrong
    return cast("Batches", batches)


def test_wrong_lines_are_refused_at_once_while_nobody_else_has_requests() -> None:
    batches = computed(WRONG, has_others=False, seconds=1)
    assert batches.seconds[WRONG] == [0.0] * NUM_LINES


def test_wrong_lines_are_refused_one_by_one_beside_requests_of_others() -> None:
    batches = computed(WRONG, has_others=True, seconds=10)
    seconds = batches.seconds[WRONG]
    pause = LINE_NS / SHARE / 1e9
    assert seconds[:PLACES] == [0.0] * PLACES, "nothing was known of the first lines"
    assert seconds[PLACES] == pytest.approx(PLACES * pause, abs=0.001)
    gaps = [after - before for before, after in pairwise(seconds[PLACES:])]
    assert gaps == pytest.approx([pause] * len(gaps), abs=0.001)
    assert len(seconds) == pytest.approx(10 / pause, abs=2)


@pytest.mark.parametrize("owners", [("right", WRONG), (WRONG, "right")])
def test_lines_of_other_owners_go_on_beside_wrong_ones(owners: tuple[str, str]) -> None:
    alone = computed("right", has_others=True, seconds=10)
    beside = computed(*owners, has_others=True, seconds=10)
    assert len(beside.seconds["right"]) >= 0.9 * len(alone.seconds["right"]) - PLACES
    assert len(beside.seconds[WRONG]) > PLACES // 2, "half of the first places, and some later"


def test_batches_share_places_that_become_free_one_by_one() -> None:
    """One batch began before the other, and so has all places. Its lines end one after the other."""
    batches = computed("a", "b", has_others=True, seconds=20)
    first, second = (len(batches.seconds[owner]) for owner in ("a", "b"))
    assert first == pytest.approx(second, abs=PLACES)
