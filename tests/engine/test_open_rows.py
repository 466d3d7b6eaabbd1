"""Open requests are described from their submission on, and their cached tokens are the same everywhere."""

from dataclasses import replace

import pytest

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Request, TextPrompt
from oaiserve.engine.sequences.step import Step
from oaiserve.facts.open_row import OpenRow
from oaiserve.facts.record import Cause, EventKind, Origin, WaitReason, Whose
from oaiserve.wire.continuation import Piece
from tests.engine.accounts.lab import Lab
from tests.engine.doubles import (
    BlockedTokenizer,
    Clock,
    Inbox,
    ScriptedRunner,
    make_engine,
    request,
    wait_until_idle,
)

ORIGIN = Origin("shown", "chat", "/v1/chat/completions", "demo", client="alice")


def row_of(engine: Engine, request_id: str) -> OpenRow:
    return engine.open_requests(5_000)[request_id]


def test_a_request_is_listed_from_its_submission_and_shows_the_progress_of_its_prompt() -> None:
    runner = ScriptedRunner(gated=True)
    inbox = Inbox()
    with make_engine(runner) as engine:
        engine.submit(replace(request("r", prompt_len=40), origin=ORIGIN), inbox)
        assert row_of(engine, "r").phase in ("tokenize_wait", "tokenize", "queue", "prefill")
        for computed in (0, 16, 32):
            runner.started.get()
            row = row_of(engine, "r")
            assert (row.phase, row.prompt_tokens, row.computed_prompt_tokens) == ("prefill", 40, computed)
            engine.submit(request(f"next{computed}"), inbox)  # during a step, so the engine thread has not taken it
            assert row_of(engine, f"next{computed}").phase == "tokenize_wait"
            assert next(iter(engine.open_requests(0))) == f"next{computed}"  # newest first
            assert [*engine.open_requests(0, "r")] == ["r"]
            assert engine.open_requests(0, "another") == {}
            engine.abort(f"next{computed}")
            runner.permit()
        assert (row.request_id, row.operation, row.route, row.model, row.client) == (
            *("shown", "chat", "/v1/chat/completions"),
            *("demo", "alice"),
        )
        assert [phase.name for phase in row.phases][-1] == "prefill"
        assert sum(phase.duration_ns for phase in row.phases) == row.elapsed_ns
        runner.started.get()
        row = row_of(engine, "r")
        assert (row.phase, row.computed_prompt_tokens, row.completion_tokens) == ("decode", 40, 1)
        assert (row.waits_for, row.prompt_left_ns) == (None, None)
        runner.permit(100)
        inbox.wait_terminal("r", "next0", "next16", "next32")
        wait_until_idle(engine)
        assert engine.open_requests(0) == {}


def test_an_open_request_has_its_causes_so_far_and_its_time_left() -> None:
    rows: list[OpenRow] = []

    class Watched(Lab):
        def _compute(self, step: Step) -> None:
            rows.extend(row for name, row in self.engine.open_requests(0).items() if name in ("long", "waits"))
            super()._compute(step)

    lab = Watched(max_running=2)
    with lab.engine:
        lab.learn()
        ended = lab.run(
            request("long", prompt_len=700, max_tokens=40),
            request("beside", prompt_len=4, max_tokens=60),
            request("waits", prompt_len=4, max_tokens=1),
        )
    by_phase = {phase: [row for row in rows if row.phase == phase] for phase in ("queue", "prefill", "decode")}
    assert {row.waits_for for row in by_phase["queue"]} <= set(WaitReason)
    assert by_phase["queue"][-1].waits_for == WaitReason.BATCH_FULL
    assert not any(row.waits_for for row in by_phase["prefill"] + by_phase["decode"])
    last = [row for row in by_phase["decode"] if row.completion_tokens > 1][-1]
    assert [*last.phases[-1].causes_ns.values()] == sorted(last.phases[-1].causes_ns.values(), reverse=True)
    assert sum(last.phases[-1].causes_ns.values()) == last.phases[-1].duration_ns
    assert last.phases[-2].causes_ns == ended["long"].account.prefill_causes_ns
    assert last.phases[-1].causes_ns[Cause.ALONE] < ended["long"].account.decode_causes_ns[Cause.ALONE]
    num_decoded = last.completion_tokens - 1
    assert last.answer_left_ns == last.phases[-1].duration_ns * (39 - num_decoded) // num_decoded
    reading = next(row for row in by_phase["prefill"] if row.computed_prompt_tokens)
    assert reading.prompt_left_ns > 0
    assert reading.answer_left_ns is None


