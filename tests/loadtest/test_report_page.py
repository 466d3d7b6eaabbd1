"""The page of a report in a real browser: it can be read, also on a phone and in the dark."""

from pathlib import Path
from typing import Literal

import pytest

from loadtest.html import render_html
from tests.e2e.browser import DESK, PHONE, OpenPage, check_texts_and_controls
from tests.loadtest.test_report import make


@pytest.mark.browser
@pytest.mark.parametrize("labels", [("1 users",), ("1 users", "2 users")])
@pytest.mark.parametrize("color_scheme", ["light", "dark"])
def test_the_page_has_enough_contrast_and_fits_a_phone(
    open_page: OpenPage,
    tmp_path: Path,
    labels: tuple[str, ...],
    color_scheme: Literal["light", "dark"],
) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_html(make(labels=labels, slos={"ttft": 1.0})))
    for viewport in (PHONE, DESK):
        page = open_page(path.as_uri(), viewport, color_scheme=color_scheme)
        check_texts_and_controls(page, 20)
        page.locator("details").evaluate_all("nodes => nodes.forEach((node) => { node.open = true; })")
        check_texts_and_controls(page, 100)
