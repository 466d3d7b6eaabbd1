"""Front processes over links that are late and cut: answers are those of one front, whatever ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from oaiserve.config import EngineOptions
from oaiserve.engine.request import Failed
from oaiserve.errors import Overloaded, RequestQuarantined
from oaiserve.fronts.front_engine import FrontEngine, ServedFront
from oaiserve.fronts.messages import Facts, FromFront, ToFront
from oaiserve.process.link import Link
from oaiserve.process.messages import Ready
from oaiserve.process.plain_data import decoder
from tests.engine.test_schedules import KINDS, Client
from tests.process.test_restarts import WAYS, Front
from tests.process.worlds import WorldLink
from tests.world.loop import World
from tests.world.schedules import in_world, schedules


class MainProcess:
    """The main process as a front process sees it."""

    def __init__(self, link: WorldLink, ready: Ready) -> None:
        self._link = link
        self._ready = ready

    @property
    def link(self) -> Link:
        return self

    def start(self, received: Any, closed: Any) -> None:
        received(self._ready)
        self._link.start(received, closed)

    def send(self, message: object) -> None:
        self._link.send(message)

    send_now = send

    def close(self) -> None:
        self._link.close()

    def kill(self) -> None:
        """Nothing: the other end sends no beats, as it would."""

    def ended(self) -> str:
        return ""


class FrontProcess:
    """A front process of a world, with its end in the main process."""

    def __init__(self, world: World, front: Front, number: int, **options: Any) -> None:
        self.main_link = WorldLink(world, f"main {number}", decoder(FromFront))
        self.link = WorldLink(world, f"front {number}", decoder(ToFront))
        self.main_link.other = self.link
        self.link.other = self.main_link
        served = ServedFront(front.engine, self.main_link)
        self.main_link.start(served.received, served.closed)
        ready = Ready.of(front.engine, front.engine.tokenizer.facts, front.engine.snapshot())
        self.engine = FrontEngine(MainProcess(self.link, ready), EngineOptions(**options), world)
        self.engine.clock_ns = world.clock_ns  # for clients
        self.engine.start()
        self.clients: list[Client] = []
        self.has_ended = False

    def die(self) -> None:
        self.has_ended = True
        self.link.cut()


@schedules(60)
def test_answers_are_the_same_in_all_fronts_whatever_processes_end(world: World) -> None:
    draw = world.random
    front = Front(world)
    fronts = [FrontProcess(world, front, number) for number in range(draw.randint(1, 3))]

    def submit(client: Client, where: FrontProcess) -> None:
        if where.has_ended:
            front.clients.remove(client)
            return
        where.clients.append(client)
        client.submit(where.engine)

    def end(where: FrontProcess) -> None:
        where.die()
        for client in where.clients:  # They have lost their connections.
            front.clients.remove(client)

    for _ in range(draw.randint(1, 6)):
        client = front.client(draw.randrange(len(KINDS)))
        at = draw.expovariate(2)
        where = draw.choice(fronts)
        world.call_later(at, submit, client, where)
        if draw.random() < 0.2:
            world.call_later(at + draw.expovariate(4), where.engine.abort, client.request.request_id)
    if draw.random() < 0.5:
        world.call_later(draw.expovariate(1), front.end_process, draw.choice([*WAYS]))
    if len(fronts) > 1 and draw.random() < 0.5:
        world.call_later(draw.expovariate(1), end, fronts[0])
    front.run()
    front.check("Finished", "Aborted", "Failed")
    assert all(isinstance(c.events[-1].error, RequestQuarantined) for c in front.clients if c.end == "Failed")


def test_all_fronts_share_the_room_of_one_engine() -> None:
    with in_world(1, is_late=False) as world:
        front = Front(world, max_waiting=2, max_running=1)
        fronts = [FrontProcess(world, front, number) for number in range(2)]
        clients = [front.client(6) for _ in range(8)]
        for number, client in enumerate(clients):
            client.submit(fronts[number % 2].engine)
        world.run_until(lambda: all(client.ended_ns for client in clients), most_seconds=60)
        refused = [client for client in clients if client.end == "Failed"]
        assert len(refused) >= 4
        for client in refused:
            (end,) = client.events
            assert isinstance(end, Failed)
            assert isinstance(end.error, Overloaded)
            front.clients.remove(client)
        front.run()
        front.check("Finished")


def test_the_main_process_knows_the_clients_of_its_fronts() -> None:
    with in_world(4, is_late=False) as world:
        front = Front(world)
        one = FrontProcess(world, front, 0)
        client = front.client(6)
        client.request = replace(client.request, client="a")
        client.submit(one.engine)
        world.run_until(lambda: len(client.events) > 1)
        assert front.engine.has_others("b")
        assert not front.engine.has_others("a")
        front.run()
        assert not front.engine.has_others("b")


def test_a_front_that_stops_ends_its_requests_alone() -> None:
    with in_world(2, is_late=False) as world:
        front = Front(world)
        first, second = (FrontProcess(world, front, number) for number in range(2))
        clients = [front.client(6) for _ in range(2)]
        clients[0].submit(first.engine)
        clients[1].submit(second.engine)
        world.run_until(lambda: all(len(client.events) > 3 for client in clients))
        first.engine.stop()
        assert clients[0].end == "Aborted"
        front.run()
        assert clients[1].end == "Finished"


def test_adapters_of_the_main_process_are_those_of_its_fronts() -> None:
    with in_world(3, is_late=False) as world:
        front = Front(world)
        one = FrontProcess(world, front, 0)
        adapter = front.engine.load_adapter("a", Path("/adapters/a"))
        one.engine.become(Facts(front.engine.adapters.served, is_reporting=True))
        assert one.engine.adapters.get("a") == adapter
        assert one.engine.is_reporting
        front.engine.unload_adapter("a")
        one.engine.become(Facts(front.engine.adapters.served, is_reporting=True))
        assert one.engine.adapters.served == []
        front.run()
