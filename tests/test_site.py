"""The site has every page of the documentation, and nothing from the internet. Only `make docs` needs mkdocs."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pygments.lexers import BashSessionLexer
from pygments.token import Generic

from tools.site_pages import anchor, file_of, loaded_from_elsewhere, with_site_links

ROOT = Path(__file__).parent.parent
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
STYLE = (ROOT / "docs/site.css").read_text()
OUTSIDE: dict[str, str] = SETTINGS["extra"]["outside"]


def in_nav(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from in_nav(value)


PAGES = list(in_nav(SETTINGS["nav"]))


def test_every_page_is_in_the_navigation_once() -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} | set(OUTSIDE)
    assert sorted(file_of(page, OUTSIDE) for page in PAGES) == sorted(files)


@pytest.mark.parametrize("page", PAGES)
def test_links_stay_on_the_site_and_pages_need_no_program_of_others_to_be_drawn(page: str) -> None:
    text = (ROOT / file_of(page, OUTSIDE)).read_text()
    with_site_links(text, page, OUTSIDE)  # raises ValueError where one does not
    assert "```mermaid" not in text, "the site has no mermaid, which would come from the internet: make it an SVG"
    assert re.findall(r"!\[\]|<img (?![^>]*alt=)", text) == [], "a picture without a text for those who cannot see it"
    assert not loaded_from_elsewhere(text)


@pytest.mark.parametrize("page", PAGES)
def test_a_copy_button_copies_commands_only(page: str) -> None:
    """The site's style leaves out prompts and what they print, as Pygments finds them, and gives text no button."""
    assert re.search(r"\[data-md-copying\] :is\(\.gp, \.go\) \{ display: none; \}", STYLE)
    assert re.search(r"\.language-text \.md-code__nav \{ display: none; \}", STYLE)
    for language, block in re.findall(
        r"^```(\w*)\n(.*?)^```$", (ROOT / file_of(page, OUTSIDE)).read_text(), re.MULTILINE | re.DOTALL
    ):
        assert language, f"what language is this in {page}? text has no copy button:\n{block}"
        if language == "console":
            tokens = BashSessionLexer().get_tokens(block)
            copied = "".join(
                text for kind, text in tokens if kind not in Generic.Prompt and kind not in Generic.Output
            ).strip()
            typed = re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.MULTILINE)
            assert copied.split("\n") == "\n".join(typed).split("\n") != [""]
        elif language == "sh":
            assert not re.search(r"^[$>] ", block, re.MULTILINE), f"{page} has a prompt in commands; name it console"


def test_links_become_those_of_the_site() -> None:
    outside = {"README.md": "index.md", "deploy/README.md": "deploying.md"}
    text = "[a](docs/b.md#c) ![d](docs/images/e.svg) [f](deploy/README.md) [g](https://h) [i](#j)"
    text += '\n```md\n[k](docs/l.md)\n```\n<source srcset="docs/m.png">'
    assert with_site_links(text, "index.md", outside) == (
        "[a](b.md#c) ![d](images/e.svg) [f](deploying.md) [g](https://h) [i](#j)"
        '\n```md\n[k](docs/l.md)\n```\n<source srcset="m.png">'
    )
    assert with_site_links("[a](../../deploy/README.md)", "reference/api.md", outside) == "[a](../deploying.md)"
    assert with_site_links("[a](../docs/b.md)", "deploying.md", outside) == "[a](b.md)"
    with pytest.raises(ValueError, match=r"docs/b.md links to tools/load.py, which is not on the site"):
        with_site_links("[a](../tools/load.py)", "b.md", outside)


def test_what_a_page_loads_from_elsewhere_is_found() -> None:
    local = '<a href="https://a.b"></a><link rel="icon" href="c.png"><script src="d.js"></script>'
    assert loaded_from_elsewhere(local) == []
    remote = '<script src="https://a.b/c.js"></script><link href="//fonts.d/e"><img src="data:image/png;base64,f">'
    assert loaded_from_elsewhere(remote) == ["https://a.b/c.js", "//fonts.d/e"]


def test_anchors_are_those_of_github() -> None:
    titles = ["What is promised", "Vercel's ai, @ai-sdk/openai", "a - b"]
    assert [*map(anchor, titles)] == ["what-is-promised", "vercels-ai-ai-sdkopenai", "a---b"]


def test_the_environment_of_the_site_has_pinned_versions_of_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    pins = [line for line in (ROOT / "constraints-docs.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert set(extra) <= {pin.partition("==")[0] for pin in pins}
