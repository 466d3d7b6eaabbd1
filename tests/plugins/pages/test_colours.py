"""The dashboards of Grafana, the pages and the reports of load tests show a phase in the same colour."""

import re
from pathlib import Path

from deploy.grafana.panels import PHASE_COLORS
from loadtest import html
from oaiserve.facts.times import PHASES
from oaiserve.plugins import pages


def test_reports_of_load_tests_have_the_colours_of_the_pages() -> None:
    of_pages, of_reports = (
        dict(re.findall(r"--(\w+): (light-dark\(.*?\));", file.read_text()))
        for file in (Path(pages.__file__).parent / "static/base.css", html.STYLE)
    )
    assert of_reports.keys() >= set(PHASES)
    assert of_reports.items() <= of_pages.items()


def test_phases_have_the_colours_of_the_pages() -> None:
    style = (Path(pages.__file__).parent / "static/base.css").read_text()
    of_pages = dict(re.findall(r"--(\w+): light-dark\(#\w+, (#\w+)\);", style))
    assert PHASE_COLORS.keys() == set(PHASES)
    assert {phase: of_pages[phase] for phase in PHASE_COLORS} == PHASE_COLORS
