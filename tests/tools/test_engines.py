"""The checks of the gateway in front of other engines compare answers, and report what differs."""

import httpx

from tools.engines import cost
from tools.engines.__main__ import CHAT, cases, difference, masked

FIRST = b'{"id":"chatcmpl-a1","created":17,"choices":[{"text":"Hi"}],"timings":{"prompt_ms":2.5}}'
SECOND = b'{"id":"chatcmpl-b2","created":18,"choices":[{"text":"Hi"}],"timings":{"prompt_ms":9.1}}'


def answer(content: bytes, status: int = 200) -> httpx.Response:
    return httpx.Response(status, content=content, headers={"content-type": "application/json"})


def test_answers_that_differ_by_ids_and_times_are_alike() -> None:
    assert masked(answer(FIRST)) == masked(answer(SECOND))


def test_each_other_difference_is_found_and_shown() -> None:
    assert masked(answer(FIRST)) != masked(answer(FIRST, 400))
    for changed in (FIRST.replace(b"Hi", b"Ho"), FIRST + b"\n", FIRST.replace(b":[", b": [")):
        assert masked(answer(FIRST)) != masked(answer(changed))
    assert difference((200, "", b"Hello you"), (200, "", b"Hello Jo")) == "from byte 6 on, b'Hello you' and b'Hello Jo'"
    assert difference((200, "a", b""), (400, "a", b"")) == "(200, 'a') and (400, 'a')"


def test_requests_are_mixed_and_differ() -> None:
    found = [case for _, case in zip(range(36), cases("m", {}), strict=False)]
    assert len({path for _, path, _ in found}) > 5
    assert {method for method, _, _ in found} == {"POST", "GET"}
    assert sum(path == CHAT for _, path, _ in found) > 12


def test_the_report_has_medians_and_ranges() -> None:
    results = {"first_token_us": [300.0, 200.0, 400.0], "token_us": [7.5, 7.0, 8.0], "streams": 32}
    assert cost.report(results).splitlines()[2:] == [
        "| time to the first token | 300 µs | 200 to 400 |",
        "| CPU time per token of 32 streams | 7.50 µs | 7.00 to 8.00 |",
    ]
