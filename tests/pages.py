"""Reads the links and headings of pages in markdown, as tests of the documentation need them."""

import re

from tools.site_pages import FENCE, TARGET, anchor

_HERE = re.compile(r"\]\(()#([^)]*)\)")  # a link to a heading of the same page


def links(markdown: str) -> list[tuple[str, str]]:
    """Return the targets of links and images, and the headings that they name, without addresses of other hosts."""
    prose = FENCE.sub("", markdown)
    found = [(match[2], match[3] or "") for match in TARGET.finditer(prose)]
    return [*found, *((match[1], match[2]) for match in _HERE.finditer(prose))]


def anchors(markdown: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", markdown), re.MULTILINE)
    return {anchor(title) for title in titles}
