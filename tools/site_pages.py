"""A hook of mkdocs, which builds the site: adds the pages that lie outside docs/, and refuses what the internet brings.

Links on a page are those that GitHub follows, relative to the file. Headings get the anchors that GitHub gives them.
This file needs mkdocs only where mkdocs calls it, so that the tests can use its rules without it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# What a link, an image or a <source> names, unless it is an address of its own: before it, the file, the heading.
TARGET = re.compile(r"(\]\(|\b(?:src|srcset|href)=\")(?![a-z]+:|#)([^)#\"\s]+)(?:#([^)\"\s]*))?")
CHANGELOG_BOOST = 0.2  # Search shows the list of changes after the pages that say how things are now.
FENCE = re.compile(r"^(```+).*?^\1$", re.MULTILINE | re.DOTALL)


def anchor(title: str, separator: str = "-") -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", title.strip().lower()).replace(" ", separator)


def page_of(path: str, outside: Mapping[str, str]) -> str | None:
    """Return the name on the site of a file of the repository; None if the site does not have it."""
    return path.removeprefix("docs/") if path.startswith("docs/") else outside.get(path)


def file_of(page: str, outside: Mapping[str, str]) -> str:
    """Return the file of the repository from which a page of the site is made."""
    return next((path for path, name in outside.items() if name == page), f"docs/{page}")


def linked_file(path: str, target: str) -> str:
    """Return the file that a link in the file `path` names, both as paths in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def with_site_links(markdown: str, page: str, outside: Mapping[str, str]) -> str:
    """Return the page with its links as the site needs them. Raises ValueError for a file that is not on the site."""
    path = file_of(page, outside)

    def on_site(match: re.Match[str]) -> str:
        linked = linked_file(path, match[2])
        target = page_of(linked, outside)
        if target is None:
            raise ValueError(f"{path} links to {linked}, which is not on the site. Name it as `code` instead.")
        heading = f"#{match[3]}" if match[3] else ""
        return match[1] + posixpath.relpath(target, posixpath.dirname(page) or ".") + heading

    done = 0
    parts = []
    for fence in FENCE.finditer(markdown):
        parts += [TARGET.sub(on_site, markdown[done : fence.start()]), fence[0]]
        done = fence.end()
    return "".join([*parts, TARGET.sub(on_site, markdown[done:])])


class Loaded(HTMLParser):
    """Collects what a browser loads from other hosts to show a page; links that a reader may follow are none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            loads = name in ("src", "srcset", "data", "poster") or (tag == "link" and name == "href")
            if loads and value and re.match(r"(?:[a-z]+:)?//", value):
                self.addresses.append(value)


def loaded_from_elsewhere(html: str) -> list[str]:
    parser = Loaded()
    parser.feed(html)
    return parser.addresses


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"]["slugify"] = anchor
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, page in config.extra["outside"].items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    from mkdocs.exceptions import PluginError

    if page.file.src_uri == "changelog.md":
        page.meta["search"] = {"boost": CHANGELOG_BOOST}
    try:
        return with_site_links(markdown, page.file.src_uri, config.extra["outside"])
    except ValueError as error:
        raise PluginError(str(error)) from error


def on_post_page(output: str, page: Any, config: Any) -> str:
    from mkdocs.exceptions import PluginError

    if addresses := loaded_from_elsewhere(output):
        raise PluginError(f"{page.file.src_uri} would load {', '.join(addresses)} from the internet.")
    return output
