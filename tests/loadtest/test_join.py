from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from loadtest.join import (
    DIALECTS,
    READ_AGAIN_SECONDS,
    READ_AGAIN_TOKENS,
    ServerSide,
    inspect_server,
    join,
    scrape_settled,
)
from loadtest.metrics_page import parse_metrics
from loadtest.sample import Sample
from oaiserve.facts.times import PHASES as SERVER_PHASES
from oaiserve.telemetry import names, vllm_names
from tests.loadtest.samples import sample

OURS, VLLM = DIALECTS
PHASES = dict(zip(SERVER_PHASES, (1, 2, 1, 2, 4, 80, 30, 5), strict=True))  # 80 ms of prefill, 30 of decode


def metrics_text(count: int, ttft_ms: float, duration_ms: float) -> str:
    """Return the metrics after `count` finished requests with these means, and some rejected ones."""
    labels = 'model="m",operation="chat"'
    lines = ["# HELP x y", 'oaiserve_build_info{version="1"} 1.0', "process_cpu_seconds_total 3.25"]
    for name, mean_ms in (("time_to_first_token", ttft_ms), ("request_duration", duration_ms)):
        base = f"oaiserve_{name}_seconds"
        lines += [
            f'{base}_count{{outcome="finished",{labels}}} {count:.1f}',
            f'{base}_sum{{outcome="finished",{labels}}} {count * mean_ms / 1e3}',
            f'{base}_count{{outcome="rejected",{labels}}} {count * 2:.1f}',
            f'{base}_sum{{outcome="rejected",{labels}}} {count * 2:.1f}',
        ]
    for phase, ms in PHASES.items():
        base = "oaiserve_request_phase_seconds"
        more = f'{{phase="{phase}",outcome="finished",{labels}}}'
        lines += [f"{base}_count{more} {count:.1f}", f"{base}_sum{more} {count * ms / 1e3}"]
    return "\n".join(lines) + "\n"


def run_of(count: int) -> list[Sample]:
    """Return `count` samples with a TTFT of 100 ms and a duration of 130 ms, as the client sees them."""
    phases_ns = {name: ms * 1_000_000 for name, ms in PHASES.items()}
    return [sample([100, 115, 130], at=10 * i, phases_ns=dict(phases_ns)) for i in range(count)]


def joined(samples: Sequence[Sample], after: str, before: str = metrics_text(5, 1, 1)) -> dict[str, Any]:
    side = ServerSide(OURS, round_trip_seconds=0.001)
    return join(samples, side, parse_metrics(before), parse_metrics(after), loop_lag_seconds=0.001)


def plus_five(count: int, ttft_ms: float, duration_ms: float) -> str:
    """Return the metrics after the five requests of `before` and `count` more with these means."""
    total = 5 + count
    return metrics_text(total, (5 + count * ttft_ms) / total, (5 + count * duration_ms) / total)


def test_means_are_of_this_run_only_and_unaccounted_time_is_network_and_client() -> None:
    result = joined(run_of(10), plus_five(10, 92, 125))
    assert result["num_requests"] == 10
    assert result["means"]["ttft"] == pytest.approx(0.092)
    assert result["means"]["duration"] == pytest.approx(0.125)
    assert result["means"]["prefill"] == pytest.approx(0.080)
    assert result["rest"]["first_token"]["p50"] == pytest.approx(0.010)
    assert result["rest"]["last_token"]["p50"] == pytest.approx(0.010)
    assert result["check"]["status"] == "agree"


def test_what_was_read_again_is_of_this_run_by_reason() -> None:
    def page(system: float, evicted: float, seconds: float) -> str:
        of_model = 'served_model="m"'
        return (
            f'oaiserve_prompt_tokens_read_again_total{{reason="system",{of_model}}} {system}\n'
            f'oaiserve_prompt_tokens_read_again_total{{reason="evicted",{of_model}}} {evicted}\n'
            f'oaiserve_prompt_read_again_seconds_total{{reason="system",{of_model}}} {seconds}\n'
        )

    result = joined(run_of(10), plus_five(10, 92, 125) + page(130, 8, 2.5), metrics_text(5, 1, 1) + page(30, 8, 0.5))
    assert result["read_again"] == {"tokens": {"system": 100}, "seconds": pytest.approx(2.0)}
    assert joined(run_of(10), plus_five(10, 92, 125))["read_again"] == {"tokens": {}, "seconds": 0}


