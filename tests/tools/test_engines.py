"""The checks of the gateway in front of other engines compare answers, and report what differs."""

import asyncio

import httpx

from loadtest.null_server import NullOptions, NullServer
from tools.engines import cost
from tools.engines.__main__ import CHAT, cases, difference, is_regrouped, masked
from tools.engines.forwarder import HOST, FromClient, ParsedFromEngine
from tools.engines.tap import Tap, TappedClient

FIRST = b'{"id":"chatcmpl-a1","created":17,"choices":[{"text":"Hi"}],"timings":{"prompt_ms":2.5}}'
SECOND = b'{"id":"chatcmpl-b2","created":18,"choices":[{"text":"Hi"}],"timings":{"prompt_ms":9.1}}'


def answer(content: bytes, status: int = 200) -> httpx.Response:
    return httpx.Response(status, content=content, headers={"content-type": "application/json"})


def test_answers_that_differ_by_ids_and_times_are_alike() -> None:
    assert masked(answer(FIRST)) == masked(answer(SECOND))
    of_vllm = (answer(each.replace(b"timings", b"metrics")) for each in (FIRST, SECOND))
    assert masked(next(of_vllm)) == masked(next(of_vllm))


def test_each_other_difference_is_found_and_shown() -> None:
    assert masked(answer(FIRST)) != masked(answer(FIRST, 400))
    for changed in (FIRST.replace(b"Hi", b"Ho"), FIRST + b"\n", FIRST.replace(b":[", b": [")):
        assert masked(answer(FIRST)) != masked(answer(changed))
    assert difference((200, "", b"Hello you"), (200, "", b"Hello Jo")) == "from byte 6 on, b'Hello you' and b'Hello Jo'"
    assert difference((200, "a", b""), (400, "a", b"")) == "(200, 'a') and (400, 'a')"


def test_streams_with_the_same_text_in_other_events_are_told_from_others() -> None:
    def stream(*texts: str) -> httpx.Response:
        events = [b'data: {"choices": [{"delta": {"content": "%b"}}]}\n\n' % text.encode() for text in texts]
        return answer(b"".join(events) + b"data: [DONE]\n\n")

    assert is_regrouped(stream("Hel", "lo"), stream("Hello"))
    assert not is_regrouped(stream("Hel", "lo"), stream("Hell"))
    assert not is_regrouped(answer(b'{"a": 1}'), answer(b'{"a": 2}'))


def test_forwarders_pass_on_what_the_engine_sends_and_a_tap_keeps_it() -> None:
    body = {"model": "null", "stream": True, "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}

    async def ask() -> tuple[bytes, bytes, bytes, Tap]:
        engine = NullServer(NullOptions())
        await engine.start()
        tap = Tap()
        loop = asyncio.get_running_loop()
        tapped = await loop.create_server(lambda: TappedClient(engine.port, tap), HOST, 0)
        parsed = await loop.create_server(lambda: FromClient(engine.port, ParsedFromEngine), HOST, 0)
        urls = [f"http://{HOST}:{server.sockets[0].getsockname()[1]}" for server in (tapped, parsed)]
        async with httpx.AsyncClient() as http:
            first, second = [
                await http.post(f"{url}{CHAT}", json=body, headers={"x-request-id": "known"}) for url in urls
            ]
            without_id = await http.get(f"{urls[0]}/health")  # on the first connection
        for server in (tapped, parsed):
            server.close()
        await engine.close()
        return first.content, second.content, without_id.content, tap

    first, second, without_id, tap = asyncio.run(ask())
    assert tap.bodies == {"known": first, "": without_id}
    assert first.count(b" token") == second.count(b" token") == 3
    assert first.endswith(b"data: [DONE]\n\n")


def test_requests_are_mixed_and_differ() -> None:
    found = [case for _, case in zip(range(36), cases("m", {}), strict=False)]
    assert len({path for _, path, _ in found}) > 5
    assert {method for method, _, _ in found} == {"POST", "GET"}
    assert sum(path == CHAT for _, path, _ in found) > 12


def test_the_report_has_medians_and_ranges() -> None:
    proxies = {
        "this gateway": {"first_us": [900.0, 800.0, 1200.0], "token_us": [7.5, 9.0, 8.0]},
        cost.OURS: {"first_us": [500.0, 500.0, 500.0], "token_us": [5.0, 6.0, 4.0]},
    }
    results = {"proxies": proxies, "streams": 32, "turns": 3, "requests": 200, "load_average": [0.25, 2.5]}
    assert cost.report(results).splitlines() == [
        "| proxy | adds to the first token | range | CPU time per token of 32 streams | range "
        "| times that of the gateway of our servers | range |",
        "|---|---|---|---|---|---|---|",
        "| this gateway | 0.90 ms | 0.80 to 1.20 | 8.00 µs | 7.50 to 9.00 | 1.50 | 1.50 to 2.00 |",
        "| the gateway of our servers | 0.50 ms | 0.50 to 0.50 | 5.00 µs | 4.00 to 6.00 | 1.00 | 1.00 to 1.00 |",
        "",
        "3 turns of 200 short streams each; load average 0.2 before and 2.5 at the end",
    ]
