"""Log-probabilities for an observer change nothing else of what the engine delivers, and no forced token is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Event, Finished, Grammar, Request, SamplingParams, TextPrompt, TokenChunk
from tests.engine.doubles import Inbox, SimulatedEngine
from tests.plugins.inspector.inspected import OPTIONS

PARAMS = SamplingParams(max_tokens=40, seed=3)
SCHEMA = '{"type":"object","properties":{"name":{"enum":["Anna","Bert"]}},"required":["name"]}'
CASES = {
    "plain": PARAMS,
    "greedy": replace(PARAMS, temperature=0.0),
    "stop strings": replace(PARAMS, stop=("e", "ab"), min_tokens=20),
    "lengths": replace(PARAMS, text_lengths=True, stop=("zzz",)),
    "choices": replace(PARAMS, n=2),
    "schema": replace(PARAMS, grammar=Grammar("json_schema", SCHEMA)),
}


@pytest.fixture(scope="module")
def engine(small_model: Path) -> Iterator[Engine]:
    with SimulatedEngine.from_pretrained(str(small_model), OPTIONS) as engine:
        yield engine


def delivered(engine: Engine, request: Request) -> list[Event]:
    inbox = Inbox()
    engine.submit(request, inbox)
    inbox.wait_terminal(request.request_id)
    return [event for events in inbox.hand_overs for event in events]


def chunks(engine: Engine, name: str, params: SamplingParams, interval: int) -> list[TokenChunk]:
    events = delivered(engine, Request(name, (TextPrompt("Grüße"),), params, stream_interval=interval))
    return [event for event in events if isinstance(event, TokenChunk)]


@pytest.mark.parametrize("interval", [0, 1, 3])
@pytest.mark.parametrize("case", CASES)
def test_chunks_are_the_same_but_for_their_log_probabilities(engine: Engine, case: str, interval: int) -> None:
    params = CASES[case]
    plain = chunks(engine, "plain", params, interval)
    observed = chunks(engine, "observed", replace(params, logprobs=0, shows_logprobs=False), interval)
    assert all(each.logprobs is not None and len(each.logprobs) == len(each.token_ids) for each in observed)
    assert [structs.replace(each, request_id="", logprobs=None) for each in observed] == [
        structs.replace(each, request_id="") for each in plain
    ]


def test_a_forced_token_stays_forced_and_has_no_log_probability(engine: Engine) -> None:
    params = replace(CASES["schema"], logprobs=0, shows_logprobs=False)
    events = delivered(engine, Request("forced", (TextPrompt("Hi"),), params, stream_interval=0))
    chunk, finished = events[-2:]
    assert isinstance(chunk, TokenChunk)
    assert isinstance(finished, Finished)
    assert chunk.logprobs is not None
    num_without = sum(logprob != logprob for _, _, logprob in chunk.logprobs.tokens())
    assert num_without == finished.account.num_forced_tokens > 0
