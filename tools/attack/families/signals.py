"""Signals that a process gets from its surroundings, while it streams."""

from __future__ import annotations

import asyncio
import os
import signal

from tools.attack.attack import COMPLETIONS, Attack, Strike, outcomes

NUM_STREAMS = 4


async def hang_up(strike: Strike) -> None:
    """SIGHUP, as from a terminal that closes, may end the server, but in order: its streams finish."""
    body = {"prompt": "The sea", "max_tokens": 60, "ignore_eos": True, "stream": True}
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_STREAMS):
            group.create_task(strike.post(COMPLETIONS, body))
        await asyncio.sleep(1.0)
        os.kill(strike.pid, signal.SIGHUP)
    finished = sum(answer.body.rstrip().endswith(b"data: [DONE]") for answer in strike.answers)
    strike.check(finished == NUM_STREAMS, f"{finished} of {NUM_STREAMS} streams finished")


ATTACKS = (Attack("sighup", "SIGHUP while 4 clients stream", hang_up, outcomes(200), is_work=True, ends_server=True),)
