"""For all tests."""

from __future__ import annotations

import os
import shutil
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

# Triton's kernels run in its interpreter, on the CPU. It has to know before anybody imports it, and torch does.
os.environ["TRITON_INTERPRET"] = "1"

# The first draw of a fresh checkout builds tables, and machines are shared: slowness is no failure.
settings.register_profile("oaiserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("oaiserve")


class Group(NamedTuple):
    """Tests with a marker that need programs."""

    marker: str
    what: str
    programs: tuple[str, ...]
    package: str  # of Debian

    @property
    def missing(self) -> list[str]:
        return [program for program in self.programs if shutil.which(program) is None]


GROUPS = (
    Group("prometheus", "ask a real Prometheus", ("prometheus", "promtool"), "prometheus"),
    Group("browser", "open the live page in a browser", ("chromium",), "chromium"),
    Group("compiler", "run the native step", ("g++",), "g++"),
)
_num_left_out = pytest.StashKey[dict[Group, int]]()


@pytest.hookimpl(trylast=True)  # once it is known which tests are asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests whose programs are not there."""
    config.stash[_num_left_out] = {}
    for group in GROUPS:
        left_out = [item for item in items if group.missing and item.get_closest_marker(group.marker)]
        for item in left_out:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(group.missing)}"))
        config.stash[_num_left_out][group] = len(left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for group, number in config.stash.get(_num_left_out, {}).items():
        if number:
            terminalreporter.write_line(
                f"Left out: tests that {group.what} ({number}). They need {' and '.join(group.programs)}, "
                f"as from: apt-get install {group.package}"
            )
