"""What the chat page stores in the browser: conversations, what happens where there is no room, other tabs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from tests.models.pictures import png
from tests.plugins.pages.chat_page import LAST, MODEL, Script, ask, ended, ready, send, settings, stored

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


@pytest.fixture
def page(scripted_page: Page) -> Page:
    return scripted_page


def reopen(page: Page) -> None:
    """Load the page again, and the newest conversation."""
    page.reload()
    ready(page).locator("#conversation-list .talk").first.click()


def test_conversations_stay_in_the_browser_and_can_be_found_renamed_exported_and_deleted(
    page: Page, script: Script
) -> None:
    settings(page, seed="3")
    script.answer("One.")
    send(page, "The first")
    page.click("#new-chat")
    assert page.locator("#turns li").count() == 0
    settings(page, seed="")
    script.answer("Two.")
    send(page, "The second")
    page.reload()
    ready(page)
    titles = page.locator("#conversation-list .talk")
    assert page.locator("#conversation-list h2").all_inner_texts() == ["Today"]
    assert titles.all_inner_texts() == ["The second", "The first"]
    page.fill("#search", "FIRST")
    assert titles.all_inner_texts() == ["The first"]
    titles.first.click()
    page.fill("#search", "")
    assert page.locator(".asked .text").all_inner_texts() == ["The first"]
    assert page.input_value("[name=seed]") == "3"
    page.click("[aria-label='Rename The first']", force=True)
    page.keyboard.type("Renamed")
    page.keyboard.press("Enter")
    assert titles.all_inner_texts() == ["The second", "Renamed"]
    with page.expect_download() as saved:
        page.click("[aria-label='Export Renamed']", force=True)
    assert saved.value.suggested_filename == "Renamed.md"
    assert saved.value.path().read_text().startswith("# Renamed\n\n## You\n\nThe first\n\n## tiny-coder\n\nOne.")
    page.click("[aria-label='Delete Renamed']", force=True)
    assert titles.all_inner_texts() == ["The second"]
    assert page.locator("#turns li").count() == 0
    assert len(stored(page)) == 1
    page.keyboard.press("Enter")  # on Undo
    assert titles.all_inner_texts() == ["The second", "Renamed"]
    assert page.evaluate("() => document.activeElement.textContent") == "Renamed"


def test_an_exported_chat_can_be_imported_with_all_its_versions(page: Page, script: Script, tmp_path: Path) -> None:
    script.answer("The first. --> <!-- ", "$x$")
    send(page, "One")
    page.click("[aria-label=Edit]", force=True)
    page.fill("#prompt", "Another")
    script.answer("The second.")
    page.click("#send")
    page.wait_for_selector(".asked .text:text-is('Another')")
    ended(page)
    assert page.locator(".talk").all_inner_texts() == ["Another"]  # named by its first message, which was edited
    with page.expect_download() as saved:
        page.click("[aria-label='Export Another']", force=True)
    (tmp_path / "notes.md").write_text("# Not a chat\n")
    (exported := tmp_path / "chat.md").write_text(saved.value.path().read_text())
    page.click("[aria-label='Delete Another']", force=True)

    page.set_input_files("#import", exported)
    page.wait_for_selector(".asked .text:text-is('Another')")
    assert page.inner_text(f"{LAST} .markdown") == "The second."
    page.click("[aria-label='Previous version']", force=True)
    page.wait_for_selector(".asked .text:text-is('One')")
    assert page.inner_text(f"{LAST} .markdown").startswith("The first. --> <!-- ")
    assert len(stored(page)) == 1
    page.set_input_files("#import", tmp_path / "notes.md")
    page.wait_for_selector("#problem:has-text('notes.md cannot be imported: it is not a chat')")
    assert len(stored(page)) == 1


def fill_storage(page: Page) -> None:
    page.evaluate("""() => {
      for (let size = 2 ** 22; size >= 1; size /= 2) {
        const at = localStorage.length;
        try { for (let i = at; i < at + 4; i++) localStorage.setItem(`x${i}`, "x".repeat(size)); } catch { continue; }
      }
    }""")


def test_full_storage_is_reported_once_older_answers_have_lost_their_shades(page: Page, script: Script) -> None:
    script.answer(*["word "] * 400)
    send(page, "Old")
    page.click("#new-chat")
    fill_storage(page)
    script.answer("Four ", "words ", "are ", "enough.")
    send(page)
    assert page.is_hidden("#problem")
    chats = sorted(stored(page), key=lambda chat: chat["title"])
    answers = [turn["answers"][0] for chat in chats for turn in chat["turns"]]
    assert [bool(answer["steps"][0]["tokens"]) for answer in answers] == [True, False]
    fill_storage(page)
    script.answer("More.")
    send(page)
    assert "no room for this chat" in page.inner_text("#problem")
    settings(page, system="Be kind. " * 500, kind="schema")
    assert page.is_visible("#schema")
    assert "no room for the settings" in page.inner_text("#problem")


def test_a_browser_without_room_for_pictures_keeps_the_rest_of_the_conversation(page: Page, script: Script) -> None:
    reads_pictures = MODEL | {"input_modalities": ["image", "text"]}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [reads_pictures]}))
    page.reload()
    ready(page).evaluate(
        "() => [21, 20, 19].forEach((size) => localStorage.setItem(`x${size}`, 'x'.repeat(2 ** size)))"
    )
    noise = png(Image.frombytes("RGB", (1000, 1000), random.Random(1).randbytes(3_000_000)))
    page.set_input_files("#attach", {"name": "n.png", "mimeType": "image/png", "buffer": noise})
    page.wait_for_selector("#attached img")
    script.answer("Noise.")
    send(page)
    assert "no room for this chat's pictures" in page.inner_text("#problem")
    assert page.locator(".asked img").count() == 1
    reopen(page)
    assert "n.png · this browser had no room for it" in page.inner_text(".asked")


def test_an_answer_goes_on_after_a_reload_and_grows_in_other_tabs(page: Page, script: Script) -> None:
    ask(page)
    script.say(content="One, ")
    page.wait_for_selector(f"{LAST} .markdown:has-text('One,')")
    other = page.context.new_page()
    other.goto(page.url)  # the address of the chat
    ready(other)
    other.wait_for_selector(f"{LAST} .markdown:has-text('One,')")  # stored while the stream is open
    other.fill("#prompt", "A draft")
    script.say(content="two.")
    page.wait_for_selector(f"{LAST} .markdown:has-text('One, two.')")
    page.reload()
    script.is_abandoned.wait()
    script.say(content=" Three.")
    script.end()
    page.wait_for_selector(f"{LAST} .markdown:has-text('One, two. Three.')")
    ended(page)
    assert page.inner_text(f"{LAST} .end") == ""
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "One, two."}]
    assert script.bodies[1]["messages"] == begun
    assert script.bodies[1]["continue_final_message"]
    other.wait_for_selector(f"{LAST} .markdown:has-text('One, two. Three.')")
    assert other.input_value("#prompt") == "A draft"


def second_tab(page: Page) -> Page:
    """Open the chat that this page shows in another tab, while an answer of it grows."""
    page.wait_for_function("Object.keys(localStorage).some((key) => key.startsWith('oaiserve-chat-'))")
    other = page.context.new_page()
    other.goto(page.url)
    ready(other)
    other.wait_for_selector(f"{LAST}[aria-busy=true]")
    return other


def test_an_answer_streams_in_two_tabs_and_either_stops_it(page: Page, script: Script) -> None:
    ask(page)
    script.say(content="One, ")
    other = second_tab(page)
    # Without the storage, only the tab that receives the answer can say what is new.
    page.evaluate("() => { Storage.prototype.setItem = () => {}; }")
    script.say(content="two, ")
    other.wait_for_selector(f"{LAST} .markdown:has-text('One, two,')")
    script.say(content="three")
    other.wait_for_selector(f"{LAST} .markdown:has-text('One, two, three')")
    assert other.inner_text(f"{LAST} .end") == ""
    assert other.get_attribute("#send", "aria-label") == "Stop"
    other.click("#send")
    script.is_abandoned.wait()
    page.wait_for_selector(f"{LAST} .end:has-text('Stopped by you.')")


def test_second_tab_has_the_whole_account_of_an_answer_at_its_end(page: Page, script: Script) -> None:
    ask(page)
    script.say(content="One, ")
    other = second_tab(page)
    script.answer("two, ", "three.")
    ended(page)
    ended(other)
    assert other.get_attribute("#send", "aria-label") == "Send"
    (conversation,) = stored(other)
    assert len(conversation["turns"][0]["answers"][0]["steps"][0]["tokens"]) == 3
    script.answer("Four.")
    send(other, "And then?")
    page.wait_for_selector(".asked:has-text('And then?')")
    page.wait_for_selector(f"{LAST} .markdown:has-text('Four.')")


def test_second_tab_offers_to_continue_once_the_first_one_is_gone(page: Page, script: Script) -> None:
    ask(page)
    script.say(content="One, ")
    other = second_tab(page)
    # Make the tab as silent as one that was killed.
    page.evaluate("() => { Storage.prototype.setItem = BroadcastChannel.prototype.postMessage = () => {}; }")
    other.wait_for_selector(f"{LAST} .end:has-text('Not complete: the page was closed.')")
    page.goto("about:blank")
    script.is_abandoned.wait()
    script.answer("two.")
    other.click(f"{LAST} .end button:text-is('Continue')")
    other.wait_for_selector(f"{LAST} .markdown:has-text('One, two.')")


def test_each_chat_has_an_address_for_reload_and_back(page: Page, script: Script) -> None:
    script.answer("One.")
    send(page, "The first")
    first = page.url
    page.click("#new-chat")
    script.answer("Two.")
    send(page, "The second")
    assert page.url != first
    page.reload()
    assert ready(page).locator(".asked .text").all_inner_texts() == ["The second"]
    page.go_back()
    page.wait_for_selector(".asked:has-text('The first')")
    assert page.url == first
    assert len(script.bodies) == 2


def test_a_stopped_answer_goes_on_where_the_user_wants(page: Page, script: Script) -> None:
    ask(page)
    script.say(content="One, ")
    page.wait_for_selector(f"{LAST} .markdown:has-text('One,')")
    page.click("#send")
    ended(page)
    script.is_abandoned.wait()
    script.answer("two.")
    page.click(f"{LAST} .end button:text-is('Continue')")
    page.wait_for_selector(f"{LAST} .markdown:has-text('One, two.')")
    ended(page)
    assert page.locator("#turns li").count() == 1
    assert page.locator(f"{LAST} .end button").count() == 0
    page.click(f"{LAST} .account summary")
    page.wait_for_selector(f"{LAST} .why:has-text('These are the times since the answer went on.')")


def test_page_works_without_storage_and_says_that_chats_are_lost(page: Page, script: Script) -> None:
    page.add_init_script("""for (const name of ["localStorage", "sessionStorage"]) {
      Object.defineProperty(window, name, { get() { throw new DOMException("No", "SecurityError"); } });
    }""")
    page.reload()
    assert "does not allow this page to store anything" in ready(page).inner_text("#problem")
    script.say(content="Yes.")
    script.end()
    send(page)
    assert page.locator(".talk").all_inner_texts() == ["Hi"]


def test_a_conversation_of_an_earlier_version_is_readable(page: Page) -> None:
    message = {"content": "**Yes**", "reasoning": "", "calls": []}
    step = {"message": message, "tokens": [["**Yes**", 0, -0.1]], "eventsMs": [9], "phases": [["decode", 9]], "why": []}
    answers = [{"model": name, "asked": "temperature 0.7", "steps": [step]} for name in ("a", "b")]
    chosen = {"system": "", "temperature": "0.7", "max_completion_tokens": "512", "kind": "text", "models": ["a"]}
    turns = [{"text": "Old?", "files": [], "answers": answers}]
    old = {"id": "1", "title": "An old one", "changedMs": 0, "turns": turns, "settings": chosen}
    page.evaluate("old => localStorage.setItem('oaiserve-chat-1', JSON.stringify(old))", old)
    page.reload()
    page.click("text=An old one")
    assert page.locator("#turns strong").all_inner_texts() == ["Yes", "Yes"]
    assert page.locator("#turns .answered h2").all_text_contents() == ["a temperature 0.7", "b temperature 0.7"]
    assert page.input_value("[name=max_completion_tokens]") == "512"
