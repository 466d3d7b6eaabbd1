"""Tests `stream_options.include_timings`: the timings at the end of a stream are the integers of the record."""

import pytest

from oaiserve.errors import InternalError
from oaiserve.facts.record import Cause, EngineAccount, OthersTime, WaitReason, Whose
from oaiserve.facts.times import TEXT_PHASES
from tests.routes.asking import CHAT, refused, stream_of
from tests.routes.doubles import fails, says
from tests.serving import Served

ROUTES = [CHAT, "/v1/completions"]
ACCOUNT = EngineAccount(
    waits_ns={WaitReason.NO_BLOCKS: 17, WaitReason.STEP_UNDER_WAY: 4},
    stalled_ns=23,
    prefill_causes_ns={Cause.ALONE: 3},
    decode_causes_ns={Cause.MACHINE: 5, Cause.HOST: 6},
    others_ns={
        "queue": [OthersTime(Whose.OTHER_CLIENT, "batchjob", 9, 2, 1), OthersTime(Whose.OTHER_CLIENT, None, 3, 0, 0)],
        "decode": [OthersTime(Whose.SAME_CLIENT, "alice", 0, 4, 0)],
    },
    num_draft_tokens=9,
    num_accepted_tokens=4,
)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_timings_are_the_integers_of_the_record(served: Served, route: str, options: dict[str, bool]) -> None:
    served.engine.script = says("Hello", " world", account=ACCOUNT)
    *others, last = stream_of(served, route, stream_options={"include_timings": True, **options})
    record = served.telemetry.next_record()
    timings = last["timings"]
    phases = record.times.phases()[:-1]
    assert timings["phases_ns"] == {phase.name: phase.duration_ns for phase in phases}
    assert list(timings["phases_ns"]) == list(TEXT_PHASES[:-1])
    assert timings["time_to_first_token_ns"] == record.times.time_to_first_token_ns
    assert (timings["queue_waits_ns"], timings["stalled_ns"]) == ({"no_blocks": 17, "step_under_way": 4}, 23)
    assert timings["causes_ns"] == {"prefill": {"alone": 3}, "decode": {"machine": 5, "host": 6}}
    assert list(timings["causes_ns"]["decode"]) == ["host", "machine"]  # the largest first
    assert timings["others_ns"] == {"queue": {"other_client": 15}, "decode": {"same_client": 4}}
    assert (timings["cached_tokens"], timings["trace_id"]) == (2, record.trace.trace_id_hex)
    assert (timings["draft_tokens"], timings["accepted_tokens"]) == (9, 4)
    assert last["choices"] == []
    assert ("usage" in last) == bool(options)
    assert not any("timings" in chunk for chunk in others)
    assert all(chunk["choices"] for chunk in others)


@pytest.mark.parametrize("route", ROUTES)
def test_a_client_that_did_not_ask_gets_no_chunk_with_timings(served: Served, route: str) -> None:
    for options in (None, {}, {"include_timings": False}, {"include_timings": None}):
        chunks = stream_of(served, route, stream_options=options)
        assert all(chunk["choices"] and "timings" not in chunk for chunk in chunks)


def test_a_stream_that_fails_ends_with_its_error(served: Served) -> None:
    served.engine.script = fails(InternalError("The step failed."), "Hel")
    *_, last = stream_of(served, stream_options={"include_timings": True})
    record = served.telemetry.next_record()
    assert (last["error"]["request_id"], last["error"]["trace_id"]) == (record.request_id, record.trace.trace_id_hex)


def test_timings_without_a_stream_are_refused(served: Served) -> None:
    response = served.complete(stream_options={"include_timings": True})
    refused(response, "stream_options")


def test_the_record_has_the_id_of_the_answer_and_the_servers_address(served: Served) -> None:
    answer = served.complete().json()
    record = served.telemetry.next_record()
    assert record.response_id == answer["id"]
    assert f"{record.http_scheme}://{record.server_address}:{record.server_port}" == served.url
