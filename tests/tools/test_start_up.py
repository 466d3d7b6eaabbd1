from __future__ import annotations

import pytest

from oaiserve.facts.start_times import StartTimes
from tools.bench.start_up import parts_of, table


def test_the_parts_of_a_start_are_read_from_the_line_that_the_server_logs() -> None:
    times = StartTimes()
    times.since_begin("command line")
    with times.part("import of torch"):
        pass
    log = f"... Loading demo ...\n... DEBUG oaiserve.cli  Start, in ms since the process began: {times}\n..."
    parts = parts_of(log)
    assert list(parts) == ["command line", "import of torch"]
    assert parts["command line"][0] == 0
    assert parts["import of torch"][0] <= parts["import of torch"][1]
    with pytest.raises(ValueError, match="no stamps"):
        parts_of("Loading demo ...")


def test_the_table_has_medians_and_the_range_of_durations() -> None:
    starts = [{"all": (begin, end)} for begin, end in ((0.0, 10.0), (2.0, 32.0), (1.0, 21.0))]
    assert table(starts).splitlines()[-1] == "| all | 1 | 20 (10 to 30) |"
