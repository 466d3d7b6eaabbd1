"""When a process has hung for too long: what it does is a double, and each look is one second."""

import pytest

from oaiserve.commands.server_process import Activity
from oaiserve.plugins.gateway.children.hang_clock import IDLE_MULTIPLE, HangClock

HANG_SECONDS = 3


class Process:
    def __init__(self, hang_seconds: float = HANG_SECONDS) -> None:
        self.doing = Activity()
        self.clock = HangClock(lambda: self.doing, hang_seconds)

    def works(self, seconds: float) -> None:
        """Use CPU time in the main thread."""
        before = self.doing
        self.doing = before._replace(
            main_seconds=before.main_seconds + seconds, cpu_seconds=before.cpu_seconds + seconds
        )

    def serves(self, num_looks: int, *, is_hung: bool = True, works: float = 0.0) -> list[bool]:
        ends = []
        for _ in range(num_looks):
            self.works(works)
            ends.append(self.clock.look_at_server(is_hung=is_hung))
        return ends

    def starts(self, num_looks: int, *, works: float = 0.0) -> list[bool]:
        ends = []
        for _ in range(num_looks):
            self.works(works)
            ends.append(self.clock.look_at_start())
        return ends


def test_server_that_hangs_is_over_once_after_its_time() -> None:
    assert Process().serves(5) == [False, False, True, False, False]


def test_report_starts_the_time_again() -> None:
    process = Process()
    ends = [*process.serves(2), *process.serves(1, is_hung=False), *process.serves(3)]
    assert ends == [False] * 5 + [True]


def test_process_that_may_hang_for_ever_is_never_over() -> None:
    process = Process(0)
    assert not any(process.serves(10_000))
    assert not any(process.starts(10_000))


def test_late_answers_of_a_process_that_waits_for_a_cpu_do_not_count() -> None:
    process = Process()
    process.doing = Activity(is_runnable=True)
    assert not any(process.serves(1000, works=0.1))
    process.doing = process.doing._replace(is_runnable=False)  # It got its CPU, and still gives no reports.
    assert process.serves(2) == [False, True]


def test_endless_loop_that_has_a_cpu_counts() -> None:
    process = Process()
    process.doing = Activity(is_runnable=True)
    assert process.serves(3, works=0.9) == [False, False, True]


def test_process_in_a_debugger_is_not_over_until_the_debugger_has_left() -> None:
    process = Process()
    process.doing = Activity(is_traced=True)
    assert not any(process.serves(1000))
    assert not any(process.starts(1000))
    process.doing = Activity()
    assert process.serves(3) == [False, False, True]


def test_start_may_take_as_long_as_it_works() -> None:
    assert not any(Process().starts(3600, works=0.01))


def test_stopped_start_is_over_like_a_server() -> None:
    process = Process()
    process.starts(2, works=1.0)
    process.doing = process.doing._replace(is_stopped=True)
    assert process.starts(3) == [False, False, True]


def test_start_that_does_nothing_may_wait_longer() -> None:
    process = Process()
    process.starts(1, works=1.0)
    limit = IDLE_MULTIPLE * HANG_SECONDS
    assert process.starts(limit) == [False] * (limit - 1) + [True]


def test_start_on_a_machine_without_a_free_cpu_is_not_idle() -> None:
    process = Process()
    process.doing = Activity(is_runnable=True)
    assert not any(process.starts(1000))


def test_waits_of_a_start_do_not_count_for_the_server() -> None:
    process = Process()
    process.starts(HANG_SECONDS)
    process.clock.began_to_serve()
    assert process.serves(3) == [False, False, True]


@pytest.mark.parametrize(("num_looks", "left"), [(0, 3), (2, 1), (9, 0)])
def test_time_that_is_left_is_known(num_looks: int, left: float) -> None:
    process = Process()
    process.serves(num_looks)
    assert process.clock.seconds_left == left
