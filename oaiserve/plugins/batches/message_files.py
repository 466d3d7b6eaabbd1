"""/v1/files in the form of Anthropic's API, for clients that send `anthropic-version`. The files are those of OpenAI's
form."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from mimetypes import MimeTypes
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.plugins.batches.anthropic_form import (
    AFTER_ID,
    BEFORE_ID,
    BETA,
    LIMIT,
    PAGE,
    read_page,
    rfc3339,
)
from oaiserve.plugins.batches.objects import FileObject
from oaiserve.plugins.batches.state import runner_of
from oaiserve.plugins.batches.uploads import file_in_path, store_upload
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.answer.paging import PAGE_PREFIX
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.intake.invalid import invalid
from oaiserve.routes.operation import Parameter, read_query

MOST_IDS = 100
IDS = Parameter("ids[]", f"With anthropic-version: only these files, at most {MOST_IDS}, without `limit` and pages.")
EDGES = tuple(replace(edge, meaning=f"With anthropic-version: {edge.meaning}") for edge in (AFTER_ID, BEFORE_ID, PAGE))
QUERY = (*EDGES, IDS)  # allowed besides LIMIT
_UNKNOWN_TYPE = "application/octet-stream"
_TYPES = MimeTypes()  # Python's own table. The system's tables differ between machines.


class FileMetadata(msgspec.Struct, kw_only=True):
    """A file, as clients of Anthropic's API get it. `expires_at` follows from --response-store-seconds."""

    id: str
    type: Literal["file"] = "file"
    filename: str
    mime_type: str
    size_bytes: int
    created_at: str
    expires_at: str
    downloadable: bool = True


class FileMetadataPage(msgspec.Struct):
    """Files, newest first, as clients of Anthropic's API get them."""

    data: list[FileMetadata]
    first_id: str | None
    last_id: str | None
    has_more: bool
    next_page: str | None


class DeletedFile(msgspec.Struct):
    """The file was deleted, as clients of Anthropic's API read it."""

    id: str
    type: Literal["file_deleted"] = "file_deleted"


async def upload(request: Request) -> Response:
    adaptations = Adaptations()
    file = await store_upload(request, adaptations, of_anthropic=True)
    return json_response(_shown(request, file), headers=adaptations.headers())


async def list_files(request: Request) -> Response:
    query = read_query(request.query_params, (LIMIT, *QUERY, BETA))
    store = runner_of(request).store
    owner = request.state.owner
    if ids := dict.fromkeys(request.query_params.getlist(IDS.name)):
        _check_ids(ids, query)
        files = [found[0] for file_id in ids if (found := await store.file(owner, file_id)) is not None]
        has_more = False
    else:
        files, has_more = await read_page(query, partial(store.files, owner, None), "file")
    first, last = (files[0].id, files[-1].id) if files else (None, None)
    next_page = f"{PAGE_PREFIX}{last}" if has_more and query["before_id"] is None else None
    shown = [_shown(request, file) for file in files]
    return json_response(FileMetadataPage(shown, first, last, has_more, next_page))


async def retrieve_file(request: Request) -> Response:
    return json_response(_shown(request, (await file_in_path(request))[0]))


async def delete_file(request: Request) -> Response:
    file, _ = await file_in_path(request)
    await runner_of(request).store.delete_file(request.state.owner, file.id)
    return json_response(DeletedFile(file.id))


def _check_ids(ids: dict[str, None], query: dict[str, Any]) -> None:
    if len(ids) > MOST_IDS:
        raise invalid("ids", f"must be at most {MOST_IDS}, got {len(ids)}")
    for other in (LIMIT, *EDGES):
        if query[other.name] is not None:
            raise invalid(other.name, "is not allowed with 'ids', whose files come in one page")


def _shown(request: Request, file: FileObject) -> FileMetadata:
    seconds = runner_of(request).backend.config.of(StoreOptions).response_store_seconds
    return FileMetadata(
        id=file.id,
        filename=file.filename,
        mime_type=file.mime_type or _TYPES.guess_type(file.filename)[0] or _UNKNOWN_TYPE,
        size_bytes=file.bytes,
        created_at=rfc3339(file.created_at),
        expires_at=rfc3339(file.created_at + int(seconds)),
    )
