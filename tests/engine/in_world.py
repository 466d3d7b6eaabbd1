"""Engines of real models whose threads are workers of a simulated world."""

from pathlib import Path
from typing import Any

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.request import TERMINAL, Event, Request, TokenPrompt
from oaiserve.engine.start.plan import start_model
from oaiserve.engine.start.start_times import StartTimes
from tests.engine.answers import Answers, answers_of
from tests.engine.doubles import Inbox
from tests.engine.model.runners import greedy
from tests.engine.remembered import wait_until_remembered
from tests.world.loop import World

MOST_SECONDS = 600  # All answers come within this time of the world.


def started_in(world: World, path: Path, **options: Any) -> Engine:
    """Return an engine that is ready to run, once all that its start remembers has been written."""
    engine_options = EngineOptions(**{"explain": False, **options})
    served = start_model(path, engine_options, StartTimes(), lambda: None)
    wait_until_remembered()
    return Engine(EngineParts.of(served, engine_options, runtime=world, cores_ns=world.clock_ns))


def collect_in(world: World, engine: Engine, requests: list[Request]) -> Answers:
    """Have a running engine answer requests that come at once."""

    def note_ends(events: list[Event]) -> None:
        ended.update(event.request_id for event in events if isinstance(event, TERMINAL))

    ended: set[str] = set()
    inbox = Inbox(note_ends)
    for each in requests:
        engine.submit(each, inbox)
    assert world.run_until(lambda: len(ended) == len(requests), most_seconds=MOST_SECONDS)
    return answers_of(engine, requests, inbox)


def greedy_answers_in(world: World, engine: Engine, prompts: list[list[int]], num_tokens: int = 12) -> list[list[int]]:
    """Return the ids of greedy answers to prompts that come at once."""
    requests = [Request(f"{i}", (TokenPrompt(prompt),), greedy(num_tokens)) for i, prompt in enumerate(prompts)]
    token_ids = collect_in(world, engine, requests).token_ids
    return [token_ids[request.request_id, 0] for request in requests]
