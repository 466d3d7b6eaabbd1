"""Attacks by uploads: forms that cost much to read, large files, odd names, and files whose lines are hostile."""

from __future__ import annotations

import json
from collections.abc import Iterator

from tools.attack.attack import CHAT, FULL, Family, Number, Sent, Strike, outcomes, post, request

UPLOADS = Family("uploads", "bombs in grammars, regexes, parsers")
ANY = outcomes(200, 400, 413) | FULL
BODY_BYTES = 8 * 2**20
UNITS = (
    b"\n",
    b"\r\n",
    b"\r\n--b",
    b"\r\n--b\r\n\r\n",
    b"\r\n--b-",
    b"\r\n--bx",
    b"\r\n x",
    b"--b: x\r\n",
    b'; a*0="b',
    b"=",
)
KINDS = (b"message/rfc822", b"message/delivery-status", b"multipart/mixed; boundary=c")
DEEP = b"[" * 100_000 + b"]" * 100_000
BODIES = (
    *(DEEP, b'{"messages": %s}' % DEEP, b'{"messages": 1e400}', b'{"n": ' + b"9" * 400 + b"}", b"[]"),
    *(b'{"messages": "\xed\xa0\x80"}', b'{"messages": "\\ud83d"}', b'"' + b"x" * BODY_BYTES + b'"'),
)


def upload(content: bytes, name: bytes = b"a", head: bytes = b"", purpose: bytes = b"user_data") -> bytes:
    """Return the upload of a file. `head` are more headers of its field."""
    disposition = b"\r\n--b\r\nContent-Disposition: form-data; name="
    form = b'%b"purpose"\r\n\r\n%b%b"file"; filename="%b"\r\n%b\r\n' % (
        disposition[2:],
        purpose,
        disposition,
        name,
        head,
    )
    return post("/v1/files", form + content + b"\r\n--b--\r\n", {"content-type": "multipart/form-data; boundary=b"})


def filled(unit: bytes, num_bytes: int = BODY_BYTES) -> bytes:
    return unit * (num_bytes // len(unit))


@UPLOADS.burst("60 MiB each, twelve at once, half of them for a wrong purpose", ANY | outcomes("closed", "reset"), 12,
               limit_seconds=120, is_work=True)  # fmt: skip
def large_files(number: Number) -> Iterator[Sent]:
    for purpose in (b"user_data", b"evals") * number(12, 3):
        yield upload(bytes(60 * 2**20), purpose=purpose)


@UPLOADS.attack("5,000 files with names of 250 characters, and lists of them", ANY, limit_seconds=120, is_work=True)
async def many_names(strike: Strike) -> None:
    await strike.ask_all([upload(b"x", b"%04d" % n + b"n" * 246) for n in range(strike.number(5_000, 500))], 8)
    listed = await strike.ask(request("GET", "/v1/files?limit=1"))
    strike.check(len(json.loads(listed.body)["data"]) == 1, "a list of one file has more")


@UPLOADS.attack("files whose lines are hostile, and a batch of each", ANY, limit_seconds=120, is_work=True)
async def hostile_lines(strike: Strike) -> None:
    line = b'{"custom_id": "%d", "method": "POST", "url": "%b", "body": %b}\n'
    contents = [line % (0, CHAT.encode(), body) for body in BODIES]
    contents += [b"\n" * BODY_BYTES, b"{}\n" * 10**5, b"x" * 60 * 2**20, b'{"custom_id": "' + b"c" * 2**22 + b'"}']
    for content in contents:
        stored = await strike.ask(upload(content, purpose=b"batch"))
        if stored.status != 200:
            continue
        file_id = json.loads(stored.body)["id"]
        batch = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        for _ in range(strike.number(4, 2)):
            begun = await strike.ask(post("/v1/batches", batch))
            if begun.status == 200:
                await strike.ask(post(f"/v1/batches/{json.loads(begun.body)['id']}/cancel", b"{}"))
        await strike.ask(request("DELETE", f"/v1/files/{file_id}"))
