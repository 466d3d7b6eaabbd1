"""Uploaded files keep their names and contents, whatever client writes the form, and hostile forms cost little."""

import gzip
import hashlib
import json
import os
import random
import tempfile
import time
import tracemalloc
from contextlib import ExitStack, closing
from email.mime.multipart import MIMEMultipart
from http.client import HTTPConnection
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.concurrency import run_in_threadpool

from oaiserve.config import Bytes
from oaiserve.errors import InvalidRequest
from oaiserve.plugins.batches import routes as batch_routes
from oaiserve.plugins.batches.form import UploadForm
from oaiserve.plugins.batches.objects import Line, LineError, LineReader
from oaiserve.plugins.batches.store import MOST_ARRIVING, PIECE_BYTES, BatchStore
from oaiserve.plugins.shared.store_options import StoreLimits, StoreOptions
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.intake import receive as body
from tests.serving import Serve, Served
from tests.world.loop import World
from tests.world.serving import WorldServed

NAME = "Übersicht.jsonl"
TYPE = "multipart/form-data; boundary=b"
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


def _parts(content_type: str, body: bytearray, piece_bytes: int = 2**16) -> tuple[str, str, bytes]:
    """Return the purpose, the name and the content of an upload that arrives in pieces."""
    with TemporaryFile() as content:
        form = UploadForm(content_type, content)
        for start in range(0, len(body), piece_bytes):
            form.feed(bytes(body[start : start + piece_bytes]))
        form.end(Adaptations())
        content.seek(0)
        return form.purpose, form.filename, content.read() if form.num_bytes < 2**20 else b""


def lines_of(content: bytes, endpoint: str, piece_bytes: int = 2**16) -> tuple[list[Line], list[LineError]]:
    reader = LineReader(endpoint, 2**20)
    for start in range(0, len(content), piece_bytes):
        reader.feed(content[start : start + piece_bytes])
    return reader.end()


def form(disposition: bytes, content: bytes = b"{}", headers: bytes = b"") -> bytearray:
    head = b"--b\r\nContent-Disposition: form-data; " + disposition + b"\r\n" + headers
    return bytearray(PURPOSE + head + b"\r\n" + content + b"\r\n--b--\r\n")


CONTENTS = [b"", b"{}", b"{}\n", b"\n\n{}\n--\n--c\n\r\n", b"a\rb\n-\n--", bytes(range(256)) * 300]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("piece_bytes", [1, 3, 1000, 2**20])
def test_a_form_whose_lines_end_in_lf_has_the_same_content(content: bytes, piece_bytes: int) -> None:
    head = PURPOSE + b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\nX-Any: 1\r\n\r\n'
    body = head.replace(b"\r\n", b"\n") + content + b"\n--b--\n"
    assert _parts(TYPE, bytearray(body), piece_bytes) == ("batch", "f", content)
    with_crlf = head + content + b"\r\n--b--\r\n"
    assert _parts(TYPE, bytearray(with_crlf), piece_bytes) == ("batch", "f", content)


def test_a_form_whose_lines_end_in_lf_is_refused_where_it_is_cut_or_endless() -> None:
    body = form(b'name="file"').replace(b"\r\n", b"\n")
    for wrong in (body[:-9], body[:40], b"--b\n" + b"x" * 2**17, b"--b\n"):
        with pytest.raises(InvalidRequest, match="The form"):
            _parts(TYPE, bytearray(wrong))


@pytest.mark.parametrize(
    "filename",
    [
        f'filename="{NAME}"'.encode(),
        f'filename="{NAME}"'.encode("latin-1"),
        b"filename*=UTF-8''%C3%9Cbersicht.jsonl",
        b"filename*=utf-8'de'%C3%9Cbersicht.jsonl",
        b"filename=\"ubersicht.jsonl\"; filename*=UTF-8''%C3%9Cbersicht.jsonl",
        b"filename*=no-charset''x; filename=\"" + NAME.encode() + b'"',
        f"filename={NAME}".encode(),
        f'\r\n filename="{NAME}"'.encode(),
        f'FILENAME = "{NAME}"'.encode(),
    ],
)
def test_a_name_arrives_however_it_is_encoded(filename: bytes) -> None:
    for disposition in (b'name="file"; ' + filename, filename + b'; name="file"', b"name=file; " + filename):
        assert _parts(TYPE, form(disposition)) == ("batch", NAME, b"{}")


