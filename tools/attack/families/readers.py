"""Clients that ask and do not read, read slowly, or leave in the rudest way."""

from __future__ import annotations

import asyncio

from tools.attack.attack import COMPLETIONS, FULL, Number, Sent, Strike, attack, burst, counted, outcomes, post
from tools.attack.wire import Answer, Connection, few_at_once


@attack("8 answers of many MB that nobody reads for 25 s", outcomes(200, 400, "cut", "reset", "closed") | FULL,
        answer_seconds=270, limit_seconds=330, is_work=True)  # fmt: skip
async def unread_answers(strike: Strike) -> None:
    """Answers of about 32 MB: 20 log-probabilities for each of 24,000 tokens of prompts. The client waits until one
    begins, reads nothing of it for a while, and then all: it comes whole, or the server has cut the connection."""
    number, held_seconds = strike.number(8, 2), strike.number(25, 5)
    prompts = [[7] * 4000] * strike.number(6, 1)
    body = post(COMPLETIONS, {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 20, "n": 1})

    async def hold() -> None:
        strike.num_sent += 1
        connection = await strike.connect()
        connection.hold()
        await connection.send(body)
        if await connection.wait_for_bytes(strike.answer_seconds):
            await asyncio.sleep(held_seconds)
        connection.release()
        strike.answers.append(await connection.answer(strike.answer_seconds))
        connection.close()

    await few_at_once([hold] * number, number)


@attack("40 streams, read one byte a second", outcomes(200), limit_seconds=90, is_work=True)
async def slow_streams(strike: Strike) -> None:
    """Streams that are read one byte a second, for a while. They must be neither lost nor waited for."""
    body = post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 50, "ignore_eos": True, "stream": True})

    async def read_slowly() -> None:
        strike.num_sent += 1
        connection = await strike.connect()
        await connection.send(body)
        for _ in range(strike.number(20, 3)):
            await connection.reader.readexactly(1)
            await asyncio.sleep(1)
        connection.close(reset=True)
        strike.answers.append(Answer("200"))  # it was being answered

    number = strike.number(40, 8)
    await few_at_once([read_slowly] * number, number)


@attack("1,000 requests whose connections are reset at once", outcomes(200, "left"), is_work=True)
async def resets(strike: Strike) -> None:
    body = {"prompt": "Tell me of the sea.", "max_tokens": 500, "ignore_eos": True, "stream": True}
    await strike.leave_all([post(COMPLETIONS, body)] * strike.number(1000, 100), 50, after_seconds=0.01)
    answer = await strike.ask(post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1}))
    strike.check(answer.status == 200, f"afterwards a request got {counted([answer])}")


@burst("100 clients that close their side after asking", outcomes(200, "closed", "reset") | FULL, 20, is_work=True)
def half_closed(number: Number) -> list[Sent]:
    """A client that shuts down its side of the connection after its request may still read: it gets an answer, or the
    server ends the connection."""

    async def send(connection: Connection) -> None:
        await connection.send(post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 4}))
        connection.writer.write_eof()

    return [send] * number(100, 20)
