"""Engine processes that end at any moment: their requests go on in the next one, with the same answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oaiserve.engine.request import (
    ChatPrompt,
    Failed,
    Finished,
    PromptDone,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from oaiserve.engine.types.media import MediaFile, Prepared, Vectors
from oaiserve.errors import (
    AdapterUnloaded,
    InternalError,
    InvalidRequest,
    RequestQuarantined,
    StartupError,
    TimeLimitExceeded,
    Unavailable,
    invalid,
)
from oaiserve.facts.record import Cause
from oaiserve.http.fair_turns import at_once
from oaiserve.process.remote_engine import RemoteEngine
from tests.engine.doubles import LETTERS, TOKENIZER
from tests.engine.test_schedules import KINDS, Client, check_ended
from tests.process.worlds import Processes, WorldProcess
from tests.world.loop import World
from tests.world.schedules import in_world, schedules

WAYS: dict[str, Callable[[WorldProcess], object]] = {
    "kill -9": WorldProcess.die,
    "an error of the executor": lambda process: setattr(process.model, "is_gone", True),
    "a hang": WorldProcess.hang,
}

ENGINE = ("kv_blocks", "max_running")  # settings of the engine process, which a schedule draws otherwise
LATE_NS = 1_000_000_000  # of an event: parts of a link are late, and so are workers


class Front:
    """A front of a world with the clients of a schedule."""

    def __init__(self, world: World, num_replicas: int = 1, **options: Any) -> None:
        self.world = world
        self.processes = Processes(world, **{name: options.pop(name) for name in ENGINE if name in options})
        self.engine: RemoteEngine = self.processes.front(num_replicas, **options)
        self.engine.clock_ns = world.clock_ns  # for clients
        self.clients: list[Client] = []
        self.engine.start()

    def client(self, kind: int) -> Client:
        client = Client(replace(KINDS[kind], request_id=f"{len(self.clients)}"), kind)
        self.clients.append(client)
        return client

    def end_process(self, way: str) -> None:
        process = self.processes.now
        if process.engine is not None and not process.has_ended:
            WAYS[way](process)

    def run(self) -> None:
        """Run until all clients have their ends, and then stop, when nothing may be left."""
        self.world.run_until(lambda: all(client.ended_ns for client in self.clients), most_seconds=600)
        self.world.run_until(most_seconds=5)
        # What a process that hangs has not reported comes back when it is killed.
        self.world.run_until(lambda: all(each.has_ended for each in self.processes.all if each.hangs), most_seconds=600)
        self.world.run_until(most_seconds=1)
        assert not [client for client in self.clients if client.ended_ns is None]
        for replica in self.engine._replicas.values():
            reports = replica._asked if len(self.engine._replicas) > 1 else {}  # Each is asked for one once a second.
            left = (self.engine._open, replica.room.by_client, replica._asked.keys() - reports.keys())
            assert not any(left), left
        assert not self.engine.admission.waiting.total
        assert not self.engine.admission.body_bytes.total
        self.engine.stop()
        assert all(process.has_ended for process in self.processes.all)

    def check(self, *ends: str) -> None:
        assert {client.end for client in self.clients} <= set(ends)
        for client in self.clients:
            if client.refusal is None:
                check_ended(client, LATE_NS if client.events[-1].times.scheduled is None else 0)
                done = [event.prompt_index for event in client.events if isinstance(event, PromptDone)]
                assert len(done) == len(set(done))


@schedules(100)
def test_answers_are_the_same_in_a_process_of_its_own(world: World) -> None:
    draw = world.random
    front = Front(world)
    for _ in range(draw.randint(1, 6)):
        client = front.client(draw.randrange(len(KINDS)))
        at = draw.choice([0.0, draw.expovariate(1)])
        world.call_later(at, client.submit, front.engine)
        if draw.random() < 0.3:
            world.call_later(at + draw.expovariate(4), front.engine.abort, client.request.request_id)
    front.run()
    front.check("Finished", "Aborted")
    assert len(front.processes.all) == 1


@schedules(200)
def test_answers_are_the_same_however_processes_end(world: World) -> None:
    draw = world.random
    front = Front(world)
    for _ in range(draw.randint(1, 6)):
        world.call_later(draw.expovariate(2), front.client(draw.randrange(len(KINDS))).submit, front.engine)
    for _ in range(draw.randint(1, 2)):
        world.call_later(draw.expovariate(1), front.end_process, draw.choice([*WAYS]))
    front.run()
    front.check("Finished", "Failed")
    # Both processes may have ended between the first step of the same request and its first token.
    errors = [client.events[-1].error for client in front.clients if client.end == "Failed"]
    assert all(isinstance(error, RequestQuarantined) for error in errors)
    assert len(errors) <= (len(front.processes.all) > 2)


@schedules(30)
def test_requests_can_end_while_no_process_is_there(world: World) -> None:
    draw = world.random
    front = Front(world)
    front.processes.load_seconds = 1.0
    for _ in range(4):
        client = front.client(draw.randrange(len(KINDS)))
        client.submit(front.engine)
        world.call_later(0.1 + draw.random(), front.engine.abort, client.request.request_id)
    world.call_later(draw.random() / 5, front.end_process, "kill -9")
    front.run()
    front.check("Finished", "Aborted")


def test_an_account_adds_up_and_says_that_the_engine_was_started_again() -> None:
    with in_world(1, is_late=False) as world:
        front = Front(world)
        front.processes.load_seconds = 3.0
        client = front.client(6)
        client.submit(front.engine)
        world.run_until(lambda: len(client.events) > 5)
        front.end_process("kill -9")
        world.run_until(lambda: bool(front.engine.pause))
        front.run()
        front.check("Finished")
        account = client.events[-1].account
        assert account.decode_causes_ns[Cause.ENGINE_RESTART] == account.engine_restart_ns > 3 * 10**9
        assert account.num_continued_tokens == 0


def test_a_request_that_ends_two_processes_is_refused_and_others_go_on() -> None:
    with in_world(2, is_late=False) as world:
        front = Front(world)
        poison = Request("poison", (TokenPrompt([LETTERS[25]] * 4),), SamplingParams(max_tokens=4))
        for kind in (3, 6, 4):
            front.client(kind).submit(front.engine)
        make = front.processes.make

        def make_deadly(model: Any) -> Any:
            launch = model.launch

            def launch_or_die(step: Any) -> Any:
                if any(chunk.sequence.request_id.startswith("poison") for chunk in step.chunks):
                    front.processes.now.die("by SIGSEGV")
                return launch(step)

            model.launch = launch_or_die
            return make(model)

        front.processes.make = make_deadly
        front.end_process("kill -9")
        world.run_until(lambda: len(front.processes.all) == 2 and front.processes.now.engine is not None)
        world.run_until(most_seconds=70)  # after which ends count from the beginning
        for kind in (3, 6, 4):
            front.client(kind).submit(front.engine)
        deadly = Client(poison, 0)
        deadly.submit(front.engine)
        front.run()
        front.check("Finished")
        end = deadly.events[-1]
        assert isinstance(end, Failed)
        assert isinstance(end.error, RequestQuarantined)
        assert len(front.processes.all) == 4


def test_the_numbers_of_a_server_that_has_run_for_years_reach_the_front() -> None:
    with in_world(14, is_late=False) as world:
        front = Front(world)
        engine = front.processes.now.engine
        engine.scheduler.pool.used_ns = engine.scheduler.pool.evicted_unused_ns = 2**70
        engine.loop._model = replace(engine.loop._model, block_bytes=1)
        client = front.client(6)
        client.submit(front.engine)
        front.run()
        front.check("Finished")
        numbers = front.engine.snapshot()
        assert numbers.kv_byte_ns >= 2**70
        assert numbers.evicted_unused_ns >= 2**70
        assert len(front.processes.all) == 1


def test_prompts_of_a_refused_request_are_refused_at_once() -> None:
    with in_world(2, is_late=False) as world:
        front = Front(world)
        deadly = front.client(6)
        front.engine._quarantine.add(deadly.request)
        deadly.submit(front.engine)
        assert isinstance(deadly.refusal, RequestQuarantined)
        front.clients.clear()
        front.run()


def test_three_ends_within_a_minute_end_the_server_with_the_reason() -> None:
    with in_world(3, is_late=False) as world:
        front = Front(world)
        client = front.client(6)
        client.submit(front.engine)
        for number in range(3):
            world.run_until(lambda number=number: len(front.processes.all) == number + 1)
            world.run_until(lambda: front.processes.now.engine is not None and not front.engine.pause)
            front.end_process("an error of the executor" if number else "kill -9")
        world.run_until(lambda: client.ended_ns is not None)
        assert isinstance(client.events[-1].error, InternalError)
        assert "the device is gone" in str(front.engine.failure)
        with pytest.raises(Unavailable):
            front.engine.submit(KINDS[0], lambda events: None)
        front.run()


def test_a_model_that_cannot_be_loaded_is_refused_with_its_reason() -> None:
    with in_world(4) as world:
        processes = Processes(world)
        processes.refusal = StartupError("There is no such model.")
        with pytest.raises(StartupError, match="There is no such model."):
            processes.front()


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_a_stop_ends_open_requests_as_in_one_process(seconds: float) -> None:
    with in_world(5, is_late=False) as world:
        front = Front(world)
        client = front.client(6)
        client.submit(front.engine)
        world.run_until(lambda: len(client.events) > 2)
        world.begin(front.engine.stop, seconds)
        world.run_until(lambda: front.processes.now.has_ended)
        world.run_until(most_seconds=1)
        end = client.events[-1]
        assert isinstance(end, Finished if seconds else Failed)
        if not seconds:
            assert isinstance(end.error, Unavailable)


def test_questions_have_answers_and_an_error_while_no_process_is_there() -> None:
    with in_world(6, is_late=False) as world:
        front = Front(world)
        client = front.client(6)
        client.submit(front.engine)
        world.run_until(lambda: len(client.events) > 2)
        assert [*front.engine.open_requests(0)] == ["0"]
        assert front.engine.report("here").num_running == 1
        assert front.engine.snapshot().num_running == 1
        front.end_process("kill -9")
        world.run_until(lambda: bool(front.engine.pause))
        assert front.engine.open_requests(0) == {}
        with pytest.raises(Unavailable):
            front.engine.report("here")
        front.run()
        front.check("Finished")


def test_adapters_that_were_loaded_are_loaded_again() -> None:
    with in_world(7, is_late=False) as world:
        front = Front(world)
        processes = front.processes
        loaded: list[tuple[int, str]] = []
        first = front.engine.load_adapter("first", Path("/adapters/first"))
        front.engine.unload_adapter("first")
        second = front.engine.load_adapter("second", Path("/adapters/second"))
        assert (first.number, second.number) == (1, 2)
        processes.adapter_loaded = lambda number, name, path: loaded.append((number, name))
        client = front.client(6)
        client.request = replace(client.request, adapter=second.number)
        client.submit(front.engine)
        world.run_until(lambda: len(client.events) > 3)
        front.end_process("kill -9")
        world.run_until(lambda: bool(loaded))
        assert loaded == [(1, "second")]  # The new process counts from 1.
        front.run()
        front.check("Finished")
        assert front.engine.adapters.get("second") == second


def test_a_request_whose_adapter_was_unloaded_fails_when_its_process_ends() -> None:
    with in_world(8, is_late=False) as world:
        front = Front(world)
        adapter = front.engine.load_adapter("a", Path("/adapters/a"))
        client = front.client(6)
        client.request = replace(client.request, adapter=adapter.number)
        client.submit(front.engine)
        world.run_until(lambda: len(client.events) > 3)
        front.engine.unload_adapter("a")
        front.end_process("kill -9")
        world.run_until(lambda: client.ended_ns is not None)
        assert isinstance(client.events[-1].error, AdapterUnloaded)
        front.run()


def test_images_are_read_in_the_engine_process() -> None:
    with in_world(9, is_late=False) as world:
        processes = Processes(world)
        seen: list[object] = []

        def prepare(file: MediaFile, salt: str, *, only_text: bool) -> Prepared:
            seen.append((file.content, only_text))
            raise invalid("messages", "the file is no image", file.where)

        reader = SimpleNamespace(placeholders={"image": "<image>"}, checked=list, prepare=prepare)
        processes.more["media"] = SimpleNamespace(
            kinds=frozenset(["image"]), reader=reader, tower=None, vectors=Vectors(0)
        )
        engine = processes.front()
        engine.start()
        prompt = ChatPrompt([{"role": "user", "content": [{"type": "image"}]}], media=(MediaFile("image", b"\x89PNG"),))
        future = engine.run_in_turns(engine.encode(prompt, 100), client="", num_bytes=10)
        with pytest.raises(InvalidRequest, match="the file is no image"):
            future.result()
        assert seen == [(b"\x89PNG", True)]
        text = engine.run_in_turns(engine.encode(TextPrompt("abc"), 100), client="", num_bytes=10)
        assert text.result() == TOKENIZER.encode(TextPrompt("abc"))
        assert not engine.admission.waiting.total
        engine.stop()


def test_a_process_that_hangs_while_it_loads_is_killed_and_requests_wait_for_the_next_one() -> None:
    with in_world(12, is_late=False) as world:
        front = Front(world, load_timeout_seconds=20)
        front.processes.load_seconds = 1000.0
        front.end_process("kill -9")
        client = front.client(6)
        client.submit(front.engine)
        world.run_until(lambda: len(front.processes.all) == 2)
        began = world.now
        front.processes.load_seconds = 0.0
        world.run_until(lambda: len(front.processes.all) == 3)
        assert 20 <= world.now - began <= 25
        front.run()
        front.check("Finished")


def test_a_process_whose_end_takes_seconds_is_killed_once() -> None:
    with in_world(12, is_late=False) as world:
        front = Front(world, load_timeout_seconds=20)
        front.processes.load_seconds = 1000.0
        front.end_process("kill -9")
        world.run_until(lambda: len(front.processes.all) == 2)
        killed = []
        process = front.processes.all[-1]
        process.kill = lambda: killed.append(world.now)  # type: ignore[method-assign]
        began = world.now
        world.run_until(lambda: world.now >= began + 35)
        assert len(killed) == 1
        front.processes.load_seconds = 0.0
        process.die()
        world.run_until(lambda: len(front.processes.all) == 3)


def test_the_tokenizer_of_an_engine_process_answers_as_the_one_here() -> None:
    with in_world(9, is_late=False) as world:
        front = Front(world)
        tokenizer = front.engine.tokenizer
        ids = TOKENIZER.encode(TextPrompt("hello world"))
        chat = ChatPrompt([{"role": "user", "content": "hello"}])
        assert tokenizer.decode(ids) == TOKENIZER.decode(ids)
        assert tokenizer.lone_texts(ids) == TOKENIZER.lone_texts(ids)
        assert tokenizer.token_texts(ids) == [*TOKENIZER.token_texts(ids)]
        prompt = TextPrompt("hello world")
        assert tokenizer.text_parts(prompt, ids) == [*TOKENIZER.text_parts(prompt, ids)]
        assert tokenizer.rendered(chat) == TOKENIZER.rendered(chat)
        assert tokenizer.first_tokens("hello world", 2, "documents") == TOKENIZER.first_tokens("hello world", 2, "")
        assert at_once(tokenizer.encode_in_pieces(chat)) == TOKENIZER.encode(chat)
        with pytest.raises(InvalidRequest, match="surrogate"):
            tokenizer.first_tokens("\ud800", 2, "documents")
        front.engine.stop()


def test_work_with_the_tokenizer_waits_for_the_next_process_and_ends_with_the_front() -> None:
    with in_world(9, is_late=False) as world:
        front = Front(world)
        engine = front.engine
        front.processes.load_seconds = 3.0
        front.end_process("kill -9")
        world.run_until(lambda: bool(engine.pause))
        encoded = engine.run_in_turns(engine.encode(TextPrompt("abc"), 100), client="", num_bytes=10)
        assert encoded.result() == TOKENIZER.encode(TextPrompt("abc"))
        assert len(front.processes.all) == 2
        front.processes.load_seconds = 1000.0
        front.end_process("kill -9")
        world.run_until(lambda: bool(engine.pause))
        encoded = engine.run_in_turns(engine.encode(TextPrompt("abc"), 100), client="", num_bytes=10)
        world.run_until(most_seconds=1)
        engine.stop()
        with pytest.raises(Unavailable):
            encoded.result()


def test_a_front_that_ends_takes_its_engine_process_with_it() -> None:
    with in_world(10, is_late=False) as world:
        front = Front(world)
        process = front.processes.now
        client = front.client(6)
        client.submit(front.engine)
        world.run_until(lambda: len(client.events) > 3)
        process.link.cut()
        world.run_until(lambda: process.has_ended, most_seconds=5)
        assert process.has_ended


@pytest.mark.parametrize("limit", [{"request_timeout_seconds": 20}, {"queue_timeout_seconds": 20}])
def test_time_limits_hold_while_no_process_is_there(limit: dict[str, float]) -> None:
    with in_world(11, is_late=False) as world:
        front = Front(world, **limit)
        front.processes.load_seconds = 1000.0
        front.end_process("kill -9")
        world.run_until(lambda: bool(front.engine.pause))
        client = front.client(6)
        client.submit(front.engine)
        begun_ns = world.clock_ns()
        world.run_until(lambda: client.ended_ns is not None, most_seconds=60)
        assert isinstance(client.events[-1].error, TimeLimitExceeded | Unavailable)
        assert 20 * 10**9 <= client.ended_ns - begun_ns < 22 * 10**9


def test_a_request_that_was_aborted_when_its_process_ended_goes_on_in_no_other() -> None:
    with in_world(12, is_late=False) as world:
        front = Front(world)
        client = front.client(6)
        client.submit(front.engine)
        world.run_until(lambda: len(client.events) > 3)
        process = front.processes.now
        process.die()
        front.engine.abort(client.request.request_id)
        world.run_until(lambda: client.ended_ns is not None, most_seconds=5)
        assert client.end == "Aborted"
        front.run()
        front.check("Aborted")


def test_between_the_look_and_the_end_of_an_abort_nobody_can_send_the_request() -> None:
    with in_world(13, is_late=False) as world:
        front = Front(world)
        front.processes.load_seconds = 1000.0
        front.end_process("kill -9")
        world.run_until(lambda: bool(front.engine.pause))
        client = front.client(6)
        client.submit(front.engine)
        to_be_sent: list[str] = []

        class Watched:
            """A lock that another thread has next, which sends what waits."""

            def __enter__(self) -> None:
                lock.acquire()

            def __exit__(self, *error: object) -> None:
                to_be_sent.extend(front.engine._open)
                lock.release()

        lock = front.engine._lock
        front.engine._lock = Watched()
        front.engine.abort(client.request.request_id)
        front.engine._lock = lock
        assert client.end == "Aborted"
        assert to_be_sent == []
        front.engine.stop()
