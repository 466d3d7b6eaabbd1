import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from loadtest.arrivals import Arrivals
from loadtest.errors import UsageError
from loadtest.experiment import plan
from loadtest.prompts import Workload, length_sampler, make_calls


def calls_of(seed: int = 0, **options: Any) -> list[Any]:
    return make_calls(Workload(**options), seed)


def test_a_seed_determines_the_calls() -> None:
    options: dict[str, Any] = {"num_requests": 20, "input_len": "uniform:5:9", "max_new_tokens": "choice:2:4"}
    assert calls_of(1, **options) == calls_of(1, **options)
    assert calls_of(1, **options) != calls_of(2, **options)


def test_random_prompts_are_unique_and_have_the_requested_lengths() -> None:
    calls = calls_of(num_requests=50, input_len="uniform:5:9", max_new_tokens="3")
    assert {len(call.prompt) for call in calls} == {5, 6, 7, 8, 9}
    assert len({tuple(call.prompt) for call in calls}) == 50
    assert {call.max_tokens for call in calls} == {3}
    words = calls_of(num_requests=2, input_len="7", random_form="words")
    assert all(len(call.prompt.split()) == 7 for call in words)


def test_prompts_of_a_group_have_a_common_prefix() -> None:
    calls = calls_of(num_requests=6, input_len="2", prefix_len=10, prefix_groups=2)
    assert {tuple(call.prompt[:10]) for call in calls[::2]} == {tuple(calls[0].prompt[:10])}
    assert calls[0].prompt[:10] != calls[1].prompt[:10]
    assert len({tuple(call.prompt) for call in calls}) == 6
    assert all(len(call.prompt) == 12 for call in calls)


def test_a_prompt_is_repeated_and_unique_prompts_differ_from_the_start_in_all_runs() -> None:
    assert [call.prompt for call in calls_of(num_requests=2, prompt="ab ", prompt_repeats=3)] == ["ab ab ab "] * 2
    options: dict[str, Any] = {"num_requests": 3, "prompt": "ab", "unique_prompts": True}
    unique = [call.prompt for seed in (1, 2) for call in calls_of(seed, **options)]
    assert len({prompt[:4] for prompt in unique}) == 6  # they differ within the first block of a cache
    assert all(prompt.endswith("ab") for prompt in unique)


def test_the_shares_of_clients_that_leave_or_read_slowly_are_kept() -> None:
    calls = calls_of(num_requests=1000, abandon_share=0.2, slow_share=0.5, max_new_tokens="10", input_len="1")
    leaving = [call.leave_after for call in calls if call.leave_after is not None]
    assert len(leaving) == pytest.approx(200, abs=50)
    assert set(leaving) == set(range(1, 10))
    assert sum(call.is_slow for call in calls) == pytest.approx(500, abs=70)


def test_a_conversation_has_a_question_for_each_turn() -> None:
    (call,) = calls_of(num_requests=1, turns=3, input_len="4")
    assert isinstance(call.prompt, str)
    assert [len(turn.messages[0]["content"].split()) for turn in call.next_turns] == [4, 4]


def test_lines_of_a_session_are_turns_of_a_conversation(tmp_path: Path) -> None:
    said = {"role": "user", "content": "the tool's output"}
    rows: list[Any] = [
        {"session_id": "a", "timestamp": 1500, "input_length": 9, "output_length": 3, "hash_ids": [1]},
        {"session_id": "b", "messages": [said], "output_length": 4},
        {"session_id": "a", "delay": 250.0, "input_length": 5, "output_length": 2},
        {"session_id": "a", "delay": 500, "messages": [said], "output_length": 1},
    ]
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    one, two = calls_of(requests=file, random_form="words")
    assert (len(one.prompt.split()), one.max_tokens, one.timestamp, one.body) == (9, 3, 1.5, {})
    assert [(turn.max_tokens, turn.pause_seconds) for turn in one.next_turns] == [(2, 0.25), (1, 0.5)]
    assert len(one.next_turns[0].messages[0]["content"].split()) == 5
    assert one.next_turns[1].messages == [said]
    assert (two.body["messages"], two.max_tokens, two.next_turns) == ([said], 4, ())
    assert len(calls_of(requests=file, num_requests=1, random_form="words")) == 1
    del rows[2]["session_id"]
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UsageError, match='line 3 has no "session_id"'):
        calls_of(requests=file)


def test_a_line_of_a_file_is_a_request_or_has_lengths(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"timestamp": 3, "prompt": "p", "max_tokens": 9, "stream": False, "model": "other", "stop": ["x"]},
        {"messages": [{"role": "user", "content": "q"}], "max_completion_tokens": 8},
        {"timestamp": 5, "input_length": 6, "output_length": 2, "prefix": 1},
        {"timestamp": 6, "input_length": 6, "output_length": 2, "prefix": 1},
    ]
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    one, two, three, four = calls_of(requests=file, prefix_len=4)
    assert (one.prompt, one.max_tokens, one.timestamp, one.body) == ("p", 9, 3, {"stop": ["x"]})
    assert (two.body["messages"], two.max_tokens) == (rows[1]["messages"], 8)
    assert (len(three.prompt), three.max_tokens) == (6, 2)
    assert three.prompt[:4] == four.prompt[:4]
    assert three.prompt[4:] != four.prompt[4:]
    assert len(calls_of(requests=file, num_requests=2)) == 2