@pytest.mark.parametrize(
    ("ttft_ms", "duration_ms", "word"),
    [(70, 125, "mean ttft"), (92, 90, "mean duration"), (110, 125, "mean ttft"), (92, 140, "mean duration")],
)
def test_means_that_the_network_cannot_explain_disagree(ttft_ms: float, duration_ms: float, word: str) -> None:
    check = joined(run_of(10), plus_five(10, ttft_ms, duration_ms))["check"]
    assert check["status"] == "disagree"
    assert word in check["reason"]


def tokens_text(prompt: int, generated: int) -> str:
    """Return metrics of the tokens of finished requests, and of some cancelled ones."""
    base = "oaiserve_request"
    return "".join(
        f'{base}_{kind}_tokens_sum{{outcome="{outcome}"}} {number}\n'
        for kind, finished in (("prompt", prompt), ("generation", generated))
        for outcome, number in (("finished", finished), ("cancelled", 5000))
    )


def test_requests_of_another_client_disagree_and_have_their_share_of_the_tokens() -> None:
    samples = run_of(10)
    for one in samples:
        one.prompt_tokens = 27  # and 3 that it wrote
    result = joined(samples, plus_five(12, 90, 125) + tokens_text(350, 50), metrics_text(5, 1, 1) + tokens_text(0, 0))
    assert result["others"] == {"num_requests": 2, "token_share": pytest.approx(0.25)}
    assert result["check"] == {
        "status": "disagree",
        "reason": "the server counted 12 finished requests, the client 10: 2 came from another client, with 25% of "
        "their tokens",
    }


@pytest.mark.parametrize("own", [{"error": "timeout"}, {"completion_tokens": None}], ids=["failed", "without usage"])
def test_share_of_another_client_is_unknown_if_the_own_tokens_are(own: dict[str, Any]) -> None:
    samples = [*run_of(9), sample([100], **own)]
    result = joined(samples, plus_five(12, 90, 125) + tokens_text(350, 50), metrics_text(5, 1, 1) + tokens_text(0, 0))
    assert result["others"] == {"num_requests": 2, "token_share": None}
    assert result["check"]["reason"].endswith("2 came from another client")


def test_fewer_requests_at_the_server_disagree_without_another_client() -> None:
    result = joined(run_of(10), plus_five(9, 90, 125))
    assert result["check"]["status"] == "disagree"
    assert result["check"]["reason"].endswith("was it restarted, or do several servers answer?")
    assert result["others"] is None


def test_runs_that_cannot_be_compared_are_not_checked() -> None:
    left = [*run_of(9), sample([100], is_abandoned=True)]
    assert joined(left, plus_five(10, 92, 125))["check"]["status"] == "not checked"
    assert joined([sample([], error="connect")], plus_five(1, 9, 9))["check"]["status"] == "not checked"
    side = ServerSide(None, 0.001)
    assert join(run_of(2), side, {}, {}, 0.0)["check"]["status"] == "not checked"
    assert joined(run_of(10), after="")["check"]["status"] == "not checked"  # the server has died


def test_without_streaming_only_the_duration_is_compared() -> None:
    samples = [sample([130], is_stream=False) for _ in range(4)]
    assert joined(samples, plus_five(4, 90, 125))["check"]["status"] == "agree"
    assert joined(samples, plus_five(4, 90, 125))["rest"]["first_token"] is None


def test_calls_and_reasoning_begin_after_the_first_token_so_only_the_duration_is_compared() -> None:
    samples = run_of(4)
    samples[0].is_parsed = True
    result = joined(samples, plus_five(4, 40, 125))
    assert result["check"]["status"] == "agree"
    assert result["rest"]["first_token"]["n"] == 3
    assert result["rest"]["last_token"]["n"] == 4
    assert joined(samples, plus_five(4, 40, 90))["check"]["status"] == "disagree"


