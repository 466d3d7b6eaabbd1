"""Records and settings come back from bytes as they were."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.config import Bytes, Config, EngineOptions, ServerOptions, TelemetryOptions
from oaiserve.facts.record import RequestRecord
from oaiserve.facts.trace import TraceContext
from oaiserve.facts.turn import Turn, TurnPrompt
from oaiserve.fronts.messages import Begin, FromFront, Record, ToFront
from oaiserve.process.plain_data import decoder, encode
from tests.process.plain_values import any_of
from tests.process.test_messages import ready_facts

IDS = st.integers(1, 2**64 - 1)
TRACES = st.builds(TraceContext, st.integers(1, 2**128 - 1), IDS, st.none() | IDS, st.booleans(), st.none() | st.text())
RECORDS = any_of(RequestRecord, trace=TRACES, turn=st.none())


@dataclass(frozen=True)
class StoreOptions:
    """Settings of a plug-in."""

    store: Path | None = None


@dataclass(frozen=True)
class KeysOptions:
    """Settings of another one."""

    stored_keys: bool = False


@given(RECORDS)
@settings(max_examples=60)
def test_a_record_reaches_the_main_process_as_it_was_made(record: RequestRecord) -> None:
    assert decoder(FromFront)(encode(Record.of(record))).record() == record


@given(RECORDS)
@settings(max_examples=1)
def test_a_turn_crosses_with_its_prompt_and_huge_parameters_as_floats(record: RequestRecord) -> None:
    prompt = TurnPrompt("a", True, "b", ("c",), {"user": 3})
    record = replace(record, turn=Turn("run", True, "agent", 4, lambda: prompt, "curl"), params={"seed": 2**70})
    came = decoder(FromFront)(encode(Record.of(record))).record()
    assert came.turn.prompt() == prompt
    assert replace(came.turn, prompt=record.turn.prompt) == record.turn
    assert came.params == {"seed": 2.0**70}


def test_settings_reach_a_front_process_with_those_of_plugins() -> None:
    config = Config(
        "demo",
        ServerOptions(api_key=("k",), front_processes=2, body_limit=Bytes("1MiB"), replicas="auto"),
        EngineOptions(max_waiting=5),
        TelemetryOptions(slo="ttft:2s"),
        Path("/settings.toml"),
        (StoreOptions(store=Path("/store.db")), KeysOptions(stored_keys=True)),
    )
    begin = decoder(ToFront)(encode(Begin.of("front 1", config, ready_facts())))
    assert begin.config([StoreOptions, KeysOptions]) == config
    assert begin.ready == ready_facts()
