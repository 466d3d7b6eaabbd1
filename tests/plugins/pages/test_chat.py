"""Tests the chat page in a real Chromium, with a real server that has a small model and an adapter."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from PIL import Image

from tests.e2e.browser import DESK, PHONE, OpenPage, check_texts_and_controls, walk_to
from tests.e2e.live import LiveServer, serve_process
from tests.models.adapters import write_adapter
from tests.models.pictures import picture, png
from tests.plugins.pages.chat_page import LAST, bodies, ended, send, settings, stored

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("chat")
    adapter = write_adapter(folder / "adapter", {"model.layers.0.mlp.down_proj": (32, 48)}, rank=4, size=3)
    flags = ("--served-model-name", "small", "--kv-cache-memory", "14400KiB", "--lora", f"other={adapter}")
    with serve_process(str(small_model), folder / "log", *flags) as server:
        yield server


@pytest.fixture
def page(server: LiveServer, open_page: OpenPage) -> Page:
    return ready(open_page(f"{server.url}/"))


def ready(page: Page) -> Page:
    page.wait_for_selector("#status[data-state=live]")
    page.wait_for_selector("#model-list label >> nth=1", state="attached")
    return page


def reopen(page: Page) -> None:
    """Load the page again, and the newest conversation."""
    page.reload()
    ready(page).locator("#conversation-list .talk").first.click()


def compare(page: Page) -> None:
    """Choose both models."""
    page.click("#model-button")
    page.check("#compare")
    page.check("#model-list [value=other]")
    page.keyboard.press("Escape")


def regenerate(page: Page) -> None:
    page.locator(f"{LAST} [aria-label=Regenerate]").click()
    ended(page)


# -- an empty chat ---------------------------------------------------------------------------------------------------


def test_an_empty_chat_suggests_prompts_and_one_click_sends_them(page: Page) -> None:
    examples = page.locator("#examples button")
    assert examples.count() == len(set(examples.all_inner_texts())) == 4
    text = examples.first.inner_text()
    examples.first.click()
    ended(page)
    assert page.inner_text("#turns .bubble") == text
    assert page.inner_text("#welcome-note") == ""  # This model is not the demo.


# -- an answer -------------------------------------------------------------------------------------------------------


def test_the_line_below_an_answer_opens_into_its_phases_and_their_causes(server: LiveServer, page: Page) -> None:
    settings(page, max_completion_tokens="60", seed="1")
    with page.expect_response("**/v1/chat/completions") as answer:
        send(page)
    request_id = answer.value.headers["x-request-id"]
    entry = server.get(f"/debug/requests/{request_id}").json()
    line = page.inner_text(f"{LAST} .account .line")
    assert re.fullmatch(rf"[\d.]+ tok/s · {entry['completion_tokens']} tokens · [\d.]+ m?s", line)
    assert page.locator(f"{LAST} .bar i").count() == len(entry["phases"])
    page.click(f"{LAST} .account summary")
    page.wait_for_selector(f"{LAST} .account .row")
    long = [phase["name"] for phase in entry["phases"] if phase["duration_ns"] >= 0.011 * entry["duration_ns"]]
    shown = page.locator(f"{LAST} .account .row span:first-child").all_text_contents()
    assert {name.replace("_", " ") for name in long} <= set(shown)
    page.wait_for_selector(f"{LAST} .why p")
    sentences = page.locator(f"{LAST} .why p").all_text_contents()
    cached = f"{entry['cached_tokens']} of {entry['prompt_tokens']} prompt tokens came from the cache."
    assert sentences == [*entry["explanation"], cached]
    content = stored(page)[0]["turns"][0]["answers"][0]["steps"][0]["message"]["content"]
    assert page.text_content("#said[role=status]") == f"small: {content}"  # for those who hear it, once it is whole
    page.click(f"{LAST} >> text=Open this request")
    page.wait_for_url(f"**/requests/{request_id}")


def test_account_of_an_answer_names_the_shades_of_its_bars(page: Page) -> None:
    send(page)
    page.click(f"{LAST} .account summary")
    shades = page.locator(f"{LAST} .account [aria-label='Shades of bars'] li")
    shades.first.wait_for()
    assert shades.all_inner_texts()[2:] == ["the machine was busy elsewhere", "unexplained, and other causes"]
    assert page.locator(f"{LAST} .account .row .shaded").count() > 0


def test_answers_of_two_models_and_of_two_rounds_say_where_they_differ(page: Page) -> None:
    settings(page, max_completion_tokens="30", seed="1", temperature="1")
    compare(page)
    sent = bodies(page)
    send(page)
    assert [body["model"] for body in sent] == ["small", "other"]
    heads = page.locator(f"{LAST} h2")
    assert heads.all_text_contents() == [
        f"{name} temperature 1, seed 1, at most 30 tokens" for name in ("small", "other")
    ]
    for selector in parts(2, ".account summary"):
        page.click(selector)
        page.wait_for_selector(f"{selector.removesuffix('.account summary')} .why p")
    notes = [" ".join(page.locator(part).all_text_contents()) for part in parts(2, ".why")]
    assert "first answer" not in notes[0]
    texts = [page.text_content(part) or "" for part in parts(2, ".markdown")]
    begin = "after" if texts[0][:1] == texts[1][:1] else "from the first token on"
    assert f"Differs from the first answer {begin}" in notes[1]
    share = "i => (i.offsetLeft + i.offsetWidth) / i.parentElement.clientWidth"
    ends = [page.locator(bar).last.evaluate(share) for bar in parts(2, ".bar i")]
    assert max(ends) == pytest.approx(1, abs=0.02)  # both have one scale
    regenerate(page)
    assert page.locator(LAST).count() == 2
    assert page.inner_text(f"{LAST} .place") == "2/2"
    page.click(f"{LAST} >> nth=0 >> .account summary")
    page.wait_for_selector(f"{LAST} >> nth=0 >> .why:has-text('Every token is the same as in the first answer.')")
    page.click(f"{LAST} [aria-label='Previous answer']")
    assert page.inner_text(f"{LAST} .place") == "1/2"
    reopen(page)
    assert page.inner_text(f"{LAST} .place") == "1/2"


def parts(number: int, within: str) -> list[str]:
    return [f"{LAST} >> nth={place} >> {within}" for place in range(number)]


def test_a_refusal_has_the_message_and_the_parameter_of_the_server(server: LiveServer, open_page: OpenPage) -> None:
    page = ready(open_page(f"{server.url}/", may_log=True))
    settings(page, kind="schema", schema='{"not": {}}')
    send(page)
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"not": {}}}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": schema}
    error = server.post("/v1/chat/completions", **body).json()["error"]
    assert page.inner_text(f"{LAST} .error") == error["message"]
    assert page.inner_text(f"{LAST} .error + .note") == f"Parameter: {error['param']}" == "Parameter: response_format"


def test_prompt_that_is_too_long_is_edited_and_not_sent_again(server: LiveServer, open_page: OpenPage) -> None:
    page = ready(open_page(f"{server.url}/", may_log=True))
    send(page, "word " * 20_000)
    assert "context length" in page.inner_text(f"{LAST} .error")
    assert page.locator(f"{LAST} .end button").all_inner_texts() == ["Edit"]
    page.click(f"{LAST} .end button")
    assert page.is_visible("#editing")
    assert page.input_value("#prompt").startswith("word word")
    settings(page, max_completion_tokens="4")
    send(page, "Shorter")
    assert page.locator(".asked .text").all_inner_texts() == ["Shorter"]
    assert page.locator(f"{LAST} .error").count() == 0


def test_lost_connection_is_reported_in_words(server: LiveServer, open_page: OpenPage) -> None:
    page = ready(open_page(f"{server.url}/", may_log=True))
    page.route("**/v1/chat/completions", lambda route: route.abort())
    send(page)
    assert page.inner_text(f"{LAST} .error") == "The server cannot be reached."


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_message_sent_before_the_models_are_known_goes_once_they_are(
    server: LiveServer, open_page: OpenPage, *, is_changed: bool
) -> None:
    page = ready(open_page(f"{server.url}/"))
    held: list[Route] = []
    page.route("**/v1/models", lambda route: held.append(route))
    sent = bodies(page)
    with page.expect_request("**/v1/models"):
        page.reload()
    page.fill("#prompt", "Early")
    page.keyboard.press("Enter")
    if is_changed:
        page.keyboard.type(", and more")
    held[0].continue_()
    ready(page)
    assert page.is_hidden("#problem")
    if is_changed:
        assert page.input_value("#prompt") == "Early, and more"
        assert not sent
        page.keyboard.press("Enter")
    ended(page)
    assert [body["messages"][-1]["content"] for body in sent] == ["Early, and more" if is_changed else "Early"]
    assert page.input_value("#prompt") == ""


# -- what is sent ----------------------------------------------------------------------------------------------------


def test_a_message_goes_with_its_settings_its_files_and_what_was_said_before(page: Page, tmp_path: Path) -> None:
    sent = bodies(page)
    settings(page, max_completion_tokens="5", temperature="0.5", top_p="0.9", seed="7", system="Be kind.")
    page.select_option("[name=reasoning_effort]", "low")
    (tmp_path / "notes.txt").write_text("one ``` two\n")
    (tmp_path / "cat.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "long.txt").write_text("a" * 2**21)
    (tmp_path / "plan.pdf").write_bytes(b"%PDF-1.7")
    page.set_input_files("#attach", [tmp_path / name for name in ("cat.png", "long.txt", "plan.pdf", "notes.txt")])
    page.wait_for_selector(
        "#attach-problem:has-text('cat.png cannot be attached: it is a picture, and this model reads only text.')"
    )
    problem = page.inner_text("#attach-problem")
    assert "long.txt cannot be attached: it has 2097 kB, and" in problem
    assert "plan.pdf cannot be attached: this page does not read PDF." in problem
    above, clip = (page.locator(each).bounding_box() for each in ("#attach-problem", "#attach-button"))
    assert above is not None
    assert clip is not None
    assert 0 < clip["y"] - above["y"] < 300  # near the clip
    page.click("#attach-problem button")
    assert page.is_hidden("#attach-problem")
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert page.locator("#attached li").count() == 1
    send(page, "Read <b>this</b>.")
    assert page.locator("#attached li").count() == 0
    (body,) = sent
    question = {"role": "user", "content": "Read <b>this</b>.\n\nThe file notes.txt:\n````\none ``` two\n````"}
    assert body["messages"] == [{"role": "system", "content": "Be kind."}, question]
    named = {"max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 7, "reasoning_effort": "low"}
    assert {name: body[name] for name in named} == named
    assert page.inner_text(".asked .bubble > .text") == "Read <b>this</b>."
    send(page, "And?")
    _, _, answer, last = sent[-1]["messages"]
    assert (answer["role"], last) == ("assistant", {"role": "user", "content": "And?"})
    assert answer["content"] == stored(page)[0]["turns"][0]["answers"][0]["steps"][0]["message"]["content"]


def read_picture(part: dict[str, Any]) -> Image.Image:
    assert part["type"] == "image_url"
    return Image.open(BytesIO(base64.b64decode(part["image_url"]["url"].partition(";base64,")[2])))


@pytest.fixture
def seeing(server: LiveServer, open_page: OpenPage) -> Page:
    """Give the page of a model that reads pictures, whose answers are made up here."""
    page = open_page(f"{server.url}/")
    models = server.get("/v1/models").json()
    assert [model["input_modalities"] for model in models["data"]] == [["text"], ["text"]]
    models["data"][0]["input_modalities"] = ["image", "text"]
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    details = {"cached_tokens": 4, "image_tokens": 77, "read_again_tokens": 60, "read_again_reason": "other_replica"}
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
    assert seeing.locator(f"{LAST} .bar .phase-encode_media").count() == 1
    seeing.click(f"{LAST} .account summary")
    cached = "4 of 90 prompt tokens came from the cache, 77 of them for pictures. 60 were read again (other replica)."
    seeing.wait_for_selector(f"{LAST} .why p:text-is('{cached}')")
    assert seeing.locator(f"{LAST} .account .row").first.all_inner_texts() == ["Encode media\n8 ms"]
    reopen(seeing)
    send(seeing, "And now?")
    question, answer, last = sent[1]["messages"]
    assert (question, answer["content"]) == (sent[0]["messages"][0], "Teal.")
    assert last["content"] == "And now?"


def test_only_models_that_read_pictures_get_them(page: Page, seeing: Page) -> None:
    refused = "#attach-problem:has-text('a.png cannot be attached: it is a picture, and this model reads only text.')"
    hand_in(page, "paste", png(picture(0)))
    page.wait_for_selector(refused)
    compare(seeing)
    hand_in(seeing, "paste", png(picture(0)))
    seeing.wait_for_selector(refused)


def test_an_edited_message_is_another_version_and_the_first_one_stays(page: Page) -> None:
    sent = bodies(page)
    settings(page, max_completion_tokens="4")
    for text in ("One", "Two", "Three"):
        send(page, text)
    texts = page.locator(".asked .text")
    page.locator("#turns > li:nth-child(2) [aria-label=Edit]").click()
    assert page.is_visible("#editing")
    send(page, "Zwei")
    assert texts.all_inner_texts() == ["One", "Zwei"]
    assert [message["content"] for message in sent[-1]["messages"][::2]] == ["One", "Zwei"]
    assert page.inner_text(".asked .place") == "2/2"
    assert page.locator(".asked:has(.edited) .text").all_inner_texts() == ["Zwei"]
    page.click("[aria-label='Previous version']")
    assert page.locator(".edited").count() == 0
    assert texts.all_inner_texts() == ["One", "Two", "Three"]
    reopen(page)
    page.click("[aria-label='Next version']")
    assert texts.all_inner_texts() == ["One", "Zwei"]
    assert page.inner_text(".asked .edited") == "Edited"
    page.locator("#turns > li:first-child [aria-label='Branch into a new chat']").click()
    assert texts.all_inner_texts() == ["One"]
    assert page.locator(".talk").all_inner_texts() == ["One (branch)", "One"]


def test_an_answer_can_be_stopped_and_meanwhile_no_message_is_sent(page: Page) -> None:
    def go_on(route: Route) -> None:
        """Let the model write until it is stopped. A grammar without an end would meet the limit of its states."""
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    sent = bodies(page)
    page.route("**/v1/chat/completions", go_on)
    settings(page, max_completion_tokens="15000")
    page.fill("#prompt", "Go on")
    page.evaluate("() => [1, 2].forEach(() => document.getElementById('chat-form').requestSubmit())")
    page.wait_for_selector("#turns.busy .markdown:not(:empty)")
    page.keyboard.press("Escape")
    ended(page)
    assert page.locator(f"{LAST} .end").inner_text() == "Stopped by you.\n\nContinue"
    assert len(sent) == 1
    page.click(f"{LAST} [aria-label=Regenerate]")
    page.wait_for_selector(f"{LAST}:has(.place:text('2/2')) .markdown:not(:empty)")
    page.click("#send[aria-label=Stop]")
    ended(page)
    assert page.inner_text(f"{LAST} .place") == "2/2"
    assert page.locator(".end").all_inner_texts() == ["Stopped by you.\n\nContinue"]


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
    assert call.locator("h3").inner_text() == "Called get_weather"
    arguments = call.locator("pre").text_content() or ""
    (tool,) = json.loads(page.input_value("#tools"))
    jsonschema.validate(json.loads(arguments), tool["function"]["parameters"])
    assert arguments.startswith('{\n  "city": "')
    settings(page, max_completion_tokens="5")
    page.get_by_label("Result of get_weather").fill("21 °C")
    page.click("text=Send the result")
    page.wait_for_selector(f"{LAST} .bar >> nth=1")
    ended(page)
    _, with_call, result = sent[-1]["messages"]
    assert (result["role"], result["content"]) == ("tool", "21 °C")
    assert with_call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert (sent[0]["tool_choice"]["function"]["name"], sent[-1]["tool_choice"]) == ("get_weather", "auto")
    assert call.locator("pre").all_inner_texts()[1] == "21 °C"


def test_without_a_chosen_model_nothing_is_sent_and_the_page_says_so(page: Page) -> None:
    sent = bodies(page)
    settings(page)
    page.click("#model-button")
    page.check("#compare")
    page.uncheck("#model-list [value=small]")
    page.keyboard.press("Escape")
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
    assert page.locator(f"{LAST} .call h3 code").all_inner_texts() == ["glow"]
    assert json.loads(page.text_content(f"{LAST} .call pre") or "") in ({"level": 1}, {"level": 2})
    send(page, "More")
    assert [page.locator(f"#turns > li:nth-child({turn}) .results").count() for turn in (1, 2)] == [0, 1]
    page.fill("#tools", json.dumps(tools[:1]))
    page.locator("#tools").blur()
    assert page.input_value("#tool_choice") == '"auto"'  # the one that was chosen is gone


def test_what_is_not_json_is_told_at_its_box_and_not_sent(page: Page) -> None:
    sent = bodies(page)
    for kind, text, problem in (
        ("schema", '{"type": }', "This is not JSON: "),
        ("schema", "[]", "A schema is an object: {...}."),
        ("tools", "[{]", "This is not JSON: "),
        ("tools", '{"type": "function"}', "Tools are a list of objects: [{...}, ...]."),
        ("tools", "[1]", "Tools are a list of objects: [{...}, ...]."),
    ):
        settings(page, kind=kind)
        page.fill(f"#{kind}", text)
        page.click("#close-settings")
        page.fill("#prompt", "Hi")
        page.keyboard.press("Enter")
        assert (page.text_content(f"#{kind}-problem") or "").startswith(problem)
        assert page.get_attribute(f"#{kind}", "aria-invalid") == "true"
        assert page.get_attribute(f"#{kind}", "aria-describedby") == f"{kind}-problem"
        assert page.evaluate("() => document.activeElement.id") == kind
    assert sent == []


# -- keys, eyes and phones -------------------------------------------------------------------------------------------


def test_a_conversation_needs_no_mouse(page: Page) -> None:
    settings(page, max_completion_tokens="5", seed="1")
    walk_to(page, "#prompt")
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    page.keyboard.press("Enter")
    ended(page)
    assert page.inner_text(".asked .text") == "One\nTwo"
    assert page.evaluate("() => document.activeElement.id") == "prompt"
    page.keyboard.press("ArrowUp")
    assert page.input_value("#prompt") == "One\nTwo"
    page.keyboard.press("Escape")
    assert (page.input_value("#prompt"), page.is_visible("#editing")) == ("", False)
    walk_to(page, ".account summary", "Shift+Tab")
    page.keyboard.press("Enter")
    walk_to(page, ".views [value=cost]")
    page.keyboard.press("Space")
    assert page.get_attribute(".views [value=cost]", "aria-pressed") == "true"
    page.keyboard.press("Control+Shift+O")
    assert page.locator("#turns li").count() == 0
    assert page.evaluate("() => document.activeElement.id") == "prompt"
    page.keyboard.press("Control+k")
    assert page.evaluate("() => document.activeElement.id") == "search"
    walk_to(page, "#conversation-list .talk")
    assert page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle") != "none"
    page.keyboard.press("Enter")
    assert page.locator("#turns li").count() == 1
    assert page.evaluate("() => document.activeElement.className") == "talk"  # drawing the list keeps the focus
    page.keyboard.press("Control+/")
    assert page.is_visible("#help")


@pytest.mark.parametrize(("scheme", "viewport"), [("light", DESK), ("dark", PHONE)], ids=["light", "dark on a phone"])
def test_every_text_has_enough_contrast_and_every_control_a_name_within_the_width(
    server: LiveServer, open_page: OpenPage, scheme: str, viewport: dict[str, int]
) -> None:
    page = ready(open_page(f"{server.url}/", viewport, color_scheme=scheme))
    check_texts_and_controls(page)
    compare(page)
    settings(page, kind="tools", max_completion_tokens="300", temperature="1", seed="1")
    check_texts_and_controls(page, least_texts=20)
    page.fill("#tools", "[")
    page.locator("#tools").blur()
    check_texts_and_controls(page)
    page.check("[name=kind][value=text]")
    page.click("#close-settings")
    send(page, "A " * 300)
    page.click(f"{LAST} >> nth=0 >> .account summary")
    for view in ("cost", "certainty", "text"):
        page.click(f"{LAST} >> nth=0 >> .views [value={view}]")
        check_texts_and_controls(page, least_texts=20)
    if viewport == PHONE:
        page.click("#show-sidebar")
        check_texts_and_controls(page, least_texts=5)
        page.keyboard.press("Escape")
        assert page.is_hidden("#sidebar")
