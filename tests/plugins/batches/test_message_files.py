"""Files in the form of Anthropic's API: its client works with them, and they are those of OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from oaiserve.plugins.batches.message_files import MOST_IDS
from oaiserve.plugins.shared.store_options import StoreOptions
from tests.routes.asking import submitted
from tests.serving import Serve, Served

PATH = "/v1/files"
HEADERS = {"anthropic-version": "2023-06-01"}
NOTES = ("notes.md", b"The code is 4711.", "text/markdown")


@pytest.fixture
def sdk(served: Served) -> Iterator[Anthropic]:
    with served.anthropic() as sdk:
        yield sdk


def sent(served: Served, method: str, path: str = PATH, **request: Any) -> httpx.Response:
    return served.http.request(method, path, headers=HEADERS, **request)


def refusal(answer: httpx.Response, status: int = 400) -> str:
    """Return the message of a refusal in Anthropic's form."""
    body = answer.json()
    kind = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}[status]
    assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert answer.headers["request-id"] == body["request_id"]
    message: str = body["error"]["message"]
    return message


def test_anthropics_client_uploads_finds_reads_and_deletes_a_file(sdk: Anthropic) -> None:
    file = sdk.beta.files.upload(file=NOTES)
    assert (file.type, file.filename, file.mime_type, file.size_bytes) == ("file", "notes.md", "text/markdown", 17)
    assert file.downloadable
    assert file.expires_at is not None
    assert file.expires_at - file.created_at == timedelta(days=30), "as --response-store-seconds says"
    assert sdk.beta.files.retrieve_metadata(file.id) == file
    assert file in list(sdk.beta.files.list())
    assert sdk.beta.files.download(file.id).read() == NOTES[1]
    assert sdk.beta.files.delete(file.id).to_dict() == {"id": file.id, "type": "file_deleted"}
    for ask in (sdk.beta.files.retrieve_metadata, sdk.beta.files.download, sdk.beta.files.delete):
        with pytest.raises(anthropic.NotFoundError, match="it was deleted, or is too old"):
            ask(file.id)


def test_the_client_without_beta_gets_the_same(sdk: Anthropic) -> None:
    file = sdk.files.upload(file=NOTES)
    assert sdk.files.retrieve_metadata(file.id).to_dict() == sdk.beta.files.retrieve_metadata(file.id).to_dict()
    assert sdk.files.delete(file.id).type == "file_deleted"


@pytest.mark.plugin("messages")
def test_a_message_names_a_file_that_was_uploaded(served: Served, sdk: Anthropic) -> None:
    file = sdk.beta.files.upload(file=NOTES)
    source: Any = {"type": "file", "file_id": file.id}
    content: Any = [{"type": "document", "source": source}, {"type": "text", "text": "What is the code?"}]
    asked: Any = {"model": "org/demo", "messages": [{"role": "user", "content": content}]}
    sdk.beta.messages.create(max_tokens=5, betas=["files-api-2025-04-14"], **asked)
    assert "The code is 4711." in str(submitted(served)[1].messages)
    sdk.beta.files.delete(file.id)
    with pytest.raises(anthropic.BadRequestError, match="there is no file 'file-"):
        sdk.messages.create(max_tokens=5, **asked)


@pytest.mark.plugin("messages")
def test_a_message_that_names_a_pdf_is_refused_with_what_is_read(sdk: Anthropic) -> None:
    file = sdk.beta.files.upload(file=("a.pdf", b"%PDF-1.7\n\0", "application/pdf"))
    content: Any = [{"type": "document", "source": {"type": "file", "file_id": file.id}}]
    with pytest.raises(anthropic.BadRequestError, match="this server reads text, images and sounds"):
        sdk.messages.create(model="org/demo", max_tokens=5, messages=[{"role": "user", "content": content}])


def test_both_apis_have_the_same_files(served: Served, sdk: Anthropic) -> None:
    with served.sdk() as openai:
        of_openai = openai.files.create(file=("a.png", b"x"), purpose="vision")
        of_anthropic = sdk.beta.files.upload(file=NOTES)
        assert sdk.beta.files.retrieve_metadata(of_openai.id).mime_type == "image/png", "guessed from its name"
        assert openai.files.retrieve(of_anthropic.id).purpose == "user_data"
        assert openai.files.content(of_anthropic.id).content == NOTES[1]
        openai.files.delete(of_anthropic.id)
    assert of_openai.id in [file.id for file in sdk.beta.files.list()]
    assert of_anthropic.id not in [file.id for file in sdk.beta.files.list()]


def test_openais_answers_are_what_they_were(served: Served) -> None:
    upload = {"file": ("notes.md", b"x", "text/markdown"), "purpose": (None, "user_data")}
    made = served.http.post(PATH, files=upload).json()
    assert made.keys() == {"id", "bytes", "created_at", "filename", "purpose", "status", "object"}
    assert "must have the fields 'file' and 'purpose'" in served.http.post(PATH, files={"file": b"x"}).text


@pytest.mark.parametrize(
    ("file", "mime_type"),
    [
        (("a.bin", b"x", "Application/PDF; charset=x"), "application/pdf"),
        (("a.png", b"x", "no type"), "image/png"),
        (("a.unknown", b"x", "x" * 200 + "/y"), "application/octet-stream"),
        (("a.txt", b"x", "<b>/<script>"), "text/plain"),
    ],
)
def test_the_type_of_a_file_is_the_stated_one_or_that_of_its_name(
    served: Served, file: tuple[str, bytes, str], mime_type: str
) -> None:
    assert sent(served, "POST", files={"file": file}).json()["mime_type"] == mime_type