def test_labels_may_contain_anything_and_exponents_are_numbers() -> None:
    parsed = parse_metrics('a{x="q\\"}, y",z="1"} 1e-05\nb NaN\n# c 3\nd_total 7 1234\n')
    assert parsed["a", frozenset({("x", 'q\\"}, y'), ("z", "1")})] == 1e-05
    assert parsed["d_total", frozenset()] == 7
    assert len(parsed) == 3


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (200, metrics_text(1, 1, 1), "oaiserve"),
        (200, "oaiserve_requests_running 0\n", "oaiserve"),
        (200, 'vllm:e2e_request_latency_seconds_count{model_name="m"} 1\n', "vllm"),
        (200, "something_else 1\n", None),
        (404, "", None),
    ],
)
def test_the_kind_of_server_is_recognised_by_its_metrics(status: int, text: str, expected: str | None) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))
    with httpx.Client(transport=transport, base_url="http://test") as client:
        side = inspect_server(client)
    assert (side.dialect.name if side.dialect else None) == expected


def test_a_gateway_has_timings_and_no_times_to_compare() -> None:
    text = 'oaiserve_gateway_requests_total{ending="answered"} 3\n'
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
    with httpx.Client(transport=transport, base_url="http://test") as client:
        side = inspect_server(client)
        metrics = side.scrape()
    assert side.has_timings
    assert join(run_of(2), side, metrics, metrics, 0.0)["check"]["status"] == "not checked"


def test_a_scrape_of_a_server_that_has_died_is_empty_and_raises_nothing() -> None:
    is_up = True

    def answer(request: httpx.Request) -> httpx.Response:
        if not is_up:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, text=metrics_text(1, 1, 1))

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://test") as client:
        side = inspect_server(client)
        assert side.scrape()
        is_up = False
        assert side.scrape() == {}
        with pytest.raises(httpx.ConnectError):
            inspect_server(client)


def test_a_scrape_waits_until_the_metrics_include_all_requests() -> None:
    texts = iter([metrics_text(5, 1, 1), metrics_text(6, 1, 1), metrics_text(7, 1, 1)])
    side = ServerSide(OURS, 0.001, scrape=lambda: parse_metrics(next(texts)))
    after = scrape_settled(side, parse_metrics(metrics_text(5, 1, 1)), 2)
    assert after == parse_metrics(metrics_text(7, 1, 1))


def test_a_scrape_waits_for_the_requests_that_the_client_abandoned() -> None:
    """An abandoned answer that the server finished must not stand in for another one, whose times the client has."""

    def page(num_finished: int, num_cancelled: int) -> str:
        base = "oaiserve_request_duration_seconds_count"
        return f'{base}{{outcome="finished"}} {num_finished}\n{base}{{outcome="cancelled"}} {num_cancelled}\n'

    pages = [page(6, 1), page(7, 1), page(7, 2), page(8, 2)]
    texts = iter(pages)
    side = ServerSide(OURS, 0.001, scrape=lambda: parse_metrics(next(texts)))
    after = scrape_settled(side, parse_metrics(page(5, 1)), 2, 4)
    assert after == parse_metrics(pages[-1])


def test_the_dialects_use_the_metric_names_of_the_server() -> None:
    assert OURS.ttft == names.TIME_TO_FIRST_TOKEN_SECONDS.name
    assert OURS.tokens == (names.REQUEST_PROMPT_TOKENS.name, names.REQUEST_GENERATION_TOKENS.name)
    assert VLLM.tokens == (vllm_names.REQUEST_PROMPT_TOKENS.name, vllm_names.REQUEST_GENERATION_TOKENS.name)
    assert OURS.duration == names.DURATION_SECONDS.name
    assert list(OURS.phases) == list(SERVER_PHASES)
    assert (names.READ_AGAIN_TOKENS.name, names.READ_AGAIN_SECONDS.name) == (READ_AGAIN_TOKENS, READ_AGAIN_SECONDS)
    assert {name for name, _ in OURS.phases.values()} == {names.PHASE_SECONDS.name}
    gauges = (names.ENGINE["num_running"], names.ENGINE["num_waiting"], names.KV_CACHE_USAGE)
    assert (OURS.gauges.running, OURS.gauges.waiting, OURS.gauges.kv_cache_usage) == tuple(g.name for g in gauges)
    compatible = (vllm_names.REQUESTS_RUNNING, vllm_names.REQUESTS_WAITING, vllm_names.KV_CACHE_USAGE)
    assert (VLLM.gauges.running, VLLM.gauges.waiting, VLLM.gauges.kv_cache_usage) == tuple(g.name for g in compatible)
