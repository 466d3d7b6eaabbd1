"""Tests the limit on messages that repeat: the first of a kind are written, the others counted."""

import io
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest

from oaiserve.telemetry.log_limit import LogLimit

MINUTE_NS = 60 * 10**9


class Log:
    """A logger with a limited handler, and its clock."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.stream = io.StringIO()
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        self.limit = LogLimit(handler, lambda: self.now_ns)
        self.logger = logging.Logger("test")
        self.logger.addHandler(handler)

    def lines(self) -> list[str]:
        """Return the lines since the last call."""
        lines = self.stream.getvalue().splitlines()
        self.stream.seek(0)
        self.stream.truncate()
        return lines


@pytest.fixture
def log() -> Log:
    return Log()


def test_the_first_of_a_kind_are_written_and_the_others_are_told_after_a_minute(log: Log) -> None:
    for number in range(1000):
        log.logger.warning("client %d is odd", number)
    assert log.lines() == [f"WARNING test client {number} is odd" for number in range(5)]
    log.now_ns = MINUTE_NS - 1
    log.limit.tell()
    assert log.lines() == []
    log.now_ns = MINUTE_NS
    log.limit.tell()
    log.limit.tell()
    assert log.lines() == ["WARNING test 995 more messages like this one were left out: client 0 is odd"]
    assert log.limit.counts() == {("warning", "written"): 6, ("warning", "left_out"): 995}


def test_after_a_minute_a_kind_is_written_again_also_if_nobody_calls_tell(log: Log) -> None:
    for _ in range(6):
        log.logger.error("again")
    log.now_ns = MINUTE_NS
    log.logger.error("again")
    assert log.lines()[5:] == ["ERROR test 1 more message like this one was left out: again", "ERROR test again"]


def test_a_flood_of_one_kind_hides_no_other(log: Log) -> None:
    for _ in range(100):
        log.logger.warning("flood")
    log.logger.error("flood")
    log.logger.warning("something else")
    assert log.lines()[5:] == ["ERROR test flood", "WARNING test something else"]


def test_exceptions_of_different_places_are_of_different_kinds(log: Log) -> None:
    for parse in (json.loads, Fraction):
        for _ in range(10):
            try:
                parse("x")
            except ValueError:
                log.logger.exception("failed")
    lines = log.lines()
    assert [sum(line.startswith(error) for line in lines) for error in ("json.decoder.", "ValueError: ")] == [5, 5]


def test_texts_that_are_made_up_fill_neither_the_memory_nor_the_log(log: Log) -> None:
    for number in range(5000):
        log.logger.warning(f"made up {number}")
    assert len(log.lines()) == LogLimit.MOST_KINDS + LogLimit.MOST
    log.limit.tell(at_once=True)
    assert log.lines() == [
        f"WARNING test {5000 - 505} more messages like this one were left out: made up {LogLimit.MOST_KINDS}"
    ]


def test_threads_lose_no_message(log: Log) -> None:
    def write() -> None:
        for _ in range(500):
            log.logger.warning("at once")

    with ThreadPoolExecutor() as threads:
        for _ in range(4):
            threads.submit(write)
    assert log.limit.counts() == {("warning", "written"): 5, ("warning", "left_out"): 1995}
