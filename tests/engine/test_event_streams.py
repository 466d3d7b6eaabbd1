"""Streams: what gathers while a reader is busy, and what happens to a slow reader."""

import asyncio
from collections.abc import Callable

import pytest

from oaiserve.engine.event_streams import MAX_CHUNK_TOKENS, STALLED_NS, HeldTokens, LoopStream, LoopStreams
from oaiserve.engine.request import (
    Aborted,
    Deliver,
    Event,
    Finished,
    FinishReason,
    PromptDone,
    Request,
    TokenChunk,
    Usage,
)
from oaiserve.facts.record import EngineAccount
from oaiserve.facts.times import RequestTimes
from oaiserve.runtime import THREADS
from tests.engine.doubles import Clock
from tests.engine.logprobs_for_tests import token_logprobs

USAGE = Usage(0, 0, 0)
TIMES = RequestTimes(received=1)
ACCOUNT = EngineAccount()


class FakeEngine:
    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.deliver: Deliver

    def submit(self, request: Request, deliver: Deliver) -> None:
        self.deliver = deliver

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def chunk(text: str, index: int = 0, num_top: int | None = None, **fields: object) -> TokenChunk:
    """Return a chunk in which each letter is a token."""
    logprobs = None
    if num_top is not None:
        logprobs = token_logprobs(*([(ord(c), c.encode(), -1.0), *[(0, b"t", -1.0)] * num_top] for c in text))
    return TokenChunk("r", index, text, [ord(letter) for letter in text], logprobs, **fields)


def gathered(*events: Event) -> list[Event]:
    """Return the events for a reader that was busy during all of these."""
    stream = LoopStream(Request("r", ()), FakeEngine(), HeldTokens(THREADS.clock_ns))
    for event in events:
        stream.push(event)
    return asyncio.run(stream.next())


STOP = {"finish_reason": FinishReason.STOP, "stop_reason": "!", "has_end_token": True}


@pytest.mark.parametrize(
    ("events", "joined"),
    [
        ([chunk("a"), chunk("b"), chunk("c")], [chunk("abc")]),
        ([chunk("a", 0), chunk("x", 1), chunk("b", 0), chunk("y", 1)], [chunk("ab", 0), chunk("xy", 1)]),
        ([chunk("a", num_top=2), chunk("b", num_top=2)], [chunk("ab", num_top=2)]),
        ([chunk("a"), chunk("b", **STOP)], [chunk("ab", **STOP)]),
        ([chunk("a", text_lengths=[1]), chunk("bc", text_lengths=[0, 2])], [chunk("abc", text_lengths=[1, 0, 2])]),
    ],
    ids=["tokens", "choices", "logprobs", "an end", "lengths of texts"],
)
def test_tokens_of_a_choice_that_gather_are_one_chunk(events: list[Event], joined: list[Event]) -> None:
    assert gathered(*events) == joined


def test_a_chunk_never_comes_before_the_data_of_its_prompt() -> None:
    first, second = (PromptDone("r", index, [1], None, TIMES) for index in range(2))
    events = [first, chunk("a", 0), second, chunk("x", 1), chunk("b", 0), Finished("r", USAGE, TIMES, ACCOUNT)]
    assert gathered(*events) == [first, chunk("ab", 0), second, chunk("x", 1), Finished("r", USAGE, TIMES, ACCOUNT)]


@pytest.mark.parametrize(("num_top", "num_tokens"), [(None, 2 * MAX_CHUNK_TOKENS), (20, 30)])
def test_a_chunk_is_no_larger_than_what_is_rendered_at_once(num_top: int | None, num_tokens: int) -> None:
    events = gathered(*(chunk("a", num_top=num_top) for _ in range(num_tokens)))
    sizes = [len(event.token_ids) for event in events if isinstance(event, TokenChunk)]
    assert len(sizes) > 1
    assert sum(sizes) == num_tokens
    assert max(sizes) * (1 + (num_top or 0)) <= MAX_CHUNK_TOKENS


async def waiting_reader(writer: Callable[[TokenChunk], bool]) -> tuple[LoopStream, asyncio.Task[list[Event]]]:
    """Return a stream with this `write_at_once`, and its reader, which waits."""
    stream = LoopStream(Request("r", ()), FakeEngine(), HeldTokens(THREADS.clock_ns))
    stream.write_at_once = writer
    reading = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    return stream, reading


