"""Images and sounds of each API become parts of a prompt, with their files in the same order; nothing else is read."""

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from oaiserve.engine.request import ChatPrompt
from oaiserve.engine.types.media import MediaFile
from tests.missing_plugins import is_served
from tests.plain_http import Handler, running_http
from tests.routes.asking import CHAT, MESSAGES, RESPONSES
from tests.serving import Serve, Served

ONE, TWO, WAV = (b64encode(content).decode() for content in (b"first image", b"second image", b"a sound"))


@pytest.fixture
def served(serve: Serve) -> Served:
    return reading(serve())


def reading(served: Served) -> Served:
    served.engine.media = frozenset(("image", "audio"))
    return served


def data_url(content: str = ONE, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{content}"


def image(url: str = data_url(), **more: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts: object) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def prompt_of(served: Served, answer: httpx.Response) -> ChatPrompt:
    assert answer.status_code == 200, answer.text
    (prompt,) = served.engine.submitted.get().prompts
    assert isinstance(prompt, ChatPrompt)
    assert all(
        "file" not in part for message in prompt.messages for part in message["content"] if isinstance(part, dict)
    )
    return prompt


def refusal(answer: httpx.Response, param: str | None) -> str:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    message: str = error["message"]
    return message


def test_parts_of_chat_become_parts_of_the_prompt_and_files_in_the_same_order(served: Served) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    answer = served.chat(
        messages=[
            user(
                text("What"), image(detail="low"), {"type": "image_url", "image_url": data_url(TWO)}, text("is"), sound
            ),
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [image(detail="original"), text("seen")]},
        ],
    )
    prompt = prompt_of(served, answer)
    assert prompt.messages[0]["content"] == [
        text("What"),
        {"type": "image"},
        {"type": "image"},
        text("is"),
        {"type": "audio"},
    ]
    assert prompt.media == (
        MediaFile("image", ONE, "low", where="messages[0].content[1]"),
        MediaFile("image", TWO, where="messages[0].content[2]"),
        MediaFile("audio", WAV, where="messages[0].content[4]"),
        MediaFile("image", ONE, "high", where="messages[2].content[0]"),
    )
    assert prompt.messages[2]["content"] == [{"type": "image"}, text("seen")]


def test_a_template_that_takes_no_tools_gets_the_images_of_a_result_between_its_tags(serve: Serve) -> None:
    served = reading(serve(template="{{ messages }}"))
    calls = [{"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}} for name in "cd"]
    results = [{"role": "tool", "tool_call_id": name, "content": [image(), text("seen")]} for name in "cd"]
    prompt = prompt_of(
        served, served.chat(messages=[user(text("Hi")), {"role": "assistant", "tool_calls": calls}, *results])
    )
    one = [text("<tool_response>\n"), {"type": "image"}, text("seen"), text("\n</tool_response>")]
    assert prompt.messages[2] == {"role": "user", "content": [*one, text("\n"), *one]}
    assert [file.where for file in prompt.media] == ["messages[2].content[0]", "messages[3].content[0]"]


@pytest.mark.plugin("messages")
def test_blocks_of_messages_become_parts_with_results_before_what_is_said(served: Served) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ONE}}
    by_url = {"type": "image", "source": {"type": "url", "url": data_url(TWO)}}
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [by_url, text("done")], "is_error": True}
    turns = [user(text("Look"), block), {"role": "assistant", "content": [use]}, user(block, result)]
    prompt = prompt_of(served, served.post(MESSAGES, model="org/demo", messages=turns, max_tokens=9))
    assert [file.content for file in prompt.media] == [ONE, TWO, ONE]
    assert [file.where for file in prompt.media] == [
        "messages[0].content[1]",
        "messages[2].content[1].content[0]",
        "messages[2].content[0]",
    ]
    assert prompt.messages[0]["content"] == [text("Look"), {"type": "image"}]
    assert text("Error: ") in prompt.messages[2]["content"]
    assert served.post(f"{MESSAGES}/count_tokens", model="org/demo", messages=turns).status_code == 200


