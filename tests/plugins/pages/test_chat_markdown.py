"""The Markdown of models on the chat page: nobody trusts it, and its code can be copied, its formulas are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.browser import OpenPage
from tests.plugins.pages.chat_page import LAST, Script, ready, send

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
It costs $5 and then $6, or US$5/$6, \$7 or $8-$9.<br>Next line
last line

\[
a = b
+ c_1
\]

1. $$a_1
   * b$$

> \begin{align*}
> a &= b
> \end{align*}

> שלום.
"""


def test_formulas_are_told_from_prices_and_keep_their_own_marks(page: Page) -> None:
    html = page.evaluate(
        """async (text) => {
      const { showMarkdown } = await import("/dashboard/static/markdown.js");
      const box = document.getElementById("turns");
      showMarkdown(box, text, true);
      for (const code of box.querySelectorAll(".formula")) code.removeAttribute("class");
      const shown = (block) => [block.innerHTML.replaceAll("\\n", "|"), getComputedStyle(block).direction];
      return [...box.children].map(shown);
    }""",
        FORMULAS,
    )
    assert html == [
        [
            r"<p>One <code>\(a_1 * b_2\)</code>, two <code>$x_1\,y_1$</code>, three.<br>|It costs $5 and then $6, "
            "or US$5/$6, $7 or $8-$9.<br>|Next line<br>|last line</p>|",
            "ltr",
        ],
        [r"<p><code>\[|a = b|+ c_1|\]</code></p>|", "ltr"],
        ["<ol>|<li>|<p><code>$$a_1|* b$$</code></p>|</li>|</ol>|", "ltr"],
        [r"<blockquote>|<p><code>\begin{align*}|a &amp;= b|\end{align*}</code></p>|</blockquote>|", "ltr"],
        ["<blockquote>|<p>שלום.</p>|</blockquote>|", "rtl"],
    ]


HOSTILE_FORMULAS = r"""
$x^2$ $\label{prompt}x$ $\ref{chat}$ $\href{javascript:alert(1)}{x}$ $\includegraphics{https://evil.example/x}$
$\class{primary}{x}$ $\text{<b>bold</b>}$ $\def\a{\a\a}\a$ $\rule{9999em}{9999em}$ $\frac{1$
"""


def test_formulas_are_drawn_and_may_refer_to_nothing(page: Page) -> None:
    """`open_page` fails where a style is refused. What is no formula, or is not allowed, stays in TeX."""
    seen = page.evaluate(
        """async (text) => {
      const { showMarkdown } = await import("/dashboard/static/markdown.js");
      const box = document.getElementById("turns");
      showMarkdown(box, text);
      const loaded = () => document.querySelector("link[href$='temml.css']") && box.querySelector("math");
      while (!loaded()) await new Promise((resolve) => setTimeout(resolve, 20));
      const all = [...box.querySelectorAll("*")];
      return {
        tags: [...new Set(all.map((node) => node.localName))].sort(),
        names: [...new Set(all.flatMap((node) => node.getAttributeNames()))].sort(),
        left: [...box.querySelectorAll(".formula")].map((code) => code.textContent),
        widths: [...box.querySelectorAll("mspace")].map((node) => node.getAttribute("width")),
      };
    }""",
        HOSTILE_FORMULAS,
    )
    tags = "p br div code span a math mrow mi mn mo msup mtext mspace mstyle"
    assert set(seen["tags"]) <= {*tags.split()}
    assert not {"id", "href", "src", "onclick"} & set(seen["names"])
    assert [text[:7] for text in seen["left"]] == [r"$\href{", r"$\inclu", r"$\class", r"$\def\a", r"$\frac{"]
    assert seen["widths"] == ["20em"]


def test_powers_and_underscores_in_the_text_of_a_formula_are_drawn(page: Page, script: Script) -> None:
    script.answer(r"$\boxed{\text{O(n^2) for a_1}}$")
    send(page)
    page.wait_for_selector(f"{LAST} math")
    assert (page.text_content(f"{LAST} mtext") or "").replace("\u00a0", " ") == "O(n^2) for a_1"


def test_shades_are_on_the_tex_of_a_formula(page: Page, script: Script) -> None:
    script.answer("So ", "$x^", "2$", " it is.")
    send(page)
    page.wait_for_selector(f"{LAST} msup")
    page.click(".account summary")
    page.click(".views [value=certainty]")
    assert page.locator(f"{LAST} .formula [data-token]").all_text_contents() == ["$x^", "2$"]
    page.click(".views [value=text]")
    page.wait_for_selector(f"{LAST} msup")


def test_tasks_of_a_list_have_boxes(page: Page, script: Script) -> None:
    script.answer("- [ ] open\n- [x] done\n- [link](https://a.example)\n")
    send(page)
    assert page.locator(f"{LAST} li").all_text_contents() == ["☐ open", "☑ done", "link"]


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
