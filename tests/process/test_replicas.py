"""Several engine processes behind one front: requests go where their prefix is, and on on others when one ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oaiserve.checkpoints.adapters import BadAdapter
from oaiserve.engine.request import Failed, Request, SamplingParams, TokenPrompt
from oaiserve.errors import InternalError, RequestQuarantined, StartupError
from oaiserve.wire.prefix_keys import BLOCK_BYTES, prompt_of_text
from oaiserve.wire.report import ReplicaReport
from tests.engine.doubles import LETTERS
from tests.engine.test_schedules import KINDS
from tests.process.test_restarts import WAYS, Front
from tests.process.worlds import Processes
from tests.world.loop import World
from tests.world.schedules import in_world, schedules


def end_one(front: Front, index: int, way: str) -> None:
    process = front.processes.by_replica[index]
    if process.engine is not None and not process.has_ended:
        WAYS[way](process)


@schedules(100)
def test_answers_are_the_same_whichever_replicas_end(world: World) -> None:
    draw = world.random
    number = draw.randint(2, 4)
    front = Front(world, number)
    for _ in range(draw.randint(1, 8)):
        at = draw.expovariate(2)
        client = front.client(draw.randrange(len(KINDS)))
        if draw.random() < 0.5:
            client.request = replace(
                client.request,
                routing=prompt_of_text(b"x" * BLOCK_BYTES * client.kind),
                session=draw.choice(["", "run"]),
            )
        world.call_later(at, client.submit, front.engine)
        if draw.random() < 0.1:
            world.call_later(at + draw.expovariate(4), front.engine.abort, client.request.request_id)
    for _ in range(draw.randint(1, 3)):
        world.call_later(draw.expovariate(1), end_one, front, draw.randrange(number), draw.choice([*WAYS]))
    front.run()
    front.check("Finished", "Failed", "Aborted")
    errors = [client.events[-1].error for client in front.clients if client.end == "Failed"]
    assert all(isinstance(error, RequestQuarantined) for error in errors)
    assert len(errors) <= max(0, len(front.processes.all) - number - 1)
    accounts = [client.events[-1].account for client in front.clients if client.end == "Finished"]
    assert {account.replica for account in accounts} <= {*map(str, range(number))}


def test_requests_of_a_replica_that_ends_go_on_on_the_other_at_once() -> None:
    with in_world(1, is_late=False) as world:
        front = Front(world, 2)
        front.processes.load_seconds = 100.0
        clients = [front.client(6) for _ in range(4)]
        for client in clients:
            client.submit(front.engine)
        world.run_until(lambda: all(len(client.events) > 3 for client in clients))
        running = [state.numbers.num_running for state in front.engine.replicas]
        assert sorted(running) == [2, 2]
        assert front.engine.snapshot().num_running == 4
        front.processes.by_replica[0].die()
        world.run_until(lambda: all(client.ended_ns for client in clients), most_seconds=50)
        front.check("Finished")
        assert {client.events[-1].account.replica for client in clients} == {"1"}
        moved = [client.events[-1].account.engine_restart_ns for client in clients]
        assert sum(restart_ns > 0 for restart_ns in moved) == 2
        assert front.engine.pause == "Replica 0 of 2 is started again. Its requests go on on others."
        assert front.engine.is_ready
        assert [state.is_up for state in front.engine.replicas] == [False, True]
        front.run()


def test_a_new_request_goes_where_its_prefix_is_unless_that_is_busy() -> None:
    with in_world(2, is_late=False) as world:
        front = Front(world, 4, kv_blocks=200, max_running=8)
        prompt = prompt_of_text(b"x" * BLOCK_BYTES * 8)

        def asked(session: str = "") -> str:
            client = front.client(2)
            client.request = replace(client.request, routing=prompt, session=session)
            client.submit(front.engine)
            return front.engine._open[client.request.request_id].replica

        first = asked()
        assert [asked() for _ in range(3)] == [first] * 3
        assert len({asked() for _ in range(40)}) > 1
        front.run()
        choices = [state.choices for state in front.engine.replicas]
        assert choices[int(first)]["new"] == 1
        assert sum(each.get("prefix", 0) for each in choices) > 3


def test_an_innocent_stream_shares_no_process_with_a_request_that_ends_them() -> None:
    with in_world(3, is_late=False) as world:
        front = Front(world, 2)
        poison = Request("poison", (TokenPrompt([LETTERS[25]] * 4),), SamplingParams(max_tokens=4))
        make = front.processes.make
        deaths: list[int] = []

        def make_deadly(model: Any) -> Any:
            launch = model.launch
            process = next(each for each in front.processes.all if getattr(each, "model", None) is model)

            def launch_or_die(step: Any) -> Any:
                if any(chunk.sequence.request_id.startswith("poison") for chunk in step.chunks):
                    deaths.append(next(i for i, each in front.processes.by_replica.items() if each is process))
                    process.die("by SIGSEGV")
                return launch(step)

            model.launch = launch_or_die
            return make(model)

        front.processes.make = make_deadly
        for index in range(2):
            front.processes.by_replica[index].die()
        world.run_until(lambda: all(state.is_up for state in front.engine.replicas) and front.engine.num_restarts == 2)
        clients = [front.client(kind) for kind in (6, 2, 6, 2)]
        for client in clients:
            client.submit(front.engine)
        world.run_until(lambda: all(len(client.events) > 2 for client in clients))
        deadly = front.client(0)
        deadly.request = poison
        deadly.submit(front.engine)
        world.run_until(lambda: all(client.ended_ns for client in front.clients), most_seconds=60)
        front.check("Finished", "Failed")
        assert {client.end for client in clients} == {"Finished"}
        end = deadly.events[-1]
        assert isinstance(end, Failed)
        assert isinstance(end.error, RequestQuarantined)
        assert deaths[0] == deaths[1], "the replica without streams tries it again"
        again = front.client(0)
        again.request = replace(poison, request_id="again")
        again.submit(front.engine)
        assert isinstance(again.refusal, RequestQuarantined), "whichever replica would get it"
        front.clients.clear()
        front.run()


def test_a_replica_that_ends_too_often_stays_down_and_the_last_one_ends_the_server() -> None:
    with in_world(4, is_late=False) as world:
        front = Front(world, 2)
        client = front.client(6)
        for number in range(3):
            world.run_until(lambda: front.engine.replicas[0].is_up)
            front.processes.by_replica[0].die("by SIGSEGV")
            world.run_until(lambda number=number: len(front.processes.all) == 3 + number or number == 2)
        world.run_until(lambda: "down" in front.engine.pause)
        assert front.engine.pause == (
            "Replica 0 of 2 is down until the server is started again. The engine process of replica 0 has ended 3 "
            "times within a minute, at last by SIGSEGV."
        )
        assert front.engine.failure is None
        client.submit(front.engine)
        world.run_until(lambda: len(client.events) > 3)
        for number in range(3):
            world.run_until(lambda: front.engine.replicas[1].is_up)
            front.processes.by_replica[1].die("by SIGABRT")
            world.run_until(lambda number=number: len(front.processes.all) == 5 + number or number == 2)
        world.run_until(lambda: client.ended_ns is not None)
        assert isinstance(client.events[-1].error, InternalError)
        assert "SIGABRT" in str(front.engine.failure)
        front.run()


def test_counters_of_a_process_that_ended_stay_in_the_sums() -> None:
    with in_world(5, is_late=False) as world:
        front = Front(world, 2)
        clients = [front.client(2) for _ in range(4)]
        for client in clients:
            client.submit(front.engine)
        world.run_until(lambda: all(client.ended_ns for client in clients))
        world.run_until(most_seconds=2)
        before = front.engine.snapshot()
        front.processes.by_replica[1].die()
        world.run_until(lambda: front.engine.num_restarts == 1)
        world.run_until(lambda: front.engine.replicas[1].is_up)
        after = front.engine.snapshot()
        assert after.num_steps == before.num_steps > 0
        assert after.blocks_total <= before.blocks_total
        assert after.num_running == 0
        front.run()


def test_one_report_has_all_replicas_and_keeps_its_incarnation() -> None:
    with in_world(6, is_late=False) as world:
        front = Front(world, 2)
        clients = [front.client(6) for _ in range(4)]
        for client in clients:
            client.submit(front.engine)
        world.run_until(lambda: all(len(client.events) > 3 for client in clients))
        first = front.engine.report("it")
        assert {*front.engine.open_requests(0)} == {"0", "1", "2", "3"}
        assert {row.replica for row in front.engine.open_requests(0).values()} == {"0", "1"}
        front.processes.by_replica[0].die()
        world.run_until(lambda: bool(front.engine.pause))
        second: ReplicaReport = front.engine.report("it")
        assert (second.incarnation, second.number) == (first.incarnation, first.number + 1)
        front.run()


def test_all_replicas_have_each_adapter_also_the_one_that_was_away() -> None:
    with in_world(7, is_late=False) as world:
        front = Front(world, 2)
        front.processes.load_seconds = 5.0
        one = front.engine.load_adapter("one", Path("/adapters/one"))
        front.processes.by_replica[0].die()
        world.run_until(lambda: bool(front.engine.pause))
        two = front.engine.load_adapter("two", Path("/adapters/two"))
        front.engine.unload_adapter("one")
        world.run_until(lambda: not front.engine.pause, most_seconds=20)
        clients = [front.client(6) for _ in range(4)]
        for client in clients:
            client.request = replace(client.request, adapter=two.number)
            client.submit(front.engine)
        front.run()
        front.check("Finished")
        assert {client.events[-1].account.replica for client in clients} == {"0", "1"}
        assert two.number != one.number
        assert [adapter.name for adapter in front.engine.adapters.served] == ["two"]


def test_an_adapter_that_one_replica_cannot_load_is_loaded_by_none() -> None:
    with in_world(8, is_late=False) as world:
        front = Front(world, 2)
        loads: list[str] = []

        def load(number: int, name: str, path: Path) -> None:
            loads.append(name)
            if len(loads) == 2:
                raise BadAdapter("it is broken")

        front.processes.adapter_loaded = load
        with pytest.raises(Exception, match="it is broken"):
            front.engine.load_adapter("one", Path("/adapters/one"))
        assert front.engine.adapters.served == []
        assert front.engine.load_adapter("one", Path("/adapters/one")).name == "one"
        front.run()


def test_if_one_model_cannot_be_loaded_no_process_is_left() -> None:
    with in_world(9) as world:
        processes = Processes(world)
        processes.refusal = StartupError("There is no such model.")
        with pytest.raises(StartupError, match="There is no such model."):
            processes.front(3)
        world.run_until(most_seconds=5)
        assert all(process.has_ended for process in processes.all)
