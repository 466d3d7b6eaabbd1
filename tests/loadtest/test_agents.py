"""Runs of agents against servers whose caches are known. A token of theirs is a character, and takes a millisecond."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from loadtest.agents import report
from loadtest.agents.least import AlreadyRead, ReadText, text_of
from loadtest.agents.runs import AgentRuns, Server, ShapeRun, measure
from loadtest.agents.shapes import SHAPES, Ask, Sizes
from loadtest.cli import _command_line
from loadtest.errors import UsageError
from loadtest.http_target import HttpOptions
from loadtest.prompts import Call
from loadtest.sample import Sample
from tests.loadtest.test_http_target import Network, ask, chunk, event

SIZES = Sizes(turns=4, system_tokens=300, added_tokens=60, pasted_tokens=300, answer_tokens=5)
URL = "http://test"
ANSWER = "answer"


def num_common(one: str, other: str) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@dataclass
class Double:
    """Stands in for an HttpTarget and the server behind it."""

    most_kept: int = 1000  # texts in its cache
    keeps_cut: bool = True  # what it had read of a prompt whose client left
    reads_pictures: bool = True
    writes_tools: bool = True
    cached_by: str = "usage"
    is_stopped: bool = False
    kept: list[str] = field(default_factory=list)

    def prepare(self, index: int, call: Call) -> Call:
        return call

    async def exchange(self, call: Call, intended_ns: int, limit_seconds: float | None = None) -> tuple[Sample, str]:
        sample = Sample(0, intended_ns, sent_ns=intended_ns)
        messages = call.body["messages"]
        if not self.reads_pictures and "image_url" in json.dumps(messages):
            sample.error = "http_400"
            sample.error_message = "no pictures here"
            return sample, ""
        text = text_of(Ask(messages, call.body.get("tools", ()) if self.writes_tools else ()))
        cached = max((num_common(text, kept) for kept in self.kept), default=0)
        seconds = (len(text) - cached) / 1e3
        if limit_seconds is not None and seconds > limit_seconds:
            sample.error = "timeout"
            self.keep(text[: cached + int(limit_seconds * 1e3)] if self.keeps_cut else "")
            return sample, ""
        sample.event_ns = [intended_ns + int(seconds * 1e9)]
        self.keep(text + ANSWER)
        sample.prompt_tokens = len(text)
        sample.completion_tokens = len(ANSWER)
        sample.cached_tokens = cached
        sample.cached_by = self.cached_by
        sample.is_abandoned = call.leave_after is not None
        return sample, "" if sample.is_abandoned else ANSWER

    def keep(self, text: str) -> None:
        self.kept = [text, *self.kept][: self.most_kept]

    async def close(self) -> None:
        pass


def measured(double: Double, *shapes: str, **options: Any) -> list[ShapeRun]:
    server = Server(URL, HttpOptions(url=URL, model="m"))
    runs = AgentRuns(shape=shapes or tuple(SHAPES), seed=7, **options)
    return measure([server], runs, SIZES, lambda title: None, lambda server: double)


def total(runs: list[ShapeRun], of: Callable[[Any], float | None]) -> float:
    return sum(of(turn) or 0.0 for run in runs for turn in run.turns)


def test_a_server_that_keeps_everything_reads_nothing_beyond_what_it_has_to() -> None:
    runs = measured(Double())
    assert [run.shape for run in runs] == list(SHAPES)
    for run in runs:
        assert not run.error
        prompts = total([run], lambda turn: turn.prompt)
        assert total([run], lambda turn: turn.again_beyond) <= 0.01 * prompts, run.shape
        sums = total([run], lambda turn: turn.new + turn.again_at_least + turn.again_beyond + turn.cached)
        assert sums == pytest.approx(prompts)


def test_what_has_to_be_read_again_follows_from_the_change_of_the_shape() -> None:
    again = {run.shape: total([run], lambda turn: turn.again_at_least) for run in measured(Double())}
    # Some lines of source code are in two places.
    assert max(again[shape] for shape in ("grows", "picture", "gives-up", "two-agents")) < 3 * SIZES.added_tokens
    assert again["clock"] > 4 * SIZES.added_tokens  # all turns but the last one are behind the time
    assert again["tools"] > 4 * SIZES.added_tokens
    assert 0 < again["summary"] < again["clock"]


def test_a_server_without_a_cache_reads_all_of_it_again_beyond_that() -> None:
    (run,) = measured(Double(most_kept=0), "grows")
    assert total([run], lambda turn: turn.again_beyond) > 0.5 * total([run], lambda turn: turn.prompt)
    assert total([run], lambda turn: turn.beyond_seconds) == pytest.approx(
        total([run], lambda turn: turn.again_beyond) / 1e3
    )
    assert "Most of it: grows" in report.verdict([run])


def test_two_agents_need_room_for_both_and_share_the_beginning() -> None:
    def beyond(most_kept: int) -> float:
        return total(measured(Double(most_kept=most_kept), "two-agents"), lambda turn: turn.again_beyond)

    assert beyond(1) > 10 * (beyond(2) + 1)
    alone, both = measured(Double(), "grows", "two-agents")
    assert alone.kept_tokens < both.kept_tokens < 2 * alone.kept_tokens


def test_a_prompt_that_was_cut_off_counts_as_read_up_to_there() -> None:
    (kept,) = measured(Double(), "gives-up")
    (lost,) = measured(Double(keeps_cut=False), "gives-up")
    beyond = [total([run], lambda turn: turn.again_beyond) for run in (kept, lost)]
    pasted = SIZES.pasted_tokens * 3
    assert beyond[0] < 0.05 * pasted
    assert beyond[1] == pytest.approx(2 / 3 * pasted, rel=0.15)
    assert kept.note.startswith("gave up after 0.")


def test_the_time_until_a_client_gives_up_can_be_set() -> None:
    (run,) = measured(Double(), "gives-up", give_up_seconds=0.1)
    assert run.note.startswith("gave up after 0.10 s, when about 100 tokens were read")
    (run,) = measured(Double(), "gives-up", give_up_seconds=1000.0)
    assert run.note == "it began to answer within 1000.00 s, so the client did not give up"


def test_a_server_that_does_not_say_what_it_had_cached_gets_no_blame() -> None:
    (run,) = runs = measured(Double(cached_by=""), "grows")
    assert {turn.again_beyond for turn in run.turns} == {None}
    assert report.NOT_REPORTED in report.rows_of(runs)[1]
    assert "does not report" in report.verdict(runs)


def test_what_was_cached_by_the_timings_of_llama_cpp_is_marked() -> None:
    runs = measured(Double(cached_by="timings"), "grows")
    assert report.rows_of(runs)[1][2].endswith("*")
    assert [*report.notes_of(runs)] == ["* from the server's timings, because its usage has no cached_tokens"]


def test_a_shape_that_the_model_refuses_is_said_and_leaves_no_row() -> None:
    runs = measured(Double(reads_pictures=False), "picture")
    assert report.shown(runs, {URL: "title"}).endswith(
        "picture: not measured: http_400 no pictures here\nNo run was completed.\n"
    )


def test_a_template_without_tools_is_said() -> None:
    assert [run.note for run in measured(Double(writes_tools=False), "grows", "tools")] == [
        "",
        "its template writes no tools",
    ]


def test_runs_of_the_same_seed_are_the_same_and_no_two_runs_have_a_beginning_in_common() -> None:
    def first_texts(seed: int) -> list[str]:
        double = Double(most_kept=10_000)
        server = Server(URL, HttpOptions(url=URL, model="m"))
        measure([server], AgentRuns(seed=seed, repeats=2), SIZES, lambda title: None, lambda server: double)
        return double.kept

    assert first_texts(1) == first_texts(1) != first_texts(2)
    (run,) = measured(Double(), "grows")
    assert run.turns[0].cached == 0


def test_servers_take_turns_in_the_opposite_order_in_each_second_round() -> None:
    servers = [Server(f"http://{name}", HttpOptions(url=f"http://{name}", model="m")) for name in "ab"]
    options = AgentRuns(shape=("grows",), repeats=2, seed=1)
    runs = measure(servers, options, SIZES, lambda title: None, lambda server: Double())
    assert [run.url[-1] for run in runs] == ["a", "b", "b", "a"]


def test_a_line_of_the_report_adds_up_the_turns() -> None:
    (row,) = report.rows_of(runs := measured(Double(), "grows"))[1:]
    assert row[0] == "grows"
    assert row[1] == f"{sum(turn.prompt for turn in runs[0].turns):,}"
    assert row[-1] == f"{round(runs[0].kept_tokens):,}"
    json.dumps(report.as_json(runs))


def test_tokens_of_a_common_beginning_are_known_at_the_ends_of_prompts_and_estimated_between() -> None:
    read = AlreadyRead()
    read.add(ReadText("abcd" * 10, "efgh", 20, 2), agent=0)
    assert read.needed("abcd" * 10 + "efgh" + "new", 30).total == pytest.approx(8)
    assert read.needed("abcd" * 5 + "other", 12).total == pytest.approx(2)
    assert read.needed("abcd" * 10, 20).total == 1  # The last token is always read.
    assert read.num_kept == 22


def test_the_cached_tokens_of_timings_count_where_usage_has_none() -> None:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1}, '
    usage += b'"timings": {"cache_n": 5, "prompt_n": 2}}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    end = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    (sample,) = ask(Network([(20, head), (50, chunk(event(" a"))), (95, chunk(usage)), (96, end)]))
    assert (sample.cached_tokens, sample.cached_by) == (5, "timings")


@pytest.mark.parametrize("options", [{"repeats": 0}, {"give_up_seconds": 0.0}])
def test_a_wrong_option_names_its_flag(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")):
        AgentRuns(**options)


def test_the_command_has_a_flag_for_each_option() -> None:
    arguments = _command_line("bench")["agents"].assemble_argument_collection(parse_docstring=True)
    names = {argument.names[0] for argument in arguments if argument.parse}
    assert names >= {"--url", "--shape", "--give-up-seconds", "--turns", "--system-tokens", "--json"}
