"""Reads pages in Markdown: their links and headings, and the snippets in their fences."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from tools.site_pages import FENCE, TARGET, anchor

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md")),
    ROOT / "deploy/ray/README.md",
    ROOT / "tests/features.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
MARKDOWN = MarkdownIt("commonmark").enable("table")
# Fences and comments are blocks, which are found in half the time without what is in their lines.
_BLOCKS = MarkdownIt("commonmark").enable("table")
_BLOCKS.core.ruler.enableOnly(["normalize", "block"])
_HERE = re.compile(r"\]\(()#([^)]*)\)")  # a link to a heading of the same page
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (.*) -->\s*$")


@dataclass(frozen=True)
class Snippet:
    """The content of a fence, and why it is not run, where a comment above it gives the reason."""

    page: str
    line: int  # line of the fence, counted from 1
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_front_matter(markdown: str) -> str:
    """Return the page with empty lines in place of its front matter, so that line numbers stay the same."""
    return _FRONT_MATTER.sub(lambda match: "\n" * match[0].count("\n"), markdown)


def links(markdown: str) -> list[tuple[str, str]]:
    """Return the targets of links and images, and the headings that they name, without addresses of other hosts."""
    prose = FENCE.sub("", markdown)
    inline = [(match[2], match[3] or "") for match in TARGET.finditer(prose)]
    return [*inline, *((match[1], match[2]) for match in _HERE.finditer(prose))]


def anchors(markdown: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", markdown), re.MULTILINE)
    return {anchor(title) for title in titles}


def snippets(markdown: str, page: str) -> list[Snippet]:
    """Return the snippets of a page in their order."""
    page_snippets = []
    before = ""  # the comment directly above
    for token in _BLOCKS.parse(without_front_matter(markdown)):
        if token.type == "fence":
            assert token.map is not None
            reason = _NOT_RUN.search(before)
            page_snippets.append(
                Snippet(page, token.map[0] + 1, token.info.strip(), token.content, reason[1] if reason else None)
            )
        before = token.content if token.type == "html_block" else ""
    return page_snippets