@pytest.mark.parametrize(("phase", "policy"), [("queue", "fcfs"), ("prefill", "fair"), ("decode", "fair")])
def test_an_open_request_says_whose_requests_its_phase_went_to(phase: str, policy: str) -> None:
    rows: list[OpenRow] = []

    class Watched(Lab):
        def _compute(self, step: Step) -> None:
            rows.extend(row for name, row in self.engine.open_requests(0).items() if name == "light")
            super()._compute(step)

    def of(client: str, sent: Request) -> Request:
        return replace(sent, client=client, origin=Origin(client=client))

    lab = Watched(policy=policy, max_running=1 if phase == "queue" else 8)
    with lab.engine:
        lab.learn()
        light = of("alice", request("light", prompt_len=600, max_tokens=40))
        heavy = of("batchjob", request("heavy", prompt_len=2000, max_tokens=60))
        sent = (light, heavy) if phase == "decode" else (heavy, light)
        ended = lab.run(*sent, after=2)
    last = [row for row in rows if row.phase == phase and row.phases[-1].others][-1]
    (so_far,) = last.phases[-1].others
    (whole,) = ended["light"].account.others_ns[phase]
    assert (so_far.whose, so_far.client) == (Whose.OTHER_CLIENT, "batchjob")
    for kind in ("prompts_ns", "decodes_ns"):
        assert getattr(so_far, kind) <= getattr(whole, kind)
    assert so_far.prompts_ns + so_far.decodes_ns > whole.total_ns / 2


def test_the_pace_of_a_continued_stream_is_that_of_its_own_tokens() -> None:
    rows: list[OpenRow] = []

    class Watched(Lab):
        def _compute(self, step: Step) -> None:
            rows.extend(row for name, row in self.engine.open_requests(0).items() if name == "rest")
            super()._compute(step)

    lab = Watched()
    with lab.engine:
        sent = (Piece(0, [70 + number for number in range(30)]),)
        lab.run(replace(request("rest", prompt_len=4, max_tokens=40), sent=sent))
    last = [row for row in rows if row.phase == "decode"][-1]
    num_decoded = last.completion_tokens - 30 - 1
    assert num_decoded > 0
    assert last.answer_left_ns == last.phases[-1].duration_ns * (9 - num_decoded) // num_decoded


def test_a_request_that_is_tokenized_is_listed() -> None:
    tokenizer = BlockedTokenizer()
    inbox = Inbox()
    with make_engine(tokenizer=tokenizer) as engine:
        engine.submit(replace(request("r"), prompts=(TextPrompt("blocked"),)), inbox)
        tokenizer.entered.wait()
        engine.world.settle()
        row = row_of(engine, "r")
        assert (row.phase, row.prompt_tokens) == ("tokenize", 0)
        tokenizer.release.set()
        inbox.wait_terminal("r")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("end", ["the client leaves", "a timeout", "the device fails"])
def test_a_request_that_ends_during_prefill_reports_its_cached_tokens(end: str, n: int) -> None:
    clock = Clock()
    inbox = Inbox()
    prompts: list[str] = []  # prompts of the steps

    def computing(step: Step) -> None:
        prompts.extend(chunk.sequence.request_id for chunk in step.chunks if chunk.num_tokens > 1)
        if prompts.count("again") == 2:
            if end == "the client leaves":
                engine.abort("again")
            clock.move(60)
            assert end != "the device fails"

    engine = make_engine(ScriptedRunner(computing=computing), clock_ns=clock, request_timeout_seconds=50)
    with engine:
        list(engine.stream(request("first", prompt_len=33)))
        hits = engine.snapshot().num_prefix_hits
        engine.submit(request("again", prompt_len=120, n=n), inbox)
        terminal = inbox.wait_terminal("again")["again"]
        assert (terminal.times.first_token, terminal.usage.prompt_tokens) == (None, 120)
        (event,) = [event for event in terminal.account.events if event.kind is EventKind.PREFIX_CACHE_HIT]
        assert terminal.usage.cached_tokens == event.details["tokens"] == engine.snapshot().num_prefix_hits - hits == 32
