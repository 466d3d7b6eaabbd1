"""`LoadedModel`: a model with its engine process, and the app with its routes, which runs in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from oaiserve.config import Config
from oaiserve.engine.boundary import AnyEngine
from oaiserve.errors import APIError, StartupError
from oaiserve.routes.door.middleware import error_response, render_http_exception
from oaiserve.routes.door.own_requests import receiving
from oaiserve.routes.serving import Serving
from oaiserve.run import load_behind
from oaiserve.runtime import Runtime

log = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]


class Process(Protocol):
    """An engine process."""

    @property
    def pid(self) -> int: ...
    @property
    def is_alive(self) -> bool: ...
    def kill(self) -> None: ...


class LoadedModel:
    """A model that can take requests, until `end`."""

    def __init__(self, app: Starlette, engine: AnyEngine, num_bytes: Callable[[], int]) -> None:
        """`num_bytes` measures the memory of the engine processes, and raises OSError if one has just ended."""
        self.app = app
        self.engine = engine
        self._num_bytes = num_bytes
        self._is_ending = asyncio.Event()
        self._is_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_ended = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        return self._num_bytes()

    @property
    def serving(self) -> Serving:
        serving: Serving = self.app.state.serving
        return serving

    async def begin(self) -> None:
        """Start what the routes need. Raises the errors of plug-ins."""
        self._life = asyncio.create_task(self._live())
        await asyncio.wait({self._life, self._is_up}, return_when=asyncio.FIRST_COMPLETED)
        if self._life.done():
            await self._life

    async def _live(self) -> None:
        """Run the lifespan of the app. A single task enters and leaves it."""
        try:
            async with self.app.router.lifespan_context(self.app):
                self._is_up.set_result(None)
                await self._is_ending.wait()
        finally:
            self.has_ended.set()

    async def end(self) -> None:
        """End the engine process, and what the routes needed."""
        self.engine.drain()
        self._is_ending.set()
        if self._life is not None:
            await self._life

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has passed the middleware of the front. Raises the errors of the route."""
        await answer_by(self.app, scope, receive, send)

    async def get(self, scope: Scope, target: str, headers: Headers = ()) -> tuple[int, bytes]:
        """Return the status and the body of the answer to a GET request on behalf of another request, whose scope this
        is."""
        path, _, query = target.partition("?")
        scope = {**scope, "method": "GET", "path": unquote(path), "raw_path": path.encode()}
        scope |= {"query_string": query.encode(), "headers": [*scope["headers"], *headers]}
        scope["state"] = dict(scope["state"])
        status = 0
        body = bytearray()

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            body.extend(message.get("body", b""))

        try:
            await self.answer(scope, receiving(b""), send)
        except APIError as error:
            await error_response(error, scope)(scope, receiving(b""), send)
        return status, bytes(body)


async def answer_by(app: Starlette, scope: Scope, receive: Receive, send: Send) -> None:
    """Let the routes of an app answer a request that has passed the middleware of the front. Raises their errors."""
    scope = {**scope, "app": app}
    try:
        await app.router(scope, receive, send)
    except HTTPException as error:  # The handler of the front knows only its own routes.
        response = await render_http_exception(Request(scope), error)
        await response(scope, receive, send)


async def load(config: Config, front: Starlette, runtime: Runtime) -> LoadedModel:
    """Load a model in an engine process. A caller that is cancelled ends the process. Raises StartupError and
    OSError."""
    processes: list[Process] = []  # in the order in which they were started
    is_cancelled = False

    def launched(process: Process) -> None:
        processes.append(process)
        if is_cancelled:
            process.kill()

    in_thread = runtime.executor(f"load-{config.model_name}")
    loop = asyncio.get_running_loop()
    loading = loop.run_in_executor(in_thread, load_behind, config, front, launched)
    try:
        app, engine = await asyncio.shield(loading)
        loaded = LoadedModel(app, engine, partial(_num_bytes, processes))
        try:
            await loaded.begin()
        except BaseException:
            with suppress(Exception):  # It is the same error.
                await loaded.end()
            await loop.run_in_executor(in_thread, engine.stop)
            raise
        return loaded
    except asyncio.CancelledError:
        is_cancelled = True
        for process in processes:
            process.kill()
        with suppress(Exception):  # The process has ended while it loaded the model.
            _, engine = await loading
            await loop.run_in_executor(in_thread, engine.stop)
        raise
    except (StartupError, OSError):
        raise
    except Exception as error:  # It may be that of a plug-in, or of a library that read the files.
        log.exception("The model %s cannot be loaded", config.model_name)
        raise StartupError(f"{type(error).__name__}: {error}") from error
    finally:
        in_thread.shutdown(wait=False)


def _num_bytes(processes: list[Process]) -> int:
    """Return the memory of the processes: their private memory, and their shares of memory that others use, too."""
    pids = [process.pid for process in processes if process.is_alive]
    if not pids:
        raise ProcessLookupError("Another engine process is being started.")
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    lines = [line for text in texts for line in text.splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
