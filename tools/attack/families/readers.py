"""Clients that ask and do not read, read slowly, or leave in the rudest way."""

from __future__ import annotations

import asyncio
import contextlib
import json
from functools import partial

from tools.attack.attack import ATTACKER_KEY, COMPLETIONS, FULL, Attack, Strike, counted, outcomes
from tools.attack.wire import Answer, Connection, request

KEY = {"authorization": f"Bearer {ATTACKER_KEY}"}


def asking(connection: str = "close", **fields: object) -> bytes:
    return request("POST", COMPLETIONS, json.dumps(fields).encode(), KEY | {"connection": connection})


async def unread(strike: Strike) -> None:
    """Answers of about 32 MB: 20 log-probabilities for each of 24,000 tokens of prompts. The client waits until one
    begins, reads nothing of it for a while, and then all: it comes whole, or the server has cut the connection."""
    number, held_seconds = strike.number(8, 2), strike.number(25, 5)
    body = asking(prompt=[[7] * 4000] * strike.number(6, 1), max_tokens=1, prompt_logprobs=20, n=1)

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

    await strike.all([hold] * number, number)


async def slow_streams(strike: Strike) -> None:
    """Streams that are read one byte a second, for a while. They must be neither lost nor waited for."""
    body = asking(prompt="Hi", max_tokens=50, ignore_eos=True, stream=True)

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
    await strike.all([read_slowly] * number, number)


async def resets(strike: Strike) -> None:
    """Clients that send a request and reset the connection. Nobody is there to be answered."""
    body = asking(prompt="Tell me of the sea.", max_tokens=500, ignore_eos=True, stream=True)

    async def leave() -> None:
        strike.num_sent += 1
        strike.answers.append(Answer("left"))  # nobody is there to see one
        with contextlib.suppress(OSError, TimeoutError):
            connection = await strike.connect()
            await connection.send(body)
            await asyncio.sleep(0.01)
            connection.close(reset=True)

    await strike.all([leave] * strike.number(1000, 100), 50)
    answer = await strike.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1})
    strike.check(answer.status == 200, f"afterwards a request got {counted([answer])}")


async def half_closed(strike: Strike) -> None:
    """A client that shuts down its side of the connection after its request may still read: it gets an answer, or the
    server ends the connection."""

    async def send(connection: Connection) -> None:
        await connection.send(asking(prompt="Hi", max_tokens=4))
        connection.writer.write_eof()

    await strike.all([partial(strike.raw, send)] * strike.number(100, 20), 20)


ATTACKS = (
    Attack("unread-answers", "8 answers of many MB that nobody reads for 25 s", unread,
           outcomes(200, 400, "cut", "reset", "closed") | FULL, answer_seconds=270, limit_seconds=330, is_work=True),
    Attack("slow-streams", "40 streams, read one byte a second", slow_streams, outcomes(200), limit_seconds=90,
           is_work=True),
    Attack("resets", "1,000 requests whose connections are reset at once", resets, outcomes(200, "left"), is_work=True),
    Attack("half-closed", "100 clients that close their side after asking", half_closed,
           outcomes(200, "closed", "reset") | FULL, is_work=True),
)  # fmt: skip