@pytest.mark.parametrize(
    ("filename", "shown"),
    [
        (rb'filename="a\"b;c.jsonl"', 'a"b;c.jsonl'),
        (b'filename="a%22b%25.jsonl"', 'a"b%25.jsonl'),
        (rb'filename="C:\files\a.jsonl"', r"C:\files\a.jsonl"),
        (b'filename="a\x1b[31m.jsonl"', "a\N{REPLACEMENT CHARACTER}[31m.jsonl"),
        (b'filename=""', "file"),
        (b"x=y", "file"),
        (b'filename="' + b"x" * 255 + b'"', "x" * 255),
    ],
)
def test_odd_names_are_read_as_browsers_write_them(filename: bytes, shown: str) -> None:
    assert _parts(TYPE, form(b'name="file"; ' + filename))[1] == shown


@pytest.mark.parametrize("kind", ["message/rfc822", "message/delivery-status", "multipart/mixed; boundary=c", "x"])
def test_a_part_of_any_type_is_stored_as_it_is(served: Served, kind: str) -> None:
    nested = MIMEMultipart(boundary="c").as_bytes() + b"--c\r\n\r\nx\r\n--c--\r\n"
    answer = served.http.post("/v1/files", data={"purpose": "user_data"}, files={"file": (NAME, nested, kind)})
    assert (answer.status_code, answer.json()["filename"]) == (200, NAME)
    assert served.http.get(f"/v1/files/{answer.json()['id']}/content").content == nested


@pytest.mark.parametrize("purpose", ["assistants", "user_data", "vision"])
def test_a_file_for_prompts_may_have_any_of_openai_s_purposes_for_it(served: Served, purpose: str) -> None:
    # Vercel's AI SDK uploads with "assistants" by default.
    uploaded = served.http.post("/v1/files", data={"purpose": purpose}, files={"file": ("notes.txt", b"x")})
    assert (uploaded.status_code, uploaded.json().get("purpose")) == (200, purpose)
    listed = served.http.get("/v1/files", params={"purpose": purpose}).json()
    assert uploaded.json()["id"] in [file["id"] for file in listed["data"]]


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=300) | st.text("\r\n-b:", max_size=40).map(str.encode))
def test_the_content_of_a_file_arrives_as_it_is(content: bytes) -> None:
    sent = httpx.Request("POST", "http://x", data={"purpose": "batch"}, files={"file": ("a.jsonl", content)})
    assert _parts(sent.headers["content-type"], bytearray(sent.read())) == ("batch", "a.jsonl", content)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (form(b'name="file"')[:-9], "cut off"),
        (PURPOSE + form(b'name="file"'), "two fields of one name"),
        (b"--c\r\n", "does not have its boundary"),
        (b"", "does not have its boundary"),
        (form(b'name="file"; filename="' + b"x" * 256 + b'"'), "at most 255 characters, got 256"),
        (form(b'name="file"; filename="' + b"x" * 9000 + b'"'), "headers are too long"),
        (
            b"".join(b'--b\r\ncontent-disposition: form-data; name="%d"\r\n\r\n\r\n' % n for n in range(40)),
            "32 fields",
        ),
        (b"--b\r\ncontent-disposition: attachment; name=file\r\n\r\n", "Content-Disposition .*: Wrong type"),
        (b"--b\r\ncontent-type: text/plain\r\n\r\n", "missing Content-Disposition"),
        (form(b'name="other"'), "must have the fields 'file' and 'purpose'"),
        (form(b'name="file"', b"x", b"content-transfer-encoding: base64\r\n"), "content-transfer-encoding"),
    ],
)
def test_a_form_that_is_wrong_is_refused_with_the_reason(sent: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        _parts(TYPE, bytearray(sent))
    with pytest.raises(InvalidRequest, match="boundary"):
        _parts("multipart/form-data", bytearray(sent))


@pytest.mark.parametrize("unit", [b"\n", b"\r\n", b"\r\n--b", b"\r\n--b\r\n\r\n", b"--b: x\r\n", b'; a*0="b'])
@pytest.mark.parametrize("place", ["content", "preamble", "head"])
def test_hostile_forms_take_little_time_and_no_more_memory(unit: bytes, place: str) -> None:
    junk = unit * (2**23 // len(unit))
    sent = {
        "content": form(b'name="file"', junk),
        "preamble": bytearray(junk) + form(b'name="file"'),
        "head": form(b'name="file"' + junk),
    }[place]
    tracemalloc.start()
    began = time.thread_time()
    try:
        _parts(TYPE, sent)
    except InvalidRequest:
        pass
    finally:
        seconds = time.thread_time() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (seconds < 2, peak < 2**20) == (True, True)


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 64])
def test_a_form_is_read_alike_wherever_its_pieces_end(piece_bytes: int) -> None:
    header = b"Content-Transfer-Encoding: 8bit\r\n"
    body = form(f'name="file";\r\n filename="{NAME}"'.encode(), b"a\r\n-", header)
    assert _parts(TYPE, body, piece_bytes) == ("batch", NAME, b"a\r\n-")


