"""`Bodies`: how large a body may be, how many bytes of bodies there may be at once, and where they are read.

A server and a gateway have one each, in `app.state.bodies`. It applies to all bodies, whether they come from HTTP,
sockets, files or the lines of batches.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from oaiserve.http.fair_turns import CpuTime, Work, at_once
from oaiserve.http.shared_limit import SharedLimit
from oaiserve.routes.intake.turns import MOST_LOOP_BYTES, guarded

Result = TypeVar("Result")


class RunInTurns(Protocol):
    def __call__(self, work: Work[Any], *, client: str, num_bytes: int) -> Future[Any]: ...


@dataclass(frozen=True, slots=True)
class Bodies:
    limit_bytes: int  # limit of one body, whole and decoded
    received: SharedLimit  # bytes that are being received, or wait on a socket, by client
    run_in_turns: RunInTurns  # runs work on large bodies in threads, where clients take turns

    async def read(self, work: Work[Result], *, client: str, num_bytes: int, cpu: CpuTime) -> Result:
        """Do work on a body of `num_bytes`, at once if it is small, and add its time to `cpu`. For requests over HTTP,
        `in_turns_if_large` does the same, and ends when the client leaves.

        Raises InvalidRequest for a body with too deep a nesting, Overloaded and Unavailable if no more work is taken,
        and the errors of the work.
        """
        work = cpu.of(guarded(work))
        if num_bytes <= MOST_LOOP_BYTES:
            return at_once(work)
        result: Result = await asyncio.wrap_future(self.run_in_turns(work, client=client, num_bytes=num_bytes))
        return result
