"""Tests the chat of the live page in a real Chromium, with a real server that has a small model and an adapter."""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest
from PIL import Image

from tests.e2e.browser import DESK, PHONE, OpenPage, check_texts_and_controls, walk_to
from tests.e2e.conftest import LiveServer, serve_process
from tests.models.adapters import write_adapter
from tests.models.seeing import picture, png

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

LAST = "#turns > li:last-child .answered"


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("chat")
    adapter = write_adapter(folder / "adapter", {"model.layers.0.mlp.down_proj": (32, 48)}, rank=4, size=3)
    flags = ("--served-model-name", "small", "--kv-blocks", "1200", "--lora", f"other={adapter}")
    with serve_process(str(small_model), folder / "log", *flags) as server:
        yield server


@pytest.fixture
def page(server: LiveServer, open_page: OpenPage) -> Page:
    return ready(open_page(f"{server.url}/"))


def ready(page: Page) -> Page:
    page.wait_for_selector("#status[data-state=live]")
    page.wait_for_selector("#models label >> nth=1", state="attached")
    return page


def reopen(page: Page) -> None:
    """Load the page again, and the newest conversation."""
    page.reload()
    ready(page).locator("#conversation-list .link").first.click()


def settings(page: Page, **values: str) -> None:
    if page.get_attribute("#settings", "open") is None:
        page.click("#settings summary")
    for name, value in values.items():
        if name == "kind":
            page.check(f"[name=kind][value={value}]")
        else:
            page.fill(f"[name={name}]", value)


def bodies(page: Page) -> list[dict[str, Any]]:
    """Return a list that gets the bodies that the page sends from now on."""
    found: list[dict[str, Any]] = []
    page.on("request", lambda sent: found.append(sent.post_data_json) if sent.method == "POST" else None)
    return found


def send(page: Page, text: str = "Hi", button: str = "#send") -> None:
    if button == "#send":
        page.fill("#prompt", text)
    page.click(button)
    ended(page)


def ended(page: Page) -> None:
    page.wait_for_selector("#turns:not(.busy)")
    page.wait_for_selector(f"{LAST}[aria-busy=false]")


# -- an answer -------------------------------------------------------------------------------------------------------


def test_an_answer_is_told_and_below_it_are_its_phases_and_a_sentence_on_its_causes(
    server: LiveServer, page: Page
) -> None:
    settings(page, max_completion_tokens="60")
    send(page)
    recent, *_ = httpx.get(f"{server.url}/debug/requests", timeout=60).json()["requests"]
    entry = httpx.get(f"{server.url}/debug/requests/{recent['request_id']}", timeout=60).json()
    long = [phase["name"] for phase in entry["phases"] if phase["duration_ns"] >= 0.011 * entry["duration_ns"]]
    shown = [text.split(" ")[0] for text in page.locator(f"{LAST} .legend li").all_inner_texts()]
    assert {name.split("_")[0] for name in long} <= set(shown)
    assert page.locator(f"{LAST} .bar i").count() == len(entry["phases"])
    notes = page.locator(f"{LAST} .note p").all_inner_texts()
    assert notes[0] == entry["explanation"][0]
    assert notes[1].startswith(f"{entry['prompt_tokens']} prompt tokens ({entry['cached_tokens']} cached), ")
    content = page.evaluate(KEPT)[0]["turns"][0]["answers"][0]["steps"][0]["message"]["content"]
    assert page.text_content("#said[role=status]") == f"small: {content}"  # for those who hear it, once it is whole
    page.click(f"{LAST} >> text=Open this request")
    page.wait_for_selector("tr[data-phase=decode]")
    assert page.text_content("#detail-title") == entry["request_id"]


