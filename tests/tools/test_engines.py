"""The checks of the gateway in front of other engines compare answers, and report what differs."""

import asyncio

import httpx

from loadtest.null_server import NullOptions, NullServer
from tools.engines.__main__ import CHAT, cases, difference, is_regrouped, masked
from tools.engines.tap import running_tap

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


def test_a_tap_passes_on_what_the_engine_sends_and_keeps_it() -> None:
    body = {"model": "null", "stream": True, "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}

    async def ask() -> tuple[bytes, bytes, bytes, dict[str, bytes]]:
        engine = NullServer(NullOptions())
        await engine.start()
        with running_tap(engine.port) as tap:
            async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(retries=3)) as http:
                url, direct = (f"http://127.0.0.1:{port}" for port in (tap.port, engine.port))
                headers = {"x-request-id": "known"}
                first, past = [await http.post(f"{each}{CHAT}", json=body, headers=headers) for each in (url, direct)]
                without_id = await http.get(f"{url}/health")  # on the first connection
        await engine.close()
        return first.content, past.content, without_id.content, tap.bodies

    first, past, without_id, kept = asyncio.run(ask())
    assert kept == {"known": first, "": without_id}
    assert first.count(b" token") == past.count(b" token") == 3
    assert first.endswith(b"data: [DONE]\n\n")


def test_requests_are_mixed_and_differ() -> None:
    found = [case for _, case in zip(range(36), cases("m", {}), strict=False)]
    assert len({path for _, path, _ in found}) > 5
    assert {method for method, _, _ in found} == {"POST", "GET"}
    assert sum(path == CHAT for _, path, _ in found) > 12