async def test_chunks_for_a_reader_that_waits_are_written_without_it() -> None:
    written: list[TokenChunk] = []
    stream, reading = await waiting_reader(lambda chunk: written.append(chunk) is None and len(written) < 3)
    for letter in "abc":
        stream.push(chunk(letter))
    await asyncio.sleep(0)
    # Its client doesn't take the third one, which is left to the reader.
    assert written == [chunk(letter) for letter in "abc"]
    assert await reading == [chunk("c")]


@pytest.mark.parametrize("event", [chunk("a", **STOP), chunk("a" * (MAX_CHUNK_TOKENS + 1))], ids=["an end", "too long"])
async def test_the_reader_writes_ends_and_long_chunks(event: TokenChunk) -> None:
    stream, reading = await waiting_reader(pytest.fail)
    stream.push(event)
    stream.push(chunk("b", 1))  # It stays behind the event that the reader has not written yet.
    assert await reading == [event, chunk("b", 1)]


async def test_the_reader_gets_the_error_of_a_chunk_that_cannot_be_written() -> None:
    def fail(chunk: TokenChunk) -> bool:
        raise ValueError(chunk.text)

    stream, reading = await waiting_reader(fail)
    stream.push(chunk("a"))
    stream.push(chunk("b"))
    with pytest.raises(ValueError, match="a"):
        await reading


async def test_a_chunk_that_was_read_does_not_change_any_more() -> None:
    stream = LoopStream(Request("r", ()), FakeEngine(), HeldTokens(THREADS.clock_ns))
    stream.push(chunk("a"))
    events = await stream.next()
    stream.push(chunk("b"))
    assert (events, await stream.next()) == ([chunk("a")], [chunk("b")])