def test_tokens_are_shaded_by_what_they_cost_and_by_how_sure_the_model_was(page: Page) -> None:
    settings(page, max_completion_tokens="40", temperature="0")
    with page.expect_response("**/v1/chat/completions") as sent:
        send(page)
    chunks = [line.removeprefix("data: ") for line in sent.value.text().splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    tokens = [token for choice in choices for token in (choice.get("logprobs") or {}).get("content", ())]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    for view in ("cost", "certainty"):
        page.click(f"#views [value={view}]")
        spans = page.locator(f"{LAST} [class^=shade]")
        assert spans.count() == len(tokens) > 10
        assert "".join(spans.all_text_contents()) == content
        assert page.locator("#shades li").count() == 5
    bounds = (0.9, 0.7, 0.5, 0.25)
    for span, token in zip(spans.all(), tokens, strict=True):
        chance = math.exp(token["logprob"])
        assert span.get_attribute("class") == f"shade-{sum(chance < bound for bound in bounds)}"
        assert "sure" in str(span.get_attribute("title"))
    page.click("#views [value=text]")
    assert spans.count() == len(tokens)  # hidden, as they were
    assert page.locator(f"{LAST} .markdown").is_visible()


def test_answers_beside_each_other_say_where_they_part(page: Page) -> None:
    settings(page, max_completion_tokens="30", seed="1", temperature="1")
    page.check("#models [value=other]")
    sent = bodies(page)
    send(page)
    assert [body["model"] for body in sent] == ["small", "other"]
    send(page, button="#again")
    heads = page.locator(f"{LAST} h3")
    assert heads.all_inner_texts() == [f"{name} temperature 1, seed 1" for name in ("small", "other", "small", "other")]
    texts = [answer.text_content() or "" for answer in page.locator(f"{LAST} .markdown").all()]
    notes = [" ".join(answer.all_inner_texts()) for answer in map(page.locator, parts(4, ".note p"))]
    assert texts[0] == texts[2]
    assert "It is the same as the first, token by token." in notes[2]
    assert "first" not in notes[0]
    page.click("#views [value=certainty]")
    one, other = (page.locator(selector).all_text_contents() for selector in parts(2, "[class^=shade]"))
    same = next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert f"It parts from the first {f'after {same} token' if same else 'at once'}" in notes[1]
    for selector, tokens in zip(parts(2, ".parts"), (one, other), strict=True):
        assert page.locator(selector).text_content() == tokens[same]
    bars = [page.locator(bar).last.evaluate("i => i.offsetLeft + i.offsetWidth") for bar in parts(4, ".bar i")]
    width = page.locator(f"{LAST} .bar").first.evaluate("bar => bar.clientWidth")
    assert max(bars) == pytest.approx(width, abs=2)  # all have one scale
    reopen(page)
    assert page.locator(f"{LAST}").count() == 4


def parts(number: int, within: str) -> list[str]:
    return [f"{LAST} >> nth={place} >> {within}" for place in range(number)]


def test_a_refusal_has_the_message_and_the_parameter_of_the_server(server: LiveServer, open_page: OpenPage) -> None:
    page = ready(open_page(f"{server.url}/", may_log=True))
    settings(page, kind="schema", schema='{"not": {}}')
    send(page)
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"not": {}}}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": schema}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["error"]
    assert page.inner_text(f"{LAST} .error") == error["message"]
    assert page.inner_text(f"{LAST} .error + .note") == f"Parameter: {error['param']}" == "Parameter: response_format"
    assert page.is_hidden(f"{LAST} >> text=Everything about this request")


# -- what is sent ----------------------------------------------------------------------------------------------------


