"""For all tests."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import HealthCheck, settings

# The first draw of a fresh checkout builds tables, and machines are shared: slowness is no failure.
settings.register_profile("oaiserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("oaiserve")

PROMETHEUS = ("prometheus", "promtool")  # programs
_num_left_out = pytest.StashKey[int]()


@pytest.hookimpl(trylast=True)  # once it is known which tests are asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests that need a Prometheus where there is none."""
    missing = [program for program in PROMETHEUS if shutil.which(program) is None]
    left_out = [item for item in items if missing and item.get_closest_marker("prometheus")]
    for item in left_out:
        item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}"))
    config.stash[_num_left_out] = len(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if number := config.stash.get(_num_left_out, 0):
        terminalreporter.write_line(
            f"Left out: tests that ask a real Prometheus ({number}). They need {' and '.join(PROMETHEUS)}, "
            "as from: apt-get install prometheus"
        )