@pytest.mark.plugin("responses")
def test_input_images_of_responses_are_stored_and_there_again_in_the_next_turn(served: Served) -> None:
    parts = [{"type": "input_text", "text": "Hi"}, {"type": "input_image", "image_url": data_url(), "detail": "low"}]
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": data_url(TWO)}],
    }
    first = served.post(RESPONSES, input=[user(*parts), call, output])
    prompt = prompt_of(served, first)
    assert prompt.media == (
        MediaFile("image", ONE, "low", "input", "input[0].content[1]"),
        MediaFile("image", TWO, "auto", "input", "input[2].output[0]"),
    )
    stored = served.http.get(f"{RESPONSES}/{first.json()['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert stored[0]["content"][1] == parts[1]
    second = served.post(
        RESPONSES,
        input=[user({"type": "input_image", "image_url": data_url(WAV)})],
        previous_response_id=first.json()["id"],
    )
    following = prompt_of(served, second)
    assert [file.content for file in following.media] == [ONE, TWO, WAV]
    assert following.media[0].where == f"the stored item {stored[0]['id']}.content[1]"
    assert following.messages[: len(prompt.messages)] == prompt.messages
    counted = served.post(f"{RESPONSES}/input_tokens", input="Hi", previous_response_id=first.json()["id"])
    assert counted.status_code == 200


@pytest.mark.plugin("batches", "messages", "responses")
def test_files_that_were_uploaded_are_read_by_their_ids(served: Served) -> None:
    uploaded = served.sdk().files.create(file=("a.png", b"an image"), purpose="vision")
    part = {"type": "input_image", "file_id": uploaded.id}
    block = {"type": "image", "source": {"type": "file", "file_id": uploaded.id}}
    assert prompt_of(served, served.post(RESPONSES, input=[user(part)])).media[0].content == b"an image"
    if is_served(MESSAGES):
        answer = served.post(MESSAGES, model="org/demo", messages=[user(block)], max_tokens=9)
        assert prompt_of(served, answer).media[0].content == b"an image"
    served.sdk().files.delete(uploaded.id)
    assert "there is no file 'file-" in refusal(served.post(RESPONSES, input=[user(part)]), "input")


@pytest.fixture
def site() -> Iterator[tuple[str, list[str]]]:
    """Return the URL of a site whose images are their paths, or a number of bytes, and the list of requests to it."""
    paths: list[str] = []

    class Site(Handler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(404 if self.path == "/none" else 200)
            self.send_header("content-type", "image/png")
            self.end_headers()
            path = self.path[1:]
            self.wfile.write(bytes(int(path)) if path.isdigit() else self.path.encode())

    with running_http(Site) as url:
        yield url, paths


@pytest.mark.plugin("responses")
def test_urls_are_fetched_once_each_where_their_host_is_allowed(serve: Serve, site: tuple[str, list[str]]) -> None:
    url, fetched = site
    served = reading(serve(allow_media_from=(url.removeprefix("http://"),)))
    content = [image(f"{url}/a"), image(f"{url}/b"), image(f"{url}/a"), image()]
    assert [file.content for file in prompt_of(served, served.chat(messages=[user(*content)])).media] == [
        b"/a",
        b"/b",
        b"/a",
        ONE,
    ]
    assert sorted(fetched) == ["/a", "/b"]
    for part in ({"type": "input_image", "image_url": f"{url}/c"}, image(f"{url}/c")):
        first = served.post(RESPONSES, input=[user(part)])
        prompt_of(served, first)
        second = served.post(RESPONSES, input="And?", previous_response_id=first.json()["id"])
        assert [file.content for file in prompt_of(served, second).media] == [b"/c"]
    assert served.post("/tokenize", messages=[user(image(f"{url}/a"))]).status_code == 200
    refused = refusal(served.chat(messages=[user(image(f"{url}/none"))]), "messages")
    assert (
        refused
        == f"Invalid 'messages[0].content[0]': '{url}/none' is not fetched: its host answers with the status 404."
    )
    elsewhere = refusal(served.chat(messages=[user(image("http://10.0.0.1/x"))]), "messages")
    assert "--allow-media-from does not name its host, 10.0.0.1:80" in elsewhere
    fetched.clear()
    served.engine.media = frozenset(("audio",))
    assert "reads text and sounds, no images" in refusal(served.chat(messages=[user(image(f"{url}/a"))]), "messages")
    served.engine.media = frozenset()
    assert "reads text alone, no images" in refusal(served.chat(messages=[user(image(f"{url}/a"))]), "messages")
    assert fetched == []


def test_without_the_flag_nothing_is_fetched(served: Served) -> None:
    message = refusal(served.chat(messages=[user(image("https://a.test/x"))]), "messages")
    assert message.startswith(
        "Invalid 'messages[0].content[0]': this server fetches nothing: it runs without --allow-media-from."
    )


def test_files_that_are_only_named_have_together_at_most_the_bytes_of_a_body(
    serve: Serve, site: tuple[str, list[str]]
) -> None:
    url, _ = site
    served = reading(serve(allow_media_from=(url.removeprefix("http://"),), body_limit=1000))
    prompt = prompt_of(served, served.chat(messages=[user(image(f"{url}/400"), image(f"{url}/600"))]))
    assert [file.content for file in prompt.media] == [bytes(400), bytes(600)]
    message = refusal(served.chat(messages=[user(image(f"{url}/401"), image(f"{url}/600"))]), None)
    assert message == "The files that the request names have more than 1000 bytes (--body-limit)."


@pytest.mark.parametrize(
    ("given", "content", "note"),
    [
        ("data:;base64,aGVsbG8=", "aGVsbG8=", ""),
        ("data:application/octet-stream;BASE64,aGVs\nbG8", "aGVs\nbG8", ""),
        ("data:text/plain;base64,aGVsbG8=", "aGVsbG8=", ""),
        ("data:image/png,%89PNG", b"\x89PNG", ""),
        ("data:image/png;base64,-_-_", "-_-_", "base64 in the alphabet for URLs is read"),
        ("iVBORw0KGgo=", "iVBORw0KGgo=", "base64 without a data URL is read as an image"),
    ],
)
def test_a_file_in_the_body_is_read_in_every_form(served: Served, given: str, content: str | bytes, note: str) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": given.replace("image/", "audio/"), "format": "wav"}}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": given}}
    for path, body in (
        (CHAT, {"messages": [user(image(given))]}),
        (RESPONSES, {"input": [user({"type": "input_image", "image_url": given})]}),
        (MESSAGES, {"model": "org/demo", "messages": [user(block)], "max_tokens": 9}),
        (CHAT, {"messages": [user(sound)]}),
    ):
        if not is_served(path):
            continue
        answer = served.post(path, **body)
        assert prompt_of(served, answer).media[0].content == content
        is_image_url = "without" not in note or path != MESSAGES
        if is_image_url and b"input_audio" not in answer.request.content:
            assert note in answer.headers.get("x-oaiserve-adapted", "")
            assert bool(note) == ("x-oaiserve-adapted" in answer.headers)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png", "must be a URL with data:image/...;base64, or http(s):, got 'data:image/png'"),
        ("data:video/mp4;base64,AA==", "got 'data:video/mp4;base64,AA=='"),
        ("data:audio/wav;base64,AA==", "must be a URL with data:image/"),
        ("file:///etc/passwd", "must be a URL with data:, http: or https:, got 'file:///etc/passwd'"),
        ("/etc/passwd", "must be a URL with data:, http: or https:"),
        ("", "must be"),
        ("data:", "must be a URL with data:image/"),
    ],
)
def test_what_is_no_image_is_refused_by_its_form(served: Served, url: str, words: str) -> None:
    for part in (image(url), {"type": "image_url", "image_url": url}):
        assert words in refusal(served.chat(messages=[user(part)]), "messages")


