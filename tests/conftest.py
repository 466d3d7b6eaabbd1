"""Settings and hooks for all tests."""

from __future__ import annotations

import os
import shutil
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

# Triton's kernels run in its interpreter, on the CPU. The variable must be set before torch imports Triton.
os.environ["TRITON_INTERPRET"] = "1"

# There is a process of tests for each core, and small models are no faster with more threads. Those of torch in several
# processes would wait for each other, and burn the cores meanwhile. Servers that tests start inherit the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In a fresh checkout the first example builds tables, and machines are shared, so slow examples are not failures.
# They are the same in each run, so a change is to blame for what fails: `--hypothesis-profile explore` tries others.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("oaiserve", settings.get_profile("explore"), derandomize=True)
settings.load_profile("oaiserve")


class Group(NamedTuple):
    """The tests with a marker, which need programs that may not be installed."""

    marker: str
    what: str
    programs: tuple[str, ...]
    package: str  # the Debian package of the programs

    @property
    def missing(self) -> list[str]:
        return [program for program in self.programs if shutil.which(program) is None]

    @property
    def skip_reason(self) -> str:
        return f"not installed: {', '.join(self.missing)}"


GROUPS = (
    Group("prometheus", "ask a real Prometheus", ("prometheus", "promtool"), "prometheus"),
    Group("browser", "open the live page in a browser", ("chromium",), "chromium"),
    Group("compiler", "run the native step", ("g++",), "g++"),
    Group("haproxy", "let HAProxy read its configuration", ("haproxy",), "haproxy"),
)


@pytest.hookimpl(trylast=True)  # after other plugins have deselected tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests whose programs are not installed."""
    for group in GROUPS:
        if group.missing:
            for item in items:
                if item.get_closest_marker(group.marker):
                    item.add_marker(pytest.mark.skip(reason=group.skip_reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many tests were left out. They are counted in the reports, which come from all worker processes."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    for group in GROUPS:
        number = sum(group.skip_reason in reason for reason in reasons) if group.missing else 0
        if number:
            terminalreporter.write_line(
                f"Left out: tests that {group.what} ({number}). They need {' and '.join(group.programs)}, "
                f"as from: apt-get install {group.package}"
            )