@pytest.mark.parametrize(
    ("arrivals", "count"),
    [
        (Arrivals(), 100),
        (Arrivals(arrival="constant", rate=30), 100),
        (Arrivals(arrival="constant", rate=30, duration_seconds=10), 301),
        (Arrivals(duration_seconds=10), 100),  # how many requests a user will send is not known
        (Arrivals(arrival="at-once", duration_seconds=10), 100),
    ],
)
def test_the_schedule_determines_the_number_of_requests_if_it_ends_by_itself(arrivals: Arrivals, count: int) -> None:
    calls, offsets = plan(Workload(input_len="1"), arrivals, 0)
    assert len(calls) == count
    assert offsets is None or len(offsets) == count
    assert len(plan(Workload(input_len="1", num_requests=2), arrivals, 0)[0]) == 2


def test_a_time_in_which_no_request_is_due_is_refused() -> None:
    arrivals = Arrivals(arrival="poisson", rate=1, duration_seconds=0.001)
    with pytest.raises(UsageError, match=r"--duration-seconds is 0.001, in which no request is due: poisson, 1 req"):
        plan(Workload(), arrivals, 0)


def test_all_lines_of_a_file_are_sent_by_default(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text('{"prompt": "a"}\n' * 130)
    assert len(plan(Workload(requests=file), Arrivals(), 0)[0]) == 130


def test_a_trace_is_sent_in_the_order_of_its_times(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    trace = Arrivals(arrival="trace")
    file.write_text('{"timestamp": 9, "prompt": "b"}\n{"timestamp": 7.5, "prompt": "a"}\n')
    calls, offsets = plan(Workload(requests=file), trace, 0)
    assert ([call.prompt for call in calls], offsets) == (["a", "b"], [0, 1.5])
    file.write_text('{"timestamp": 9, "prompt": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(UsageError, match="timestamp"):
        plan(Workload(requests=file), trace, 0)


def test_lengths_of_a_file_may_be_written_as_fractions(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(
        '{"session_id": 1, "input_length": 3.0, "output_length": 4.0}\n'
        '{"session_id": 1, "input_length": 5.0, "output_length": 6.0}\n'
    )
    (call,) = calls_of(requests=file, random_form="words", abandon_share=1.0)
    (turn,) = call.next_turns
    assert (len(str(call.prompt).split()), len(turn.messages[0]["content"].split())) == (3, 5)
    assert json.dumps([call.max_tokens, turn.max_tokens]) == "[4, 6]"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{}\nx", "line 2 of"),
        ("[]", "is not a JSON object"),
        ("", "there is no request"),
        ('{"input_length": "x"}', '"input_length": "x", but it must be a number of at least 0'),
        ('{"input_length": -1}', "at least 0"),
        ('{"max_tokens": {}}', '"max_tokens": {}, but'),
        ('{"timestamp": "2026-11-27"}', "it must be a number."),
        ('{"input_length": 1e999}', "must be a number of at least 0"),
        ('{"output_length": NaN}', "must be a number of at least 0"),
        ('{"prompt": "a"}\n{"messages": "Hi"}', 'line 2 of .* has "messages" that are no list of objects'),
        ('{"messages": ["Hi"]}', "no list of objects"),
        ('{"session_id": ["a"]}', 'the "session_id" in line 1 must be a text or a whole number'),
        ('{"prompt": "a"}\n{"prompt": "caf\xe9"}', "line 2 of .* is not text in UTF-8"),
        ('{"session_id": "a", "timestamp": null}', '"timestamp": null, but'),
        ('{"session_id": "a"}\n{"session_id": "a", "delay": "1 s"}', "line 2 of"),
    ],
)
def test_a_file_without_valid_requests_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(UsageError, match=sentence):
        calls_of(requests=file)
    with pytest.raises(UsageError, match="cannot be read"):
        calls_of(requests=tmp_path / "none")


def test_lengths_follow_their_distribution() -> None:
    rng = random.Random(0)

    def draw(spec: str) -> list[int]:
        sampler = length_sampler("--x", spec)
        return [sampler(rng) for _ in range(5000)]

    assert set(draw("5")) == {5}
    assert statistics.fmean(draw("normal:100:10")) == pytest.approx(100, rel=0.02)
    assert statistics.median(draw("lognormal:200:0.5")) == pytest.approx(200, rel=0.05)
    assert set(draw("choice:1:7")) == {1, 7}
    assert min(draw("normal:1:10")) == 1
    for wrong in ("0", "x", "uniform:3", "uniform:5:3", "normal:0:1", "choice:", "gauss:1:2", "5:6"):
        with pytest.raises(UsageError, match=f"--x is '{wrong}'"):
            length_sampler("--x", wrong)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_requests": 0}, "--num-requests is 0"),
        ({"abandon_share": 1.5}, "--abandon-share is 1.5"),
        ({"max_new_tokens": "none"}, "--max-new-tokens is 'none'"),
        ({"prompt": "a", "prompt_repeats": 0}, "--prompt-repeats is 0"),
        ({"prompt_repeats": 2}, "--prompt-repeats needs a --prompt"),
        ({"unique_prompts": True}, "--unique-prompts needs a --prompt"),
        ({"temperature": -1.0}, "--temperature is -1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Workload(**options)
