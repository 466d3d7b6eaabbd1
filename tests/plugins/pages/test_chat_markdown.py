"""The Markdown of models on the chat page: nobody trusts it, and its code can be copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.browser import OpenPage
from tests.plugins.pages.chat_page import ready

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


@pytest.fixture
def page(scripted_page: Page) -> Page:
    return scripted_page


HOSTILE = """
<script>alert(1)</script> <img src=x onerror=alert(1)> <b>bold</b> <style>*{}</style> <a href="http://evil">x</a>
![track](https://evil.example/pixel.png "t") ![](data:image/svg+xml;base64,AA) ![x](javascript:alert(1))
[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d](vbscript:x) [e](file:///etc/passwd)
[f](/v1/models) [g](//evil.example/) [h](https://good.example/?"onmouseover=alert(1)) <javascript:alert(1)>
[i]: javascript:alert(1) "x"
https://plain.example/a file.py mailto:a@b.example a@b.example

| right | left |
| ---: | :--- |
| 1 | <img src=y> |

```html"onmouseover=alert(1)
<script>alert(2)</script>
```
"""


def test_text_of_models_becomes_no_html_of_theirs(page: Page) -> None:
    """`open_page` fails where anything is asked of another server, and where a style or a script is refused."""
    seen = page.evaluate(
        """async (text) => {
      const { showMarkdown } = await import("/dashboard/static/markdown.js");
      const box = document.getElementById("turns");
      showMarkdown(box, text);
      const all = [...box.querySelectorAll("*")];
      return {
        tags: [...new Set(all.map((node) => node.localName))].sort(),
        attributes: [...new Set(all.flatMap((node) => node.getAttributeNames()))].sort(),
        links: all.filter((node) => node.localName === "a").map((a) => [a.getAttribute("href"), a.rel, a.textContent]),
        code: box.querySelector("pre").textContent,
      };
    }""",
        HOSTILE,
    )
    tags = "a p table thead tbody tr th td div pre code button svg path br span"
    assert set(seen["tags"]) <= {*tags.split()}
    ours = {
        "class",
        "dir",
        "href",
        "rel",
        "target",
        "title",
        "type",
        "tabindex",
        "aria-label",
        "aria-hidden",
        "viewBox",
        "d",
    }
    assert set(seen["attributes"]) <= ours
    assert [(href, text) for href, _, text in seen["links"]] == [
        ("http://evil", "http://evil"),  # its text, within the HTML that stays text
        ("https://evil.example/pixel.png", "image: track"),
        ("https://good.example/?%22onmouseover=alert(1)", "h"),
        ("https://plain.example/a", "https://plain.example/a"),
    ]
    assert {rel for _, rel, _ in seen["links"]} == {"noopener noreferrer"}
    assert seen["code"] == "<script>alert(2)</script>\n"


FORMULAS = r"""
One \(a_1 * b_2\), two $x_1\,y_1$, three.
It costs $5 and then $10.<br>Next line
last line

\[
a = b
+ c_1
\]

1. $$a_1
   * b$$

> שלום.
"""


def test_formulas_stay_as_they_are_and_lines_end_where_the_model_ended_them(page: Page) -> None:
    html = page.evaluate(
        """async (text) => {
      const { showMarkdown } = await import("/dashboard/static/markdown.js");
      const box = document.getElementById("turns");
      showMarkdown(box, text);
      for (const button of box.querySelectorAll("button")) button.remove();
      const shown = (block) => [block.innerHTML.replaceAll("\\n", "|"), getComputedStyle(block).direction];
      return [...box.children].map(shown);
    }""",
        FORMULAS,
    )
    code = '<div class="code-box"><pre tabindex="0"><code>{}</code></pre></div>|'
    assert html == [
        [
            r"<p>One <code>\(a_1 * b_2\)</code>, two <code>$x_1\,y_1$</code>, three.<br>|It costs $5 and then $10."
            "<br>|Next line<br>|last line</p>|",
            "ltr",
        ],
        [code.format(r"\[|a = b|+ c_1|\]"), "ltr"],
        [f"<ol>|<li>|{code.format('$$a_1|* b$$')}</li>|</ol>|", "ltr"],
        ["<blockquote>|<p>שלום.</p>|</blockquote>|", "rtl"],
    ]


@pytest.mark.parametrize("has_clipboard", [True, False])  # pages of other machines have it with HTTPS only
def test_code_can_be_copied(scripted_url: str, open_page: OpenPage, has_clipboard: bool) -> None:
    page = ready(open_page(scripted_url, permissions=["clipboard-read", "clipboard-write"]))
    page.evaluate(
        """async (has) => {
      if (!has) Object.defineProperty(navigator, "clipboard", { value: undefined });
      const { showMarkdown } = await import("/dashboard/static/markdown.js");
      showMarkdown(document.getElementById("turns"), "Look:\\n```py\\nprint(1)\\n```\\n");
    }""",
        has_clipboard,
    )
    page.wait_for_selector(".hljs-built_in")
    page.click("[aria-label='Copy code']")
    page.wait_for_selector("[aria-label=Copied]")
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    assert page.input_value("#prompt") == "print(1)\n"
