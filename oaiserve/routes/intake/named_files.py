"""Reads the uploaded files that parts of messages and items name by `file_id`, so that the model sees their text."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from oaiserve.errors import InvalidRequest
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.last_turn import first_asked
from oaiserve.routes.intake.receive import HeldBytes
from oaiserve.routes.serving import serving_of

# The field of a part, by its type, with the object that names a file; "" if the part itself does.
_HOLDERS = {"input_file": "", "file": "file", "document": "source"}


async def read_files(request: Request, held: HeldBytes, body: object) -> int:
    """Put the content of each named file into its part of the body, and return their number of bytes, which are `held`.
    Raises InvalidRequest if a file of the user's last turn is missing, or if all together are too large, and Overloaded
    if clients have too many large bodies at once."""
    most_bytes = serving_of(request).body_limit
    num_bytes = 0
    where = ""

    def take(number: int) -> None:
        nonlocal num_bytes
        num_bytes += number
        if num_bytes > most_bytes:
            raise invalid(
                where.partition("[")[0], f"the files that it names have more than {most_bytes} bytes (--body-limit)"
            )
        held.take(number)

    for where, part, is_asked in _naming(body):
        try:
            content = await uploaded(
                request, part["file_id"], partial(invalid, where.partition("[")[0], where=where), take
            )
        except InvalidRequest:
            if is_asked or num_bytes > most_bytes:
                raise
            continue  # The part is left out of the prompt, with a note.
        part["file_data"] = await run_in_threadpool(_data_url, content)
    return num_bytes


async def uploaded(
    request: Request, file_id: str, refused: Callable[[str], InvalidRequest], take: Callable[[int], None]
) -> bytes:
    """Return the content of an uploaded file of the client. `take` gets its size before it is read, and may raise.
    Raises `refused` with the reason if there is none."""
    files = request.app.state.files
    stored = None if files is None else await files.file(request.state.owner, file_id)
    if stored is None:
        raise refused(f"there is no file {show(file_id)}: it was deleted, or is too old")
    file, number = stored
    take(file.bytes)
    return b"".join([part async for part in files.content(number)])


def _data_url(content: bytes) -> str:
    return f"data:text/plain;base64,{b64encode(content).decode()}"


def _naming(body: object) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield each part, or object in a part, that names a file, with its place and whether it is in the user's last
    turn."""
    for field in ("messages", "input"):
        entries = getattr(body, field, None)
        entries = entries if isinstance(entries, list) else []
        roles = [_field(entry, "role") for entry in entries]
        first = first_asked(roles)
        for number, entry in enumerate(entries):
            is_asked = number >= first and roles[number] in ("user", "system", "developer")
            for where, holder in _within(entry, f"{field}[{number}]"):
                yield where, holder, is_asked and where.count(".content[") == 1


def _field(entry: object, name: str) -> Any:
    return entry.get(name) if isinstance(entry, dict) else getattr(entry, name, None)


def _within(entry: object, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("content", "output"):
        parts = _field(entry, name)
        for place, part in enumerate(parts if isinstance(parts, list) else ()):
            if not isinstance(part, dict):
                continue
            inner = _HOLDERS.get(str(part.get("type")))
            holder = part if inner == "" else part.get(inner or "")
            path = f"{where}.{name}[{place}]"
            if isinstance(holder, dict) and isinstance(holder.get("file_id"), str) and "file_data" not in holder:
                yield ".".join(filter(None, (path, inner, "file_id"))), holder
            if part.get("type") == "tool_result":
                yield from _within(part, path)