def test_a_shorter_life_is_not_promised(served: Served) -> None:
    form = {"file": NOTES, "expires_in_seconds": (None, "3600")}
    answer = sent(served, "POST", files=form)
    assert "fields other than 'file' and 'purpose' are left out" in answer.headers["x-oaiserve-adapted"]
    plain = sent(served, "POST", files={"file": NOTES}).json()
    assert answer.json()["expires_at"][:10] == plain["expires_at"][:10]


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"other": NOTES}, "must have the field 'file'"),
        ({"file": NOTES, "purpose": (None, "evals")}, "'purpose'"),
        ({"file": ("x" * 256, b"x")}, "at most 255 characters, got 256"),
        ({"file": ("x" * 9000, b"x")}, "headers are too long"),
    ],
)
def test_a_wrong_form_is_refused_in_anthropics_form(served: Served, form: dict[str, Any], reason: str) -> None:
    assert reason in refusal(sent(served, "POST", files=form))


def test_other_wrong_uploads_are_refused_in_anthropics_form(served: Served) -> None:
    assert "must be multipart/form-data" in refusal(sent(served, "POST", json={"file": "x"}))
    head = {**HEADERS, "content-type": "multipart/form-data; boundary=b"}
    cut = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nx'
    assert "cut off" in refusal(served.http.post(PATH, content=cut, headers=head))


@pytest.mark.parametrize("file_id", ["file-nothing", "x" * 3000, "%00", "%F0%9F%98%80", "'; DROP TABLE stored_files"])
def test_an_unknown_id_is_not_found(served: Served, file_id: str) -> None:
    for method in ("GET", "DELETE"):
        assert "There is no file" in refusal(sent(served, method, f"{PATH}/{file_id}"), 404)
    assert "There is no file" in refusal(sent(served, "GET", f"{PATH}/{file_id}/content"), 404)


def test_files_are_listed_in_pages(served: Served, sdk: Anthropic) -> None:
    known = len([*sdk.beta.files.list()])
    ids = [sdk.beta.files.upload(file=NOTES).id for _ in range(3)][::-1]
    assert [file.id for file in sdk.beta.files.list(limit=1)][:3] == ids, "it reads all pages"
    first = sent(served, "GET", params={"limit": 2, "beta": "true"}).json()
    assert ([file["id"] for file in first["data"]], first["has_more"]) == (ids[:2], True)
    assert (first["first_id"], first["last_id"]) == (ids[0], ids[1])
    # Older versions of the client name the last file instead of the page.
    for query in ({"page": first["next_page"]}, {"after_id": ids[1]}):
        rest = sent(served, "GET", params={"limit": 1000, **query}).json()
        assert (rest["data"][0]["id"], len(rest["data"])) == (ids[2], 1 + known)
        assert (rest["has_more"], rest["next_page"]) == (False, None)
    before = sent(served, "GET", params={"limit": 1, "before_id": ids[2]}).json()
    assert ([file["id"] for file in before["data"]], before["has_more"]) == ([ids[1]], True)
    some = sdk.beta.files.list(ids=[ids[2], "file-nothing", ids[0], ids[2]])
    assert [file.id for file in some] == [ids[2], ids[0]], "those that exist"


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ({"limit": 0}, "from 1 to 1000"),
        ({"limit": 1001}, "from 1 to 1000"),
        ({"page": "file-nothing"}, "must be the 'next_page' of a list"),
        ({"page": "page_file-nothing"}, "'page': there is no file 'file-nothing'"),
        ({"after_id": "file-nothing"}, "'after_id': there is no file"),
        ({"before_id": "file-nothing"}, "'before_id': there is no file"),
        ({"after_id": "a", "before_id": "b"}, "'before_id': is not allowed with 'after_id'"),
        ({"after_id": "a", "page": "page_b"}, "'page': is not allowed with 'after_id'"),
        ({"ids[]": [f"{number}" for number in range(MOST_IDS + 1)]}, "at most 100, got 101"),
        ({"ids[]": "a", "limit": 5}, "'limit': is not allowed with 'ids'"),
        ({"scope_id": "session"}, "this route takes limit"),
        ({"purpose": "batch"}, "this route takes limit"),
    ],
)
def test_a_wrong_page_is_refused(served: Served, query: dict[str, Any], reason: str) -> None:
    assert reason in refusal(sent(served, "GET", params=query))


def test_a_file_of_another_key_is_not_found(serve: Serve) -> None:
    served = serve(api_key=("one", "two"))
    with served.anthropic("one") as one, served.anthropic("two") as two:
        file = one.beta.files.upload(file=NOTES)
        for ask in (two.beta.files.retrieve_metadata, two.beta.files.download, two.beta.files.delete):
            with pytest.raises(anthropic.NotFoundError):
                ask(file.id)
        assert [*two.beta.files.list(), *two.beta.files.list(ids=[file.id])] == []
        assert [each.id for each in one.beta.files.list(ids=[file.id])] == [file.id]


def test_a_server_that_stores_nothing_says_so_in_anthropics_form(serve: Serve) -> None:
    served = serve(of_plugins=(StoreOptions(response_store_number=0),))
    for method in ("GET", "POST"):
        answer = sent(served, method, **({"files": {"file": NOTES}} if method == "POST" else {}))
        assert "--response-store-number 0" in refusal(answer)
    assert "param" in json.loads(served.http.get(PATH).text)["error"]
