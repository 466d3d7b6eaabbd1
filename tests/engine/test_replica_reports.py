"""Reports for routers: means of the load, and the prompts that the prefix cache has, as far as it still has them."""

import json
from codecs import BOM_UTF8
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from oaiserve.engine.replica_reports import LEAST_NS, Reports
from oaiserve.engine.request import Request, SamplingParams, TextPrompt
from oaiserve.engine.sequences.blocks import BlockHash
from oaiserve.facts.engine_numbers import EngineNumbers, LoadTotals
from oaiserve.wire.prefix_keys import BLOCK_BYTES, marked_depths, prefix_keys_of, prompt_of, prompt_of_body
from oaiserve.wire.report import ReplicaReport
from oaiserve.wire.router import Router
from oaiserve.wire.routing_decision import Reason
from tests.engine.doubles import Clock, make_engine, request, stepping


def body(text: str, **more: object) -> bytes:
    return json.dumps({"model": "m", "prompt": text, "max_tokens": 2, **more}).encode()


def asked(content: bytes) -> Request:
    """Return the request that a route makes of a body."""
    prompt = TextPrompt(json.loads(content)["prompt"])
    return Request("r", (prompt,), SamplingParams(max_tokens=2), routing=prompt_of_body(content))


def test_the_mean_of_the_load_is_over_time() -> None:
    before = LoadTotals(at_ns=100)
    now = before.after(110, 4, 1000).after(130, 1, 0).after(140, 0, 0)
    assert now.mean_since(before) == ((20 * 4 + 10 * 1) / 40, 20 * 1000 / 40)
    assert now.mean_since(now) == (0, 0)


def test_the_beginnings_of_a_prompt_end_with_all_of_it() -> None:
    prompt = prompt_of({"prompt": "x" * 10_000})
    keys, shares = zip(*prefix_keys_of(prompt), strict=True)
    assert keys == tuple(prompt.keys[depth - 1] for depth in marked_depths(len(prompt.keys)))
    assert [*shares] == sorted(shares)
    assert abs(shares[0] - BLOCK_BYTES / 10_002) < 1e-3
    assert 1 - BLOCK_BYTES / 10_000 < shares[-1] <= 1


def test_router_and_replica_make_the_same_keys_of_a_body_and_bear_any_other() -> None:
    text = "Once upon a time " * 40
    assert prompt_of_body(body(text)) == prompt_of(json.loads(body(text)))
    assert prompt_of_body(bytearray(body(text))).keys
    for broken in (b"", b"[]", b"{", b"[" * 5000, b'{"prompt": "\xff"}'):
        assert prompt_of_body(broken).keys == []


@pytest.mark.parametrize("more", [{"user": "\ud83d"}, {"messages": [{"content": "\ud83d Hi"}]}, {"user": 1e400}])
def test_router_finds_the_model_of_every_body_that_a_replica_reads(more: dict[str, Any]) -> None:
    content = body("Hi", **more).replace(b"Infinity", b"1e400")
    for readable in (content, BOM_UTF8 + content, bytearray(BOM_UTF8 + content)):
        assert prompt_of_body(readable).model == "m"
    assert prompt_of_body(content[:-1]).model == ""
    assert prompt_of_body(b'{"model": 1e400}').model == ""


class Parts:
    """A report's sources, without an engine."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.now = EngineNumbers(load=LoadTotals(self.clock()))
        self.prompts: deque[list[tuple[int, BlockHash]]] = deque()
        self.cached = {BlockHash(b"a"), BlockHash(b"b")}
        self.reports = Reports(lambda: self.now, self.prompts, lambda place: place in self.cached, self.clock, "ab")


def test_a_report_is_of_what_is_still_cached_and_has_the_means_since_the_one_before() -> None:
    parts = Parts()
    assert not parts.reports.is_asked
    parts.prompts.append([(1, BlockHash(b"a")), (2, BlockHash(b"b")), (3, BlockHash(b"c"))])
    parts.now = EngineNumbers(
        num_running=3, num_waiting=4, num_tokenizing=1, blocks_used=3, blocks_total=4, load=parts.now.load
    )
    parts.clock.now_ns += LEAST_NS
    parts.now = replace(parts.now, load=parts.now.load.after(parts.clock(), 6, 100))
    parts.clock.now_ns += LEAST_NS
    report = parts.reports.report("a replica")
    assert (report.replica, report.number, [*report.keys]) == ("a replica", 0, [2, 1])
    assert (report.num_open, report.waiting_tokens) == (3, 50)
    assert (report.num_running, report.num_waiting, report.kv_use) == (3, 5, 0.75)
    assert parts.reports.is_asked
    parts.clock.now_ns += LEAST_NS - 1
    parts.cached.clear()
    assert parts.reports.report("another name") == ReplicaReport(
        "another name", report.incarnation, 0, 3, 50, report.keys, 3, 5, 0.75
    )
    parts.clock.now_ns += 1
    later = parts.reports.report("a replica")
    assert (later.incarnation, later.number, [*later.keys]) == (report.incarnation, 1, [])
    assert (later.num_open, later.waiting_tokens) == (6, 100)


def test_an_engine_reports_the_prompts_that_it_has_computed_and_forgets_those_whose_blocks_are_taken() -> None:
    clock = Clock()
    first = body("The quick brown fox. " * 60)
    second = body("Pack my box with five dozen jugs. " * 40)
    keys = [{key for key, _ in prefix_keys_of(asked(content).routing)} for content in (first, second)]
    with make_engine(kv_blocks=512, clock_ns=clock) as engine:
        assert not engine.is_reporting
        assert not engine.report().keys
        assert engine.is_reporting
        for content, expected in ((first, keys[0]), (second, keys[1])):
            list(engine.stream(asked(content)))
            clock.now_ns += LEAST_NS
            report = engine.report("it")
            assert expected <= {*report.keys}
        assert not keys[0] <= {*report.keys}, "the second prompt needed blocks of the first one"


def test_a_router_expects_the_prompt_that_an_engine_has_reported() -> None:
    clock = Clock()
    content = body("Pack my box with five dozen jugs. " * 40)
    with make_engine(kv_blocks=512, clock_ns=clock) as engine:
        engine.report()
        list(engine.stream(asked(content)))
        clock.now_ns += LEAST_NS
        report = engine.report("it")
        router = Router()
        router.update_replicas(["it"], clock())
        router.learn(report, clock())
        decision = router.choose(prompt_of_body(content), clock())
        assert decision.reason is Reason.PREFIX
        assert decision.expected_hit_tokens > 200


def test_open_requests_and_uncomputed_prompt_tokens_are_counted_while_they_are_there() -> None:
    with stepping(request(prompt_len=100)) as (engine, runner, inbox):
        for _ in range(2):
            runner.permit()
            assert runner.started.get().num_tokens == 16
        load = engine.snapshot().load
        assert (load.num_open, load.uncomputed_tokens) == (1, 100 - 32)
        runner.permit(10)
        inbox.wait_terminal("r")
        load = engine.snapshot().load
        assert (load.num_open, load.uncomputed_tokens) == (0, 0)
        assert load.open_ns > 0
