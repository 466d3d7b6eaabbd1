"""A process that stood still says so in its log, and one that was only slow does not."""

import asyncio
import logging

import pytest

from oaiserve.standstill import watch_for_standstills
from tests.world.loop import World

log = logging.getLogger(__name__)
SECOND_NS = 1_000_000_000


@pytest.mark.parametrize(
    ("late_seconds", "used_seconds", "said"),
    [(80, 0, "80.0 s"), (80, 1, "80.0 s"), (80, 40, ""), (1, 0, ""), (3, 0, "3.0 s")],
)
async def test_a_late_look_without_work_was_a_standstill(
    world: World, caplog: pytest.LogCaptureFixture, late_seconds: int, used_seconds: int, said: str
) -> None:
    late_ns = used_ns = 0
    watching = asyncio.create_task(
        watch_for_standstills(log, "gateway", lambda: world.clock_ns() + late_ns, lambda: used_ns)
    )
    await asyncio.sleep(0.5)
    late_ns = late_seconds * SECOND_NS
    used_ns = used_seconds * SECOND_NS
    await asyncio.sleep(1)
    watching.cancel()
    if said:
        assert [record.message for record in caplog.records if f"The gateway stood still for {said}" in record.message]
    else:
        assert not caplog.records