def test_a_message_goes_with_its_settings_its_files_and_what_was_said_before(page: Page, tmp_path: Path) -> None:
    sent = bodies(page)
    settings(page, max_completion_tokens="5", temperature="0.5", top_p="0.9", seed="7", system="Be kind.")
    page.select_option("[name=reasoning_effort]", "low")
    (tmp_path / "notes.txt").write_text("one ``` two\n")
    (tmp_path / "cat.png").write_bytes(b"\x89PNG\xff")
    page.set_input_files("#attach", [tmp_path / "notes.txt", tmp_path / "cat.png"])
    page.wait_for_selector("#problem:has-text('cat.png cannot be attached: it is no text in UTF-8')")
    assert page.locator("#attached li").count() == 1
    send(page, "Read <b>this</b>.")
    assert page.locator("#attached li").count() == 0
    (body,) = sent
    asked = {"role": "user", "content": "Read <b>this</b>.\n\nThe file notes.txt:\n````\none ``` two\n````"}
    assert body["messages"] == [{"role": "system", "content": "Be kind."}, asked]
    named = {"max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 7, "reasoning_effort": "low"}
    assert {name: body[name] for name in named} == named
    assert page.inner_text(".asked .text") == "Read <b>this</b>."
    send(page, "And?")
    _, _, answer, last = sent[-1]["messages"]
    assert (answer["role"], last) == ("assistant", {"role": "user", "content": "And?"})
    assert answer["content"] == page.evaluate(KEPT)[0]["turns"][0]["answers"][0]["steps"][0]["message"]["content"]


def read_picture(part: dict[str, Any]) -> Image.Image:
    assert part["type"] == "image_url"
    return Image.open(BytesIO(base64.b64decode(part["image_url"]["url"].partition(";base64,")[2])))


@pytest.fixture
def seeing(server: LiveServer, open_page: OpenPage) -> Page:
    """Give the page of a model that reads pictures, whose answers are made up here."""
    page = open_page(f"{server.url}/")
    models = httpx.get(f"{server.url}/v1/models", timeout=60).json()
    assert [model["input_modalities"] for model in models["data"]] == [["text"], ["text"]]
    models["data"][0]["input_modalities"] = ["image", "text"]
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    details = {"cached_tokens": 4, "image_tokens": 77}
    usage = {"prompt_tokens": 90, "completion_tokens": 1, "prompt_tokens_details": details}
    timings = {"phases_ns": {"receive": 1000, "encode_media": 8_000_000, "prefill": 2_000_000}}
    chunks = {"choices": [{"index": 0, "delta": {"content": "Teal."}}]}, {"usage": usage, "timings": timings}
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.reload()
    return ready(page)


def hand_in(page: Page, how: str, content: bytes, name: str = "a.png") -> None:
    """Drop or paste a picture."""
    page.evaluate(
        """([how, content, name]) => {
      const files = new DataTransfer();
      files.items.add(new File([Uint8Array.from(content)], name, { type: "image/png" }));
      const told = { bubbles: true, cancelable: true, dataTransfer: files, clipboardData: files };
      const event = how === "drop" ? new DragEvent(how, told) : new ClipboardEvent(how, told);
      document.getElementById("prompt").dispatchEvent(event);
    }""",
        [how, [*content], name],
    )


def test_pictures_are_chosen_dropped_and_pasted_and_go_with_later_turns_too(seeing: Page) -> None:
    sent = bodies(seeing)
    shown = seeing.locator("#attached img")
    seeing.set_input_files(
        "#attach", {"name": "large.png", "mimeType": "image/png", "buffer": png(picture(0, 3000, 1500))}
    )
    seeing.wait_for_selector("#attached img[alt='large.png']")
    for number, how in enumerate(("drop", "paste")):
        hand_in(seeing, how, png(picture(0, 20 + number, 10)), f"{how}.png")
        seeing.wait_for_selector(f"#attached img[alt='{how}.png']")
    seeing.click("[aria-label='Remove drop.png']")
    assert shown.count() == 2
    send(seeing, "Which colour?")
    assert shown.count() == 0
    *pictures, text = sent[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "Which colour?"}
    assert [read_picture(picture).size for picture in pictures] == [(2000, 1000), (21, 10)]
    assert seeing.locator(".asked img").count() == 2
    assert "90 prompt tokens (4 cached, 77 of pictures), " in seeing.inner_text(f"{LAST} .note")
    assert "encode media 8.0 ms" in seeing.locator(f"{LAST} .legend li").all_inner_texts()
    assert seeing.locator(f"{LAST} .bar .phase-encode_media").count() == 1
    reopen(seeing)
    send(seeing, "And now?")
    asked, answer, last = sent[1]["messages"]
    assert (asked, answer["content"]) == (sent[0]["messages"][0], "Teal.")
    assert last["content"] == "And now?"


def test_a_browser_without_room_for_pictures_keeps_the_rest_of_the_conversation(seeing: Page) -> None:
    seeing.evaluate("() => [21, 20, 19].forEach((size) => localStorage.setItem(`x${size}`, 'x'.repeat(2 ** size)))")
    noise = png(Image.frombytes("RGB", (1000, 1000), random.Random(1).randbytes(3_000_000)))
    seeing.set_input_files("#attach", {"name": "n.png", "mimeType": "image/png", "buffer": noise})
    seeing.wait_for_selector("#attached img")
    send(seeing)
    assert "no room for the pictures" in seeing.inner_text("#problem")
    assert seeing.locator(".asked img").count() == 1
    reopen(seeing)
    assert "n.png, which this browser had no room for" in seeing.inner_text(".asked")


def test_only_a_model_that_reads_pictures_is_offered_any(page: Page, seeing: Page) -> None:
    assert page.get_attribute("#camera-label", "hidden") is not None
    assert seeing.get_attribute("#camera-label", "hidden") is None
    assert seeing.is_hidden("#camera-label")  # where there is a mouse
    settings(seeing)
    seeing.check("#models [value=other]")
    assert seeing.get_attribute("#camera-label", "hidden") is not None
    hand_in(seeing, "paste", png(picture(0)))
    seeing.wait_for_selector("#problem:has-text('a.png cannot be attached: it is no text in UTF-8')")


KEPT = "() => Object.keys(localStorage).map((key) => JSON.parse(localStorage.getItem(key)))"


def test_a_message_can_be_edited_and_what_followed_it_is_gone(page: Page) -> None:
    sent = bodies(page)
    settings(page, max_completion_tokens="4")
    for text in ("One", "Two", "Three"):
        send(page, text)
    page.click("#turns > li:nth-child(2) >> text=Edit")
    send(page, "Zwei")
    assert page.locator(".asked .text").all_inner_texts() == ["One", "Zwei"]
    assert [message["content"] for message in sent[-1]["messages"][::2]] == ["One", "Zwei"]


def test_conversations_stay_in_the_browser_and_can_be_renamed_and_deleted(page: Page) -> None:
    settings(page, max_completion_tokens="4", seed="3")
    send(page, "The first")
    page.click("#new-chat")
    assert page.locator("#turns li").count() == 0
    settings(page, seed="")
    send(page, "The second")
    page.reload()
    ready(page)
    titles = page.locator("#conversation-list .link")
    assert titles.all_inner_texts() == ["The second", "The first"]
    titles.nth(1).click()
    assert page.locator(".asked .text").all_inner_texts() == ["The first"]
    assert page.input_value("[name=seed]") == "3"
    page.once("dialog", lambda dialog: dialog.accept("Renamed"))
    page.click("#conversation-list >> text=Rename")
    assert titles.all_inner_texts() == ["Renamed", "The second"]
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#conversation-list >> text=Delete")
    assert titles.all_inner_texts() == ["The second"]
    assert page.locator("#turns li").count() == 0
    assert len(page.evaluate(KEPT)) == 1


def test_a_full_storage_is_told(page: Page) -> None:
    settings(page, max_completion_tokens="4")
    page.evaluate("""() => {
      for (let size = 2 ** 22; size >= 1; size /= 2) {
        try { for (let i = 0; i < 4; i++) localStorage.setItem(`x${size}-${i}`, "x".repeat(size)); } catch { continue; }
      }
    }""")
    send(page)
    assert "no room for this conversation" in page.inner_text("#problem")


def test_an_answer_can_be_stopped_and_meanwhile_no_message_is_sent(page: Page) -> None:
    sent = bodies(page)
    endless = json.dumps({"type": "string", "minLength": 14_000})
    settings(page, max_completion_tokens="15000", kind="schema", schema=endless)
    page.fill("#prompt", "Go on")
    page.evaluate("() => [1, 2].forEach(() => document.getElementById('chat-form').requestSubmit())")
    page.wait_for_selector("#turns.busy .markdown:not(:empty)")
    page.keyboard.press("Escape")
    ended(page)
    assert page.locator(f"{LAST} .end").inner_text() == "You stopped it."
    assert len(sent) == 1
    page.click("#again")
    page.wait_for_selector("#turns.busy")
    page.click("#stop")
    ended(page)
    assert page.locator(".end").all_inner_texts() == ["You stopped it."] * 2


# -- schemas and tools -----------------------------------------------------------------------------------------------


def test_the_example_of_a_schema_gets_an_answer_that_satisfies_it(page: Page) -> None:
    settings(page, kind="schema", max_completion_tokens="500", temperature="0")
    send(page)
    answer = page.text_content(f"{LAST} .markdown pre")
    assert answer is not None
    jsonschema.validate(json.loads(answer), json.loads(page.input_value("#schema")))
    assert answer.startswith('{\n  "name": "')


def test_tools_are_called_and_their_results_go_back(page: Page) -> None:
    sent = bodies(page)
    settings(page, kind="tools", max_completion_tokens="500", temperature="0")
    page.select_option("#tool_choice", label="get_weather")
    send(page)
    call = page.locator(f"{LAST} .call").first
    assert call.locator("h4").inner_text() == "Tool call get_weather"
    arguments = call.locator("pre").text_content() or ""
    (tool,) = json.loads(page.input_value("#tools"))
    jsonschema.validate(json.loads(arguments), tool["function"]["parameters"])
    assert arguments.startswith('{\n  "city": "')
    settings(page, max_completion_tokens="5")
    page.get_by_label("Result of get_weather").fill("21 °C")
    page.click("text=Send the results")
    page.wait_for_selector(f"{LAST} .bar >> nth=1")
    ended(page)
    _, asked, result = sent[-1]["messages"]
    assert (result["role"], result["content"]) == ("tool", "21 °C")
    assert asked["tool_calls"][0]["id"] == result["tool_call_id"]
    assert (sent[0]["tool_choice"]["function"]["name"], sent[-1]["tool_choice"]) == ("get_weather", "auto")
    assert call.locator("pre").all_inner_texts()[1] == "21 °C"


def test_without_a_chosen_model_nothing_is_sent_and_the_page_says_so(page: Page) -> None:
    sent = bodies(page)
    settings(page)
    page.uncheck("#models [value=small]")
    page.fill("#prompt", "Hi")
    page.click("#send")
    assert page.inner_text("#problem").startswith("No model is chosen.")
    assert (sent, page.input_value("#prompt")) == ([], "Hi")


def test_each_tool_can_be_chosen_by_its_name(page: Page) -> None:
    parameters = {"properties": {"level": {"enum": [1, 2]}}, "required": ["level"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("dim", "glow")]
    settings(page, kind="tools", tools=json.dumps(tools))
    page.locator("#tools").blur()
    assert page.locator("#named-tools option").all_inner_texts() == ["dim", "glow"]
    page.select_option("#tool_choice", label="glow")
    send(page)
    assert page.locator(f"{LAST} .call h4 code").all_inner_texts() == ["glow"]
    assert json.loads(page.text_content(f"{LAST} .call pre") or "") in ({"level": 1}, {"level": 2})
    send(page, "More")
    assert [page.locator(f"#turns > li:nth-child({turn}) .results").count() for turn in (1, 2)] == [0, 1]
    page.fill("#tools", json.dumps(tools[:1]))
    page.locator("#tools").blur()
    assert page.input_value("#tool_choice") == '"required"'  # the one that was chosen is gone


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("schema", '{"type": }', "This is not JSON: "),
        ("schema", "[]", "A schema is an object: {...}."),
        ("tools", "[{]", "This is not JSON: "),
        ("tools", '{"type": "function"}', "Tools are a list of objects: [{...}, ...]."),
        ("tools", "[1]", "Tools are a list of objects: [{...}, ...]."),
    ],
)
def test_what_is_not_json_is_told_at_its_box_and_not_sent(page: Page, kind: str, text: str, problem: str) -> None:
    sent = bodies(page)
    settings(page, kind=kind)
    page.fill(f"#{kind}", text)
    page.click("#settings summary")
    page.fill("#prompt", "Hi")
    page.keyboard.press("Enter")
    assert (page.text_content(f"#{kind}-problem") or "").startswith(problem)
    assert page.get_attribute(f"#{kind}", "aria-invalid") == "true"
    assert page.get_attribute(f"#{kind}", "aria-describedby") == f"{kind}-problem"
    assert page.evaluate("() => document.activeElement.id") == kind
    assert sent == []


