"""The dashboards of Grafana and the pages show a phase in the same colour."""

import re
from pathlib import Path

from deploy.grafana.panels import PHASE_COLORS
from oaiserve.facts.times import PHASES
from oaiserve.plugins import pages


def test_phases_have_the_colours_of_the_pages() -> None:
    style = (Path(pages.__file__).parent / "static/base.css").read_text()
    of_pages = dict(re.findall(r"--(\w+): light-dark\(#\w+, (#\w+)\);", style))
    assert PHASE_COLORS.keys() == set(PHASES)
    assert {phase: of_pages[phase] for phase in PHASE_COLORS} == PHASE_COLORS
