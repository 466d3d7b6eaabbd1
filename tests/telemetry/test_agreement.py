"""For any request, spans, log line, header, timings and recent requests have the same nanoseconds.

`test_metrics.py` compares histograms with it.
"""

import json
from itertools import pairwise
from operator import attrgetter

from hypothesis import given, settings

from oaiserve.facts.fact import facts_of
from oaiserve.facts.record import RequestRecord, ToolCallOutcome, Whose
from oaiserve.facts.times import PHASES
from oaiserve.telemetry import logs, names
from oaiserve.telemetry.recent import RecentRequests
from tests.telemetry.exported import OFFSET_NS, json_log, spans_of
from tests.telemetry.records import records


@settings(max_examples=40)
@given(records())
def test_spans_are_contiguous_have_the_integers_of_the_record_and_each_event_inside_one(record: RequestRecord) -> None:
    server, inner, *spans = spans_of(record)
    phases = record.times.phases()
    assert [(span.name, span.start_time - OFFSET_NS, span.end_time - OFFSET_NS) for span in spans] == phases
    assert all(left.end_time == right.start_time for left, right in pairwise(spans))
    assert {(span.start_time, span.end_time) for span in (server, inner)} == {(spans[0].start_time, spans[-1].end_time)}
    assert [span.attributes[names.DURATION_NS] for span in spans] == [phase.duration_ns for phase in phases]
    assert sum(phase.duration_ns for phase in phases) == server.attributes[names.DURATION_NS]
    for queue in (span.attributes for span in spans if span.name == "queue"):
        waits_ns = {reason: queue[name] for reason, name in names.QUEUE_WAITS_NS.items() if name in queue}
        assert waits_ns == record.account.waits_ns
    reported = [(event.timestamp - OFFSET_NS, event.name) for span in spans for event in span.events]
    # Events at an empty phase may change places with events of its neighbours, but not with any others.
    assert sorted(reported) == sorted((event.at_ns, event.kind) for event in record.account.events)
    for span in spans:
        for event in span.events:
            assert span.start_time <= event.timestamp <= span.end_time
            at_ns = event.timestamp - OFFSET_NS
            if at_ns == record.times.scheduled:
                assert span.name == "prefill"
            else:  # an event is not at the beginning of its span, unless no span ends there
                assert event.timestamp > span.start_time or span is spans[0]


@settings(max_examples=40)
@given(records())
def test_the_log_line_the_ring_and_the_spans_tell_the_same_of_each_fact(record: RequestRecord) -> None:
    recent = RecentRequests(1, lambda: OFFSET_NS)
    recent.add(record)
    with json_log() as stream:
        logs.log_request(record)
    line = json.loads(stream.getvalue())
    entry = recent.get(record.request_id) or {}
    assert json.loads(json.dumps(entry)) == entry
    phases_ns = {phase.name: phase.duration_ns for phase in record.times.phases()}
    assert {phase["name"]: phase["duration_ns"] for phase in entry["phases"]} == phases_ns
    assert {name: line.get(f"{name}_ms") for name in PHASES} == {
        name: round(phases_ns[name] / 1e6, 3) if name in phases_ns else None for name in PHASES
    }
    assert entry["duration_ns"] == record.times.duration_ns
    assert line["duration_ms"] == round(record.times.duration_ns / 1e6, 3)
    ttft_ns = None if record.operation == "embeddings" else record.times.time_to_first_token_ns
    assert entry["time_to_first_token_ns"] == ttft_ns
    assert entry["queue_waits_ns"] == record.account.waits_ns
    others_ns = record.account.others_ns
    assert {phase["name"]: [(*one.values(),) for one in phase["others"]] for phase in entry["phases"]} == {
        name: [(*one,) for one in others_ns.get(name, [])] for name in phases_ns
    }
    clients_ns = [one.total_ns for found in others_ns.values() for one in found if one.whose is Whose.OTHER_CLIENT]
    assert line.get("other_clients_ms") == (round(sum(clients_ns) / 1e6, 3) if clients_ns else None)
    gaps = record.event_gaps_ns
    tokens = record.event_tokens
    assert line.get("itl_max_ms") == (round(max(gaps) / 1e6, 3) if gaps else None)
    assert (entry["token_gaps"] or {}).get("max_ns") == max(gaps, default=None)
    mean_tokens = sum(tokens) / len(tokens) if tokens else None
    assert entry["mean_event_tokens"] == mean_tokens
    assert line.get("mean_event_tokens") == (round(mean_tokens, 2) if tokens else None)
    assert entry["trace_id"] == line["trace_id"]
    server, inner, *spans = spans_of(record)
    for span in spans:
        shown_ns = {whose: span.attributes.get(f"oaiserve.others.{whose}_ns", 0) for whose in Whose}
        found = others_ns.get(span.name, [])
        assert shown_ns == {whose: sum(one.total_ns for one in found if one.whose is whose) for whose in Whose}
    in_json = entry | {
        f"{group}.{name}": value for group in ("grammar", "media") for name, value in (entry[group] or {}).items()
    }
    for facts in (record, record.account):
        for row in facts_of(type(facts)):
            value = attrgetter(row.name)(facts)
            in_log = round(value / 1e6, 3) if row.name.endswith("_ns") and value is not None else value
            if row.json and (row.json in in_json or "." not in row.json):
                assert in_json[row.json] == json.loads(json.dumps(value))
            if row.log:
                is_left_out = row.log_when and not attrgetter(row.log_when)(facts)
                assert line.get(row.log) == (None if is_left_out else json.loads(json.dumps(in_log)))
            for span, name in ((inner, row.span), (server, row.server_span)):
                is_left_out = row.span_when and not attrgetter(row.span_when)(facts)
                on_span = names.GEN_AI_OPERATIONS.get(value, value) if name == names.GEN_AI_OPERATION_NAME else value
                assert not name or span.attributes.get(name) == (None if is_left_out else on_span)
    assert (entry["media"] is None) == (not record.account.media.num)
    assert (entry["grammar"] is None) == (record.account.grammar_kind is None)
    for outcome in ToolCallOutcome:
        number = record.tool_calls.get(outcome)
        assert entry["tool_calls"].get(outcome) == line.get(f"tool_calls_{outcome}") == number
        assert inner.attributes.get(names.NUM_TOOL_CALLS[outcome]) == number
    if not record.account.prefill_causes_ns:
        assert record.causes_ns == {}
    in_ring = {phase["name"]: phase["causes_ns"] for phase in entry["phases"]}
    for span, phase in zip(spans, record.times.phases(), strict=True):
        causes_ns = record.causes_ns.get(phase.name, {})
        on_span = {cause: span.attributes.get(name, 0) for cause, name in names.CAUSES_NS.items()}
        assert {cause: ns for cause, ns in on_span.items() if ns} == {c: ns for c, ns in causes_ns.items() if ns}
        assert in_ring[phase.name] == causes_ns
        if phase.name in record.causes_ns:
            assert sum(causes_ns.values()) == phase.duration_ns
