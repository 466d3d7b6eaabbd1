"""A process that stood still says so in its log, and one that was only slow does not."""

import asyncio
import logging

import pytest

from oaiserve.standstill import watch_for_standstills

log = logging.getLogger(__name__)
SECOND_NS = 1_000_000_000


@pytest.mark.parametrize(
    ("late_seconds", "used_seconds", "said"),
    [(80, 0, "80.0 s"), (80, 1, "80.0 s"), (80, 40, ""), (1, 0, ""), (3, 0, "3.0 s")],
)
def test_a_late_look_without_work_was_a_standstill(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    late_seconds: int,
    used_seconds: int,
    said: str,
) -> None:
    times_ns = iter([0, (1 + late_seconds) * SECOND_NS, 100 * SECOND_NS])
    cores_ns = iter([0, used_seconds * SECOND_NS, 100 * SECOND_NS])
    num_sleeps = 0

    async def sleep(seconds: float) -> None:
        nonlocal num_sleeps
        num_sleeps += 1
        if num_sleeps == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    watching = watch_for_standstills(log, "gateway", lambda: next(times_ns), lambda: next(cores_ns, 0))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watching)
    if said:
        assert [record.message for record in caplog.records if f"The gateway stood still for {said}" in record.message]
    else:
        assert not caplog.records
