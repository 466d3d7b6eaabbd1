"""Signals that a process gets from its surroundings, while it streams."""

from __future__ import annotations

import asyncio
import os
import signal

from tools.attack.attack import COMPLETIONS, Strike, attack, outcomes, post

NUM_STREAMS = 4


@attack("SIGHUP while 4 clients stream", outcomes(200), is_work=True, ends_server=True)
async def sighup(strike: Strike) -> None:
    """SIGHUP, as from a terminal that closes, may end the server, but in order: its streams finish."""
    body = {"prompt": "The sea", "max_tokens": 60, "ignore_eos": True, "stream": True}
    async with asyncio.TaskGroup() as group:
        group.create_task(strike.ask_all([post(COMPLETIONS, body)] * NUM_STREAMS, NUM_STREAMS))
        await asyncio.sleep(1.0)
        os.kill(strike.pid, signal.SIGHUP)
    finished = sum(answer.body.rstrip().endswith(b"data: [DONE]") for answer in strike.answers)
    strike.check(finished == NUM_STREAMS, f"{finished} of {NUM_STREAMS} streams finished")