def posting(served: Served) -> HTTPConnection:
    """Return a connection that begins to upload."""
    connection = HTTPConnection("localhost")
    connection.sock = served.connect()
    connection.putrequest("POST", "/v1/files")
    return connection


def announced(served: Served, head: bytes, **headers: str) -> tuple[int, str]:
    """Send the head of an upload of 60 MiB, and the beginning of its body; return the answer, which comes before."""
    connection = posting(served)
    for name, value in {"content-type": TYPE, "content-length": f"{60 * 2**20}", **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    connection.send(head)
    with closing(connection), closing(connection.getresponse()) as answer:
        return answer.status, answer.read().decode()


@pytest.mark.parametrize(
    ("head", "headers", "status", "reason"),
    [
        (PURPOSE.replace(b"batch", b"evals") + b"--b\r\n", {}, 400, "'assistants', 'batch', 'vision' or 'user_data'"),
        (PURPOSE + b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n\xff\xfe{\0', {}, 400, "in UTF-8"),
        (b"", {"content-length": f"{65 * 2**20}"}, 413, "too large"),
        (b"", {"content-type": "application/json"}, 400, "must be multipart/form-data"),
        (b"x" * 9000 + b"\r\n--c\r\n", {"content-type": "multipart/form-data"}, 400, "must have a boundary"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_it_has_arrived(
    served: Served, head: bytes, headers: dict[str, str], status: int, reason: str
) -> None:
    answer = announced(served, head, **headers)
    assert (answer[0], reason in answer[1]) == (status, True)


def test_a_file_that_finds_no_room_is_refused_before_it_has_arrived(serve: Serve) -> None:
    assert announced(serve(of_plugins=(StoreOptions(response_store_bytes=Bytes(2**20)),)), b"")[0] == 400


@pytest.mark.parametrize("coding", ["gzip", ""])
def test_a_large_upload_takes_no_memory_and_comes_back_as_it_was(served: Served, coding: str) -> None:
    content = random.Random(1).randbytes(2**20) * 24
    sent = httpx.Request("POST", "http://x", data={"purpose": "user_data"}, files={"file": ("a", content)})
    body = gzip.compress(sent.read(), 1) if coding else sent.read()
    headers = {"content-type": sent.headers["content-type"], **({"content-encoding": coding} if coding else {})}
    pieces = (body[start : start + 2**16] for start in range(0, len(body), 2**16))
    tracemalloc.start()
    try:
        answer = served.http.post("/v1/files", content=pieces, headers=headers)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (answer.status_code, answer.json()["bytes"]) == (200, len(content))
    assert peak < 4 * 2**20
    digest = hashlib.sha256()
    with served.http.stream("GET", f"/v1/files/{answer.json()['id']}/content") as answered:
        for part in answered.iter_raw():
            digest.update(part)
    assert digest.digest() == hashlib.sha256(content).digest()
    assert served.http.delete(f"/v1/files/{answer.json()['id']}").status_code == 200


def test_uploads_that_arrive_are_limited_and_leave_their_places(served: WorldServed) -> None:
    assert announced(served, PURPOSE.replace(b"batch", b"evals") + b"--b\r\n")[0] == 400
    with ExitStack() as stack:
        connections = [stack.enter_context(closing(posting(served))) for _ in range(MOST_ARRIVING + 1)]
        for connection in connections:
            connection.putheader("content-type", TYPE)
            connection.putheader("content-length", "100")
            connection.endheaders()
        served.settle()
        (refused,) = [connection for connection in connections if connection.sock.has_arrived]
        assert refused.getresponse().status == 429
    answer = served.http.post("/v1/files", data={"purpose": "user_data"}, files={"file": b"x"})
    assert answer.status_code == 200


def test_unknown_fields_are_noted(served: Served) -> None:
    data = {"purpose": "user_data", "expires_after[anchor]": "created_at"}
    answer = served.http.post("/v1/files", data=data, files={"file": ("a", b"x")})
    assert answer.headers["x-oaiserve-adapted"] == "form: fields other than 'file' and 'purpose' are left out"


def test_a_full_disk_is_named_with_what_was_to_be_kept(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    full = "/dev/full"
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: open(full, "w+b", buffering=0))  # noqa: SIM115
    large = b"x" * (PIECE_BYTES + 1)
    answer = served.http.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("a", large)})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "store of responses, conversations, files and batches failed" in answer.json()["error"]["message"]


def test_a_small_upload_needs_neither_a_file_nor_another_thread_until_it_is_stored(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    hops: list[Any] = []
    open_file = TemporaryFile

    def counted_file(**options: Any) -> Any:
        opened.append(options)
        return open_file(**options)

    async def counted_hop(work: Any, *values: Any) -> Any:
        hops.append(work)
        return await run_in_threadpool(work, *values)

    monkeypatch.setattr(tempfile, "TemporaryFile", counted_file)
    monkeypatch.setattr(body, "run_in_threadpool", counted_hop)
    monkeypatch.setattr(batch_routes, "run_in_threadpool", counted_hop)
    for num_bytes, is_small in ((1, True), (4096, True), (PIECE_BYTES + 1, False)):
        content = os.urandom(num_bytes)
        answer = served.http.post("/v1/files", data={"purpose": "user_data"}, files={"file": ("a", content)})
        assert served.http.get(f"/v1/files/{answer.json()['id']}/content").content == content
        assert (not opened, not hops) == (is_small, is_small)


def test_a_server_that_is_killed_in_an_upload_leaves_no_file(tmp_path: Path, world: World) -> None:
    store = BatchStore(tmp_path / "store.db", StoreLimits(1, 10**6, 3600.0), world)
    names = {path.name for path in tmp_path.iterdir()}
    with store.new_content() as content:
        content.write(b"x" * 10**6)
        content.flush()
        assert {path.name for path in tmp_path.iterdir()} == names
        assert os.fstat(content.fileno()).st_mode & 0o777 == 0o600
    world.run_until_complete(store.close())


LINES: list[dict[str, Any]] = [
    {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ä"}} for number in (1, 2)
]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\r\n \r\n", "\n\ufeff"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\r\n\r\n"])
def test_the_lines_of_a_batch_are_read_as_editors_write_them(start: str, end: str) -> None:
    text = start + end.join(json.dumps(line, ensure_ascii=False) for line in LINES)
    lines, errors = lines_of(text.encode(), "/v1/completions")
    assert ([line.custom_id for line in lines], errors) == (["1", "2"], [])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_batch_in_another_encoding_is_refused(served: Served, encoding: str) -> None:
    file = ("a.jsonl", json.dumps(LINES[0]).encode(encoding))
    answer = served.http.post("/v1/files", data={"purpose": "batch"}, files={"file": file})
    assert (answer.status_code, "must be in UTF-8" in answer.text) == (400, True)
    assert served.http.post("/v1/files", data={"purpose": "user_data"}, files={"file": file}).status_code == 200


def test_a_file_of_empty_lines_is_no_batch() -> None:
    lines, errors = lines_of(b"\n" * 2**21, "/v1/completions")
    assert (lines, [error.code for error in errors]) == ([], ["too_many_requests"])
