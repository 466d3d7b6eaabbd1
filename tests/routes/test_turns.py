"""Waiting for work on a request's body until the client leaves."""

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from oaiserve.routes.intake.turns import unless_left


async def after_turns(number: int) -> str:
    for _ in range(number):
        await asyncio.sleep(0)
    return "done"


async def leaves_after(turns: int) -> None:
    await after_turns(turns)


def test_leaving_cancels_the_work_and_waits_for_its_end() -> None:
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ends.append("ended")

    async def main() -> None:
        with pytest.raises(ClientDisconnect):
            await unless_left(work(), asyncio.create_task(leaves_after(2)))
        assert ends == ["ended"]

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(8))
def test_a_client_may_leave_in_the_turn_in_which_the_work_ends(turns: int) -> None:
    """The request has its result or the client has left, and nothing is called for a wait that is over."""
    faults: list[dict[str, Any]] = []
    found: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        left = asyncio.create_task(leaves_after(turns))
        try:
            found.append(await unless_left(after_turns(4), left))
        except ClientDisconnect:
            found.append("left")
        await left
        await after_turns(4)

    asyncio.run(main())
    assert faults == []
    assert found == ["done"] or (found == ["left"] and turns < 4)


@pytest.mark.parametrize("error", [TimeoutError, asyncio.CancelledError, ValueError])
def test_errors_of_the_work_are_raised(error: type[BaseException]) -> None:
    async def work() -> None:
        raise error

    async def main() -> None:
        left = asyncio.create_task(leaves_after(100))
        with pytest.raises(error):
            await unless_left(work(), left)
        left.cancel()

    asyncio.run(main())
