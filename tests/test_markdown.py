"""Every page is well-formed Markdown, for GitHub and for the site: tables, lists, paragraphs, headings, margins."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it.token import Token

from tests.pages import MARKDOWN, PAGES, name_of, without_front_matter

MARGIN = 120
# Left alone by the margin: tables, and a line that is one link or picture, which nobody can wrap.
_UNBREAKABLE = re.compile(r"\s*(?:[-*] |\d+\. )?!?\[.*\]\([^)]*\)\S*$")
_CELL_BORDER = re.compile(r"(?<!\\)\|")


def faults(markdown: str, *, margin: int = MARGIN) -> Iterator[str]:
    """Yield the errors in the form of a page, each with its line."""
    lines = without_front_matter(markdown).split("\n")
    tokens = MARKDOWN.parse("\n".join(lines))
    tables = _lines_of("table_open", tokens)
    verbatim = _lines_of("fence", tokens) | _lines_of("html_block", tokens)
    for number, line in enumerate(lines):
        if number in verbatim:
            continue
        if line.lstrip().startswith("|") and number not in tables:
            yield f"{number + 1}: a row outside of a table, as after an empty line in one"
        if len(line) > margin and number not in tables and not _UNBREAKABLE.match(line):
            yield f"{number + 1}: {len(line)} characters, beyond the margin of {margin}"
        if line != line.rstrip():
            yield f"{number + 1}: white space at its end"
    yield from _faults_of_headings([token for token in tokens if token.level == 0], tokens)
    indents = [0]  # indents of the content of the lists around a token
    for token in tokens:
        first, last = token.map or (0, 0)
        match token.type:
            case "table_open":
                cells = [len(_CELL_BORDER.split(lines[number].strip().strip("|"))) for number in range(first, last)]
                if len(set(cells)) > 1:
                    yield f"{first + 1}: a table whose rows have {sorted(set(cells))} cells"
            case "code_block":
                yield f"{first + 1}: an indented paragraph, which becomes code"
            case "fence" if last == first + 1 or not re.fullmatch(r"\s*[`~]{3,}", lines[last - 1]):
                yield f"{first + 1}: a fence without an end"
            case "list_item_open":
                indents.append(indents[-1] + len(token.info or "") + len(token.markup) + 1)
            case "list_item_close":
                indents.pop()
            case "paragraph_open":
                for number in range(first + 1, last):
                    indent = len(lines[number]) - len(lines[number].lstrip())
                    if indent != indents[-1]:
                        yield f"{number + 1}: indented by {indent} in a paragraph that is indented by {indents[-1]}"
        opens = token.type in ("table_open", "bullet_list_open", "ordered_list_open") and token.level == 0
        if opens and first > 0 and lines[first - 1].strip():
            yield f"{first + 1}: no empty line above it, so the site takes it for a part of the paragraph"


def _lines_of(kind: str, tokens: list[Token]) -> set[int]:
    return {number for token in tokens if token.type == kind and token.map for number in range(*token.map)}


def _faults_of_headings(top: list[Token], tokens: list[Token]) -> Iterator[str]:
    level = 0
    titles: set[str] = set()
    for opening, text in pairwise(tokens):
        if opening.type != "heading_open" or opening.map is None:
            continue
        line = opening.map[0] + 1
        depth = int(opening.tag[1])
        if (level == 0) != (depth == 1):
            yield f"{line}: a page has one heading of the first level, and it comes first"
        elif depth > level + 1:
            yield f"{line}: a heading of level {depth} under one of level {level}"
        if text.content in titles:
            yield f"{line}: a second heading '{text.content}', so links cannot tell them apart"
        titles.add(text.content)
        level = depth
    if top and top[0].type != "heading_open":
        yield "1: a page begins with its heading"


# In the list of changes, headings come again with each release.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_page_is_well_formed(page: Path) -> None:
    assert list(faults(page.read_text())) == []


TABLE = "| a | b |\n|---|---|\n| 1 | 2 |\n"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"{TABLE}\n| 3 | 4 |\n", "7: a row outside of a table"),
        (f"{TABLE}| 3 |\n", "3: a table whose rows have [1, 2] cells"),
        (f"Text\n{TABLE}", "4: no empty line above it"),
        ("Text:\n- one\n", "4: no empty line above it"),
        ("Text\n      that goes on\n", "4: indented by 6 in a paragraph that is indented by 0"),
        ("- one\n  two\n   three\n", "5: indented by 3 in a paragraph that is indented by 2"),
        ("Text\n\n    that goes on\n", "5: an indented paragraph, which becomes code"),
        ("```sh\necho\n", "3: a fence without an end"),
        ("word " * 30, "3: 150 characters, beyond the margin"),
        ("Text \nthat goes on\n", "3: white space at its end"),
        ("### Deep\n", "3: a heading of level 3 under one of level 1"),
        ("## Twice\n\n## Twice\n", "5: a second heading 'Twice'"),
        ("# Second\n", "3: a page has one heading of the first level"),
    ],
)
def test_fault_of_form_is_found(text: str, fault: str) -> None:
    assert any(each.startswith(fault) for each in faults(f"# Title\n\n{text}"))


def test_sound_page_has_no_fault() -> None:
    page = (
        "---\nsearch: boost: 0.2\n---\n\n# Title\n\n- one\n  two\n\n  three\n  - four\n    five\n\n1. six\n   seven\n\n"
        f"{TABLE}\n```sh\n# no heading  \n| no | row\n```\n\n- eight:\n\n  ```sh\n  echo\n  ```\n"
        f"\n![a picture]({'x' * 200}.svg)\n\n<!-- a comment -->\n\n| a `\\|` b |\n|---|\n| c |\n"
    )
    assert list(faults(page)) == []
