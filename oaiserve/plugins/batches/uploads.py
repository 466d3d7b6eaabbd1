"""Stores uploads and finds files, for the routes of both APIs."""

from __future__ import annotations

from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from oaiserve.errors import NotFound, Overloaded
from oaiserve.http.refusals import STORED_BYTE_NS, STORED_NS
from oaiserve.plugins.batches.form import UploadForm
from oaiserve.plugins.batches.objects import FileObject
from oaiserve.plugins.batches.state import runner_of
from oaiserve.plugins.batches.store import PIECE_BYTES
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.door.middleware import lasting_id
from oaiserve.routes.intake.invalid import show
from oaiserve.routes.intake.receive import (
    RETRY_AFTER_SECONDS,
    TOO_MANY_BODIES,
    announced_bytes,
    check_size,
    check_type,
    pass_body,
)
from oaiserve.routes.serving import MOST_FILE_BYTES

MOST_FORM_BYTES = 2**16  # bytes of a form in addition to its file, for a first check of its length


async def store_upload(request: Request, adaptations: Adaptations, *, of_anthropic: bool = False) -> FileObject:
    """Store the file of a form, and return it. Its content is written to the disk as it arrives. While other clients'
    requests are open, many uploads of one client are held back.

    Forms of Anthropic's clients need no purpose, and their files keep the media type that the form states."""
    runner = runner_of(request)
    store = runner.store
    owner = request.state.owner
    client = request.state.client
    num_announced = announced_bytes(request.headers)
    check_size(num_announced, MOST_FILE_BYTES)
    check_type(request, "multipart/form-data")
    await store.check_room(owner, max(0, num_announced - MOST_FORM_BYTES))
    too_many = Overloaded(TOO_MANY_BODIES, retry_after_seconds=RETRY_AFTER_SECONDS)
    if not store.arriving_files.take(client, 1):
        raise too_many
    taken = 0

    def feed(data: bytes) -> None:
        nonlocal taken
        form.feed(data)
        form.check_encoding()
        if not store.arriving_bytes.take(client, form.num_bytes - taken):
            raise too_many
        taken = form.num_bytes

    try:
        with store.new_content() as content:
            form = UploadForm(request.headers["content-type"], content, "user_data" if of_anthropic else None)
            await pass_body(request, runner.backend.bodies.received, MOST_FILE_BYTES, feed)
            form.end(adaptations)
            form.check_encoding()
            file = FileObject(
                id=f"file-{lasting_id(request)}",
                bytes=form.num_bytes,
                created_at=runner.backend.runtime.unix_ns() // 10**9,
                filename=form.filename,
                purpose=form.purpose,
                mime_type=form.media_type if of_anthropic and form.media_type else UNSET,
            )
            await store.add_file(owner, file, content)
            if file.bytes > PIECE_BYTES:
                await run_in_threadpool(content.close)  # This takes milliseconds for a large file.
    finally:
        store.arriving_bytes.give_back(client, taken)
        store.arriving_files.give_back(client, 1)
    if runner.backend.has_others(client):
        request.state.charged_ns = STORED_NS + STORED_BYTE_NS * file.bytes
    return file


async def file_in_path(request: Request) -> tuple[FileObject, int]:
    """Return the file whose id is in the path, and its number. Raises NotFound."""
    file_id = request.path_params["file_id"]
    file = await runner_of(request).store.file(request.state.owner, file_id)
    if file is None:
        raise NotFound(f"There is no file {show(file_id)}: it was deleted, or is too old.", param="file_id")
    return file
