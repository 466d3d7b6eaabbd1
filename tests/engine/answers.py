"""All that clients get of an engine for some requests, and whether it is what they should get."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Event, Finished, PromptDone, Request, Terminal, TokenChunk
from tests.engine.doubles import Inbox, Leaver, SimulatedEngine
from tests.engine.logprobs_for_tests import values_of


class Answer(NamedTuple):
    """The answer of one choice."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[float]


@dataclass
class Answers:
    choices: dict[tuple[str, int], Answer]  # by request and choice
    prompt_logprobs: dict[str, list[float]]
    ended: dict[str, Terminal]
    num_preemptions: int  # preemptions by the engine so far

    @property
    def token_ids(self) -> dict[tuple[str, int], list[int]]:
        return {key: answer.token_ids for key, answer in self.choices.items()}

    def total(self, number: str) -> int:
        """Return the sum of a number of the requests' accounts."""
        return sum(getattr(event.account, number) for event in self.ended.values())

    def check(self, expected: Answers, *, error: float = 1e-4) -> None:
        """Check that answers are as expected: whole ones in all that a client sees, and others as far as they go.

        `error` is the largest of log-probabilities.
        """
        for request_id in expected.ended:
            if isinstance(self.ended[request_id], Finished):
                actual, numbers = self.seen(request_id)
                wanted, wanted_numbers = expected.seen(request_id)
                assert actual == wanted, request_id
                assert numbers == pytest.approx(wanted_numbers, abs=error)
        for key, token_ids in self.token_ids.items():
            if key[0] in expected.ended:
                assert token_ids == expected.token_ids[key][: len(token_ids)]

    def seen(self, request_id: str) -> tuple[object, list[float]]:
        """Return all that a client sees of a request, the log-probabilities apart."""
        own = {key: answer for key, answer in self.choices.items() if key[0] == request_id}
        rows = [self.prompt_logprobs.get(request_id, []), *(answer.logprobs for answer in own.values())]
        without = {key: answer[:-1] for key, answer in own.items()}
        usage = self.ended[request_id].usage
        sizes = (usage.prompt_tokens, usage.completion_tokens, [len(row) for row in rows])
        return (without, sizes), [value for row in rows for value in row]


def collect(engine: Engine, requests: list[Request], inbox: Inbox | None = None) -> Answers:
    """Have a running engine answer requests that come one after the other. The first may end before the last comes."""
    inbox = inbox or Inbox()
    for each in requests:
        engine.submit(each, inbox)
    return answers_of(engine, requests, inbox)


def collect_together(
    engine: Engine, requests: list[Request], inbox: Inbox | None = None, *, num_later: int = 0
) -> Answers:
    """Have an engine without tokenize workers answer requests, in the same steps in every run.

    It starts when it has them, except for the last `num_later`. One of these comes after each hand-over.
    """
    inbox = inbox or Inbox()
    left = deque(requests)
    if isinstance(engine, SimulatedEngine):
        inbox.live_in(engine.world)

    def deliver(events: list[Event]) -> None:
        inbox(events)
        if left:
            engine.submit(left.popleft(), deliver)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "is_ready", True)
        while len(left) > num_later:
            engine.submit(left.popleft(), deliver)
    with engine:
        return answers_of(engine, requests, inbox)


def answers_of(engine: Engine, requests: list[Request], inbox: Inbox) -> Answers:
    """Wait for the end of requests that have been submitted, and return their answers."""
    ended = inbox.wait_terminal(*(each.request_id for each in requests))
    chunks: dict[tuple[str, int], list[TokenChunk]] = {}
    prompt_logprobs = {}
    for event in (event for events in inbox.hand_overs for event in events):
        if isinstance(event, PromptDone) and event.logprobs:
            prompt_logprobs[event.request_id] = values_of(event.logprobs)[1:]
        elif isinstance(event, TokenChunk):
            chunks.setdefault((event.request_id, event.index), []).append(event)
    choices = {
        key: Answer(
            [token_id for chunk in of_choice for token_id in chunk.token_ids],
            "".join(chunk.text for chunk in of_choice),
            of_choice[-1].finish_reason,
            of_choice[-1].stop_reason,
            [value for chunk in of_choice for value in values_of(chunk.logprobs)],
        )
        for key, of_choice in sorted(chunks.items())
    }
    return Answers(choices, prompt_logprobs, ended, engine.snapshot().num_preemptions)


def run_to_the_end(
    engine: Engine, requests: list[Request], leaves_after: dict[str, int] | None = None, *, num_later: int = 0
) -> Answers:
    """Run an engine without tokenize workers as `collect_together` does, and check that nothing is left behind.

    Some requests are aborted after some tokens.
    """
    outcome = collect_together(engine, requests, Leaver(engine, leaves_after or {}), num_later=num_later)
    assert engine.failure is None
    scheduler = engine._loop._scheduler
    scheduler.check_integrity()
    assert (
        scheduler.pool.num_used,
        len(scheduler.running),
        scheduler.foreground.num_waiting,
        scheduler.foreground.num_parked,
    ) == (0,) * 4
    return outcome