def sent(served: Served, path: str, *turns: list[str]) -> httpx.Response:
    """Send turns of the user with images by their URLs, each answered but the last one."""
    messages: list[dict[str, Any]] = []
    for urls in turns:
        if path == MESSAGES:
            parts: list[dict[str, Any]] = [{"type": "image", "source": _source(url)} for url in urls]
        else:
            parts = [{"type": "input_image", "image_url": url} if path == RESPONSES else image(url) for url in urls]
        messages += [user(*parts), {"role": "assistant", "content": "Seen."}]
    if path == RESPONSES:
        return served.post(path, input=messages[:-1])
    return served.post(path, model="org/demo", messages=messages[:-1], max_tokens=9)


def _source(url: str) -> dict[str, str]:
    base64 = url.partition(",")[2]
    return {"type": "base64", "data": base64} if base64 else {"type": "url", "url": url}


@pytest.mark.parametrize("is_named", [False, True])
def test_oldest_images_are_left_out_in_groups_so_that_several_turns_have_the_same_beginning(
    serve: Serve, site: tuple[str, list[str]], *, is_named: bool
) -> None:
    served = reading(serve(max_images=8, allow_media_from=(site[0].removeprefix("http://"),)))
    urls = [f"{site[0]}/{number}" if is_named else data_url(f"AAA{number}") for number in range(12)]
    numbers = []
    for number in range(7, 12):
        prompt = prompt_of(served, sent(served, CHAT, urls[:number], [urls[number]]))
        numbers.append(len(prompt.media))
    assert numbers == [8, 7, 8, 7, 8]
    assert len(prompt_of(served, sent(served, CHAT, urls[:1], urls[1:9])).media) == 8  # all that are in the last turn


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("is_named", [False, True])
def test_oldest_images_beyond_the_limit_are_left_out_but_none_that_is_asked_about(
    serve: Serve, site: tuple[str, list[str]], path: str, *, is_named: bool
) -> None:
    served = reading(serve(max_images=2, allow_media_from=(site[0].removeprefix("http://"),)))
    first, second, third = (f"{site[0]}/{name}" if is_named else data_url(name) for name in ("aaaa", "bbbb", "cccc"))
    response = sent(served, path, [first, second], [third])
    prompt = prompt_of(served, response)
    assert prompt.messages[0]["content"] == [text("[Image left out]"), {"type": "image"}]
    assert [file.content for file in prompt.media] == ([b"/bbbb", b"/cccc"] if is_named else ["bbbb", "cccc"])
    assert "[0].content[0]: " in response.headers["x-oaiserve-adapted"]
    assert len(prompt_of(served, sent(served, path, [first], [second, third])).media) == 2
    too_many = sent(served, path, [first, second, third])
    assert "at most 2" in refusal(too_many, None if is_named else "input" if path == RESPONSES else "messages")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system", "content": [image()]},
        user({"type": "file", "file": {"file_id": "x"}}),
        user({"type": "file", "file": {"filename": "a.pdf", "file_data": data_url("JVBERi0xLjQK", "application/pdf")}}),
        user({"type": "input_file", "filename": "a.pdf", "file_data": "JVBERi0xLjQK"}),
        user({"type": "input_audio", "input_audio": {"data": WAV, "format": "ogg"}}),
        user({"type": "image_url", "image_url": {}}),
    ],
)
def test_what_the_user_now_asks_about_is_refused_if_it_is_not_read(served: Served, message: dict[str, Any]) -> None:
    refusal(served.chat(messages=[message]), "messages")
    old = served.chat(messages=[message, {"role": "assistant", "content": "No."}, user(text("Why?"))])
    assert message["role"] == "system" or "left out" in old.headers["x-oaiserve-adapted"]