# -- Markdown that nobody trusts -------------------------------------------------------------------------------------

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
    found = page.evaluate(
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
    tags = "a p table thead tbody tr th td div pre code button br"
    assert set(found["tags"]) <= {*tags.split()}
    assert set(found["attributes"]) <= {"class", "href", "rel", "target", "title", "type", "tabindex"}
    assert [(href, text) for href, _, text in found["links"]] == [
        ("http://evil", "http://evil"),  # its text, within the HTML that stays text
        ("https://evil.example/pixel.png", "image: track"),
        ("https://good.example/?%22onmouseover=alert(1)", "h"),
        ("https://plain.example/a", "https://plain.example/a"),
    ]
    assert {rel for _, rel, _ in found["links"]} == {"noopener noreferrer"}
    assert found["code"] == "<script>alert(2)</script>\n"


@pytest.mark.parametrize("has_clipboard", [True, False])  # pages of other machines have it with HTTPS only
def test_code_can_be_copied(server: LiveServer, open_page: OpenPage, has_clipboard: bool) -> None:
    page = ready(open_page(f"{server.url}/", permissions=["clipboard-read", "clipboard-write"]))
    page.evaluate(
        """async (has) => {
      if (!has) Object.defineProperty(navigator, "clipboard", { value: undefined });
      const { showMarkdown } = await import("/dashboard/static/markdown.js");
      showMarkdown(document.getElementById("turns"), "Look:\\n```py\\nprint(1)\\n```\\n");
    }""",
        has_clipboard,
    )
    page.click("text=Copy code")
    page.wait_for_selector("text=Copied")
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    assert page.input_value("#prompt") == "print(1)\n"


# -- keys, eyes and phones -------------------------------------------------------------------------------------------


def test_a_conversation_needs_no_mouse(page: Page) -> None:
    settings(page, max_completion_tokens="5")
    walk_to(page, "#prompt")
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    page.keyboard.press("Enter")
    ended(page)
    assert page.inner_text(".asked .text") == "One\nTwo"
    assert page.evaluate("() => document.activeElement.id") == "prompt"
    walk_to(page, ".asked button", "Shift+Tab")
    page.keyboard.press("Enter")
    assert page.input_value("#prompt") == "One\nTwo"
    page.keyboard.press("Escape")
    assert (page.input_value("#prompt"), page.is_visible("#editing")) == ("", False)
    walk_to(page, "#views [value=cost]", "Shift+Tab")
    page.keyboard.press("Space")
    assert page.get_attribute("#views [value=cost]", "aria-pressed") == "true"
    walk_to(page, "#conversation-list .link", "Shift+Tab")
    assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") != "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_every_text_has_enough_contrast_and_every_control_a_name_within_the_width(
    server: LiveServer, open_page: OpenPage, scheme: str, viewport: dict[str, int]
) -> None:
    page = ready(open_page(f"{server.url}/", viewport, color_scheme=scheme))
    settings(page, kind="tools", max_completion_tokens="300", temperature="1")
    page.check("#models [value=other]")
    check_texts_and_controls(page)
    send(page, "A " * 300)
    settings(page, kind="schema")
    send(page, button="#again")
    for view in ("cost", "certainty", "text"):
        page.click(f"#views [value={view}]")
        check_texts_and_controls(page, least_texts=20)
    page.fill("#schema", "[")
    page.locator("#schema").blur()
    check_texts_and_controls(page)
