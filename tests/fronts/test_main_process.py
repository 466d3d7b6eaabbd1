"""The settings with which several front processes serve."""

import pytest

from oaiserve.config import Config, ServerOptions
from oaiserve.fronts.main_process import check


@pytest.mark.parametrize(("number", "is_warned"), [(1, False), (5, True)])
def test_more_front_processes_than_cpus_are_a_warning_at_the_start(
    number: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check(Config("demo", ServerOptions(front_processes=number)), (), is_child=False)  # Tests have one CPU.
    assert ["may use are 1. " in message for message in caplog.messages] == [True] * is_warned