@pytest.mark.plugin("responses")
def test_old_images_are_left_out_for_a_model_of_text_and_where_they_are_gone(
    serve: Serve, site: tuple[str, list[str]]
) -> None:
    url, _ = site
    answer = {"role": "assistant", "content": [text("Seen."), image()]}
    for served in (serve(), reading(serve(allow_media_from=(url.removeprefix("http://"),)))):
        for medium in (image(f"{url}/none"), {"type": "input_image", "image_url": f"{url}/none"}):
            turns = [user(text("Look"), medium), answer, user(text("And?"))]
            for response in (served.chat(messages=turns), served.post(RESPONSES, input=turns)):
                prompt = prompt_of(served, response)
                assert prompt.messages[0]["content"] == [text("Look"), text("[Image left out]")]
                assert prompt.messages[1]["content"][1] == text("[Image left out]")
                assert "[0].content[1]: " in response.headers["x-oaiserve-adapted"]
            refusal(served.chat(messages=[user(medium)]), "messages")
            if is_served(MESSAGES):
                prompt = prompt_of(served, sent(served, MESSAGES, [f"{url}/none"], []))
                assert prompt.messages[0]["content"] == "[Image left out]"


@pytest.mark.plugin("messages")
def test_image_in_a_result_that_cannot_be_fetched_is_left_out(serve: Serve, site: tuple[str, list[str]]) -> None:
    served = reading(serve(allow_media_from=(site[0].removeprefix("http://"),)))
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    gone = {"type": "image", "source": {"type": "url", "url": f"{site[0]}/none"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [gone]}
    turns = [user(text("Look")), {"role": "assistant", "content": [use]}, user(result)]
    response = served.post(MESSAGES, model="org/demo", messages=turns, max_tokens=9)
    assert prompt_of(served, response).messages[-1]["content"] == "[Image left out]"
    assert "messages[2].content[0].content[0]: image is left out" in response.headers["x-oaiserve-adapted"]