class WaitingReader:
    """A stream of an event loop, whose reader waits, and what was written for it."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        streams = LoopStreams(self.engine, asyncio.get_running_loop(), THREADS.clock_ns)
        self.stream = streams.submit(Request("r", ()))
        self.written: list[TokenChunk] = []
        self.stream.write_at_once = lambda chunk: self.written.append(chunk) is None
        self.reading = asyncio.create_task(self.stream.next())

    async def get(self, *steps: list[Event]) -> None:
        """Let all steps end while the event loop is busy, and then let it look."""
        await asyncio.sleep(0)
        for events in steps:
            self.engine.deliver(events)
        for _ in range(2):
            await asyncio.sleep(0)


async def test_tokens_of_steps_that_a_busy_loop_has_not_seen_are_written_once() -> None:
    reader = WaitingReader()
    await reader.get([chunk("a"), chunk("x", 1)], [chunk("b")], [chunk("y", 1), chunk("c")])
    assert reader.written == [chunk("abc"), chunk("xy", 1)]
    await reader.get([chunk("d")])
    assert reader.written[2:] == [chunk("d")]
    reader.reading.cancel()


async def test_chunks_of_several_steps_stay_behind_the_data_of_their_prompt() -> None:
    reader = WaitingReader()
    prompt = PromptDone("r", 1, [1], None, TIMES)
    await reader.get([chunk("a")], [prompt], [chunk("b")], [chunk("c", **STOP)], [Finished("r", USAGE, TIMES, ACCOUNT)])
    assert reader.written == [chunk("a")]
    assert await reader.reading == [prompt, chunk("bc", **STOP), Finished("r", USAGE, TIMES, ACCOUNT)]


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk("a", was_sent=True), chunk("b")],
        [chunk("a"), chunk("b", was_sent=True)],
        [chunk("a"), chunk("b" * MAX_CHUNK_TOKENS)],
    ],
)
async def test_chunks_of_several_steps_stay_apart_that_another_server_sent_or_that_are_long(
    chunks: list[TokenChunk],
) -> None:
    reader = WaitingReader()
    await reader.get(*([each] for each in chunks))
    assert reader.written == chunks
    reader.reading.cancel()


# -- readers that are too slow ----------------------------------------------------------------------------------------


def test_a_reader_that_falls_too_far_behind_is_aborted_once() -> None:
    engine = FakeEngine()
    stream = LoopStream(Request("r", ()), engine, HeldTokens(THREADS.clock_ns), max_unread_tokens=3)
    for letter in "abc":
        stream.push(chunk(letter))
    assert (stream.too_slow, engine.aborted) == (False, [])
    for letter in "de":
        stream.push(chunk(letter))
    assert (stream.too_slow, engine.aborted) == (True, ["r"])
    stream.push(Aborted("r", USAGE, TIMES, ACCOUNT))
    assert asyncio.run(stream.next()) == [chunk("abcde"), Aborted("r", USAGE, TIMES, ACCOUNT)]


def test_alternatives_count_as_tokens() -> None:
    stream = LoopStream(Request("r", ()), FakeEngine(), HeldTokens(THREADS.clock_ns), max_unread_tokens=20)
    stream.push(chunk("a", num_top=20))
    assert stream.too_slow


async def test_a_reader_that_keeps_up_is_never_too_slow() -> None:
    stream = LoopStream(Request("r", ()), FakeEngine(), HeldTokens(THREADS.clock_ns), max_unread_tokens=3)
    for _ in range(10):
        stream.push(chunk("abc"))
        await stream.next()
    assert not stream.too_slow


async def test_a_reader_that_waits_is_not_too_slow_however_much_a_step_brings() -> None:
    stream = LoopStream(Request("r", ()), FakeEngine(), HeldTokens(THREADS.clock_ns), max_unread_tokens=3)
    reader = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    for index in range(5):
        stream.push(chunk("ab", index))
    assert (len(await reader), stream.too_slow) == (5, False)


# -- what all streams hold together -----------------------------------------------------------------------------------


async def reader_that_stopped(held: HeldTokens, engine: FakeEngine, name: str, text: str) -> LoopStream:
    """Return a stream whose reader took this text, and has been writing it since."""
    stream = LoopStream(Request(name, ()), engine, held)
    held.streams.add(stream)
    stream.push(chunk(text))
    await stream.next()
    return stream


async def test_the_reader_that_holds_most_for_longest_is_cut_when_all_hold_too_much() -> None:
    clock = Clock()
    held = HeldTokens(clock, limit=10)
    engine = FakeEngine()
    small = await reader_that_stopped(held, engine, "small", "ab")
    large = await reader_that_stopped(held, engine, "large", "abcd")
    clock.now_ns += 2 * STALLED_NS
    quick = await reader_that_stopped(held, engine, "quick", "abcdef")
    cut: list[str] = []
    large.on_cut = lambda: cut.append("large")
    held.check()
    assert (engine.aborted, cut, held.number) == (["large"], ["large"], 8)
    assert (quick.too_slow, small.too_slow, large.too_slow) == (False, False, True)


async def test_a_reader_that_takes_a_piece_is_not_behind_any_more() -> None:
    clock = Clock()
    held = HeldTokens(clock, limit=5)
    engine = FakeEngine()
    reads = await reader_that_stopped(held, engine, "reads", "abcd")
    await reader_that_stopped(held, engine, "stopped", "ab")
    clock.now_ns += 2 * STALLED_NS
    reads.progressed()
    held.check()
    assert engine.aborted == ["stopped"]


async def test_if_no_reader_is_behind_the_largest_answer_that_is_kept_is_cut() -> None:
    held = HeldTokens(THREADS.clock_ns, limit=12)
    engine = FakeEngine()
    writes = await reader_that_stopped(held, engine, "writes", "abcdef")
    stalled = [await reader_that_stopped(held, engine, name, name) for name in ("four", "three")]
    waits = [asyncio.create_task(stream.next(keeps=True)) for stream in stalled]
    await asyncio.sleep(0)
    held.check()
    assert (engine.aborted, writes.too_slow, held.number) == (["three"], False, 10)
    stalled[1].push(chunk("more"))
    stalled[1].push(Aborted("three", USAGE, TIMES, ACCOUNT))
    assert await waits[1] == [Aborted("three", USAGE, TIMES, ACCOUNT)]
    assert held.number == 10
    waits[0].cancel()


async def test_what_was_written_or_left_is_not_held() -> None:
    held = HeldTokens(THREADS.clock_ns)
    engine = FakeEngine()
    stream = await reader_that_stopped(held, engine, "r", "abc")
    stream.push(PromptDone("r", 0, [1, 2], None, TIMES))
    stream.push(chunk("de"))
    assert held.number == 7
    await stream.next()
    assert held.number == 4
    stream.push(chunk("f"))
    await stream.next(keeps=True)
    assert held.number == 5
    stream.close()
    stream.push(chunk("gh"))
    assert (held.number, held.streams, engine.aborted) == (0, set(), ["r"])
