import re
import time

from oaiserve.engine.start.start_times import StartTimes


def test_parts_are_in_the_order_in_which_they_began_and_count_from_the_start_of_the_process() -> None:
    times = StartTimes(began_ns=time.monotonic_ns() - 5_000_000_000)
    times.since_begin("settings")
    with times.part("outer"):
        assert times.run("inner", divmod, 7, 2) == (3, 1)
    parts = re.findall(r"(\w+) (\d+) to (\d+)", str(times))
    assert [name for name, _, _ in parts] == ["settings", "outer", "inner"]
    assert int(parts[0][1]) == 0
    assert all(5000 <= int(end) < 60_000 for _, _, end in parts)


def test_the_part_that_began_last_is_the_current_one() -> None:
    times = StartTimes()
    assert times.current == ""
    with times.part("outer"):
        assert times.run("inner", lambda: times.current) == "inner"
        assert times.current == "outer"
    assert times.current == ""


def test_the_process_began_before_now_and_not_before_the_machine() -> None:
    times = StartTimes()
    times.since_begin("all")
    (duration,) = re.findall(r"^all 0 to (\d+)$", str(times))
    assert 0 <= int(duration) <= time.clock_gettime(time.CLOCK_BOOTTIME) * 1000
