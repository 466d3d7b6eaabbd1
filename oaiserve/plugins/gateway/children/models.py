"""`ChildModels` loads and unloads the models of a gateway's child processes, as memory and time permit.

All of it runs on the event loop, so a state changes only where something is awaited.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import sleep
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import ceil

from oaiserve.commands.server_process import ServerProcess
from oaiserve.config import Config
from oaiserve.engine.pooling import Task
from oaiserve.errors import ModelNotFound, StartupError, Unavailable, invalid
from oaiserve.plugins.gateway.children.hang_clock import LOOK_SECONDS, HangClock
from oaiserve.plugins.gateway.options import ModelsOptions
from oaiserve.wire.address import Address

log = logging.getLogger(__name__)

LEAST_PAUSE_SECONDS = 1.0  # after a failed load, before the next one
MOST_PAUSE_SECONDS = 60.0
LEAST_RETRY_SECONDS = 5  # Clients of a model that hangs wait at least so long.
STABLE_SECONDS = 60.0  # A process that has run for longer starts again without a pause.


@dataclass(slots=True)
class Model:
    name: str
    config: Config
    address: Address  # where its process listens
    num_bytes: int  # memory when it is loaded; before the first load, the size of its files
    task: Task | None = None  # by its settings or files; None if these are not on this disk yet
    process: ServerProcess | None = None  # set while it takes requests
    starting: ServerProcess | None = None  # set from its start until it can take requests
    hang_clock: HangClock | None = None  # It watches the process.
    num_hangs: int = 0
    loading: asyncio.Task[None] | None = None
    num_users: int = 0  # requests for it that have not ended
    used_ns: int = 0  # time at which a request last ended
    is_leaving: bool = False  # It is unloaded for another model once it has no users. New requests wait.
    num_failures: int = 0  # failed loads in a row
    num_crashes: int = 0  # ends of its process soon after a load, in a row
    failure: str = ""  # message of the last failure
    retry_ns: int = 0
    num_loads: int = 0
    free: asyncio.Event = field(default_factory=asyncio.Event)  # set while it has no users


class ChildModels:
    """The models of a gateway's child processes. The loaded ones are a source of replicas for the gateway."""

    name = "the processes of models"

    def __init__(
        self,
        models: Iterable[Model],
        options: ModelsOptions,
        start: Callable[[Config, Address], Awaitable[ServerProcess]],
        changed: Callable[[], Awaitable[None]],
        reported: Callable[[str], Iterable[str]],
        hangs: Callable[[str], bool],
        clock_ns: Callable[[], int],
    ) -> None:
        """`start` starts a process. `changed` is called when one begins or stops taking requests; a request for it is
        sent after that has returned. `reported` returns the models and adapters that a replica has reported, and
        `hangs` whether it gives no reports."""
        self.models = {model.name: model for model in models}
        self._of = {
            name: model
            for model in self.models.values()
            for name in (*model.config.accepted_names, *model.config.engine.adapters)
        }
        self._options = options
        self._start = start
        self._changed = changed
        self._reported = reported
        self._hangs = hangs
        self._clock_ns = clock_ns
        self._room = asyncio.Lock()  # Models make room and load one by one.
        self._ending: set[ServerProcess] = set()  # They take no more requests, and need memory until they have ended.
        self._watching: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.is_draining = False  # set by a signal handler: processes that end are started again only for requests

    @property
    def names(self) -> Iterable[str]:
        """Return the names of all models, and of the adapters in their settings."""
        configs = [model.config for model in self.models.values()]
        return [name for config in configs for name in (*config.model_names, *config.engine.adapters)]

    async def addresses(self) -> list[Address]:
        return [model.address for model in self._loaded]

    @property
    def _loaded(self) -> list[Model]:
        return [model for model in self.models.values() if model.process is not None]

    @property
    def hung(self) -> list[Model]:
        return [model for model in self._loaded if self._hangs(model.address.name)]

    def _model(self, name: str) -> Model:
        """Return the model with this name, or with an adapter of this name. Raises ModelNotFound."""
        if (model := self._of.get(name)) is not None:
            return model
        for model in self._loaded:
            if name in self._reported(model.address.name):
                return model
        raise ModelNotFound(name, *self.names)

    @property
    def failure(self) -> StartupError | None:
        """Return an error if no model can be loaded: each has failed, and none is loaded or loading."""
        if any(model.num_loads or not model.num_failures or model.loading for model in self.models.values()):
            return None
        return StartupError("None of the models could be loaded.")

    def names_for(self, requested: str) -> tuple[str, ...]:
        """Return the names of the model or adapter for a request, its own first. One that names none gets the first
        model that is loaded. Raises ModelNotFound."""
        model = self._model(requested) if requested else [*self._loaded, *self.models.values()][0]
        names = model.config.accepted_names
        return names if not requested or requested in names else (requested,)

    def name_for(self, requested: str) -> str:
        return self.names_for(requested)[0]

    def name_for_adapter(self, requested: str, adapter: str, *, is_new: bool) -> str:
        """Return the name of the model that an adapter is loaded into, or unloaded from. Raises InvalidRequest and
        ModelNotFound."""
        if is_new and adapter in self._of:
            raise invalid("lora_name", f"is the name of a model, or of an adapter in the settings: '{adapter}'")
        if requested or (adapter and not is_new):
            return self._model(requested or adapter).name
        models = [model.name for model in self.models.values() if model.config.engine.lora_dir is not None]
        if len(models) > 1:
            raise invalid("model", f"must name the model in the query, as in ?model={models[0]}: there are several")
        return self.name_for(models[0] if models else "")

    @asynccontextmanager
    async def in_use(self, name: str) -> AsyncIterator[int]:
        """Keep a model loaded in the `with` block, and yield the nanoseconds that it took to load. Raises
        ModelNotFound and Unavailable."""
        model = self._model(self.name_for(name))
        began_ns = self._clock_ns()
        while model.is_leaving:  # The model is unloaded, and loaded again after the other model had its turn.
            async with self._room:
                pass
        model.num_users += 1
        model.free.clear()
        try:
            was_loaded = model.process is not None
            await self.loaded(model.name)
            yield 0 if was_loaded else self._clock_ns() - began_ns
        finally:
            model.num_users -= 1
            model.used_ns = self._clock_ns()
            if not model.num_users:
                model.free.set()

    async def loaded(self, name: str) -> None:
        """Wait until a model is loaded. All requests for it wait for the same load.

        Raises ModelNotFound and Unavailable."""
        model = self._model(self.name_for(name))
        if model.loading is None:
            if model.process is not None:
                if self._hangs(model.address.name):
                    raise _hangs(model)
                return
            if self._is_closed:
                raise Unavailable("The server is shutting down. Please try again.")
            if (wait_ns := model.retry_ns - self._clock_ns()) > 0:
                raise _not_loaded(model, retry_after_seconds=-(-wait_ns // 10**9))
            model.loading = asyncio.create_task(self._load(model))
        await asyncio.shield(model.loading)

    async def load_all(self) -> None:
        """Load all models, as far as there is room for them without unloading another one."""
        for model in self.models.values():
            if self._excess(model.num_bytes) <= 0 or not self._loaded:
                with suppress(Unavailable):  # It is logged, and the others can be used.
                    await self.loaded(model.name)
                if model.hang_clock is not None and model.hang_clock.is_over:
                    self._keep(self._load_again(model))

    async def watch(self) -> None:
        """Kill processes that hang, and unload idle models, until it is cancelled."""
        while True:
            await sleep(LOOK_SECONDS)
            for model in self.models.values():
                with suppress(OSError):  # The process has just ended.
                    self._look_for_hang(model)
                # A task of its own, because an unload may wait for a process that hangs until the next look kills it.
                if self._is_idle(model):
                    self._keep(self._unload_if_idle(model))

    def _is_idle(self, model: Model) -> bool:
        idle_ns = int(self._options.idle_unload_seconds * 1e9)
        is_unused = model.process is not None and model.loading is None and not model.num_users
        return is_unused and idle_ns > 0 and self._clock_ns() - model.used_ns >= idle_ns

    async def _unload_if_idle(self, model: Model) -> None:
        if self._is_idle(model):  # A request may have come since the look.
            await self._unload(model, f"it was idle for {self._options.idle_unload_seconds:g} s")

    def _look_for_hang(self, model: Model) -> None:
        clock = model.hang_clock
        process = model.process or model.starting
        if clock is None or process is None:
            return
        had_hung = clock.num_looks > 0
        if model.process is None:
            is_over = clock.look_at_start()
            model.num_hangs += is_over
        else:
            is_over = clock.look_at_server(is_hung=self._hangs(model.address.name))
            model.num_hangs += clock.num_looks > 0 and not had_hung
        if is_over:
            log.error("The process of the model %s is killed: it has hung for %g s", model.name, clock.seconds)
            process.kill()

    async def close(self) -> None:
        self._is_closed = True
        loading = [model.loading for model in self.models.values() if model.loading is not None]
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        await asyncio.gather(*(self._unload(model, "") for model in self.models.values()))

    async def _load(self, model: Model) -> None:
        """Load a model. Raises Unavailable."""
        began_ns = self._clock_ns()
        process: ServerProcess | None = None
        try:
            async with self._room:
                await self._make_room(model)
                began_ns = self._clock_ns()
                model.starting = process = await self._start(model.config, model.address)
                model.hang_clock = HangClock(process.activity, self._options.hang_seconds)
                await process.ready()
                model.hang_clock.began_to_serve()
                with suppress(OSError):  # The process has ended already, which the next line sees.
                    model.num_bytes = process.num_bytes
                await self._join(model, process)
                model.num_failures = 0
                model.used_ns = self._clock_ns()
                model.num_loads += 1
            seconds = (model.used_ns - began_ns) / 1e9
            log.info("Loaded the model %s in %.1f s; it takes %d MiB", model.name, seconds, model.num_bytes >> 20)
            self._keep(self._see_end(model, process))
        except (StartupError, OSError) as error:
            model.num_failures += 1
            model.retry_ns = self._clock_ns() + _pause_ns(model.num_failures)
            model.failure = str(error)
            if process is not None and model.hang_clock is not None and model.hang_clock.is_over:
                model.failure = f"Its start hung for {model.hang_clock.seconds:g} s."
            log.error("The model %s could not be loaded: %s", model.name, model.failure)
            raise _not_loaded(model) from None
        except asyncio.CancelledError:
            if process is not None:
                await process.end(model.config.server.drain_timeout_seconds)
            raise
        finally:
            model.loading = model.starting = None

    def _keep(self, watching: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(watching)
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _join(self, model: Model, process: ServerProcess) -> None:
        """Let a process take requests. Raises StartupError if it ends before it can."""
        model.process = process
        if not await _is_before(self._changed(), process.ended()):
            model.process = None
            await self._changed()
            raise StartupError(f"Its process has ended {process.how_ended}.")

    async def _make_room(self, model: Model) -> None:
        """Unload others, the least recently used first, until there is room for a model. This waits for a busy model,
        which gets no further requests meanwhile, so that each model gets its turn."""
        while self._excess(model.num_bytes) > 0:
            if ending := self._not_ended:
                await ending[0].ended()
                continue
            others = self._loaded
            if not others:
                text = "The model %s alone may need more than --memory-budget: %d MiB"
                log.warning(text, model.name, model.num_bytes >> 20)
                return
            other = min(others, key=lambda other: (other.num_users > 0, other.used_ns))
            other.is_leaving = True
            try:
                if other.num_users and other.process is not None:
                    await _is_before(other.free.wait(), other.process.ended())
                await self._unload(other, f"{model.name} needs its memory")
            finally:
                other.is_leaving = False

    def _excess(self, num_bytes: int) -> int:
        """Return by how many bytes the loaded models, those whose processes end, and one more of `num_bytes` exceed the
        budget."""
        if self._options.memory_budget is None:
            return 0
        for model in self.models.values():
            if model.process is not None:
                with suppress(OSError):  # It has just ended.
                    model.num_bytes = model.process.num_bytes
        used = sum(model.num_bytes for model in self._loaded)
        for process in self._not_ended:
            with suppress(OSError):  # It has just ended.
                used += process.num_bytes
        return used + num_bytes - self._options.memory_budget

    @property
    def _not_ended(self) -> list[ServerProcess]:
        return [process for process in self._ending if not process.has_ended]

    async def _unload(self, model: Model, why: str) -> None:
        process = model.process
        model.process = None
        if process is None:
            return
        self._ending.add(process)
        try:
            if self._hangs(model.address.name):
                process.kill()
            await self._changed()
            if why:
                log.info("Unloaded the model %s: %s", model.name, why)
            await process.end(model.config.server.drain_timeout_seconds)
        finally:
            self._ending.discard(process)

    async def _see_end(self, model: Model, process: ServerProcess) -> None:
        """Wait until the process of a model has ended by itself. Then load the model again if it is still needed.

        If the process ended soon after its start, there is a pause before the next one."""
        loaded_ns = self._clock_ns()
        await process.ended()
        if model.process is not process or self._is_closed:
            return
        model.process = None
        log.error("The process of the model %s has ended %s", model.name, process.how_ended)
        now_ns = self._clock_ns()
        if now_ns - loaded_ns > STABLE_SECONDS * 1e9:
            model.num_crashes = 0
        if model.num_crashes:
            model.failure = f"Its process has ended {process.how_ended}."
            model.retry_ns = now_ns + _pause_ns(model.num_crashes)
        model.num_crashes += 1
        await self._changed()
        await self._load_again(model)

    async def _load_again(self, model: Model) -> None:
        while model.process is None and not self._is_closed and self._is_needed(model):
            await sleep(max(0, model.retry_ns - self._clock_ns()) / 1e9)
            with suppress(Unavailable):
                await self.loaded(model.name)

    def _is_needed(self, model: Model) -> bool:
        stays = not (self._options.load_on_demand or self.is_draining) and self._excess(model.num_bytes) <= 0
        return stays or model.num_users > 0


class ModelHangs(Unavailable):
    """The process of a model hangs."""


async def _is_before(first: Awaitable[object], second: Awaitable[object]) -> bool:
    """Wait for one of the two, and cancel the other. Return whether the first is done."""
    both = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return both[0].done()
    finally:
        for one in both:
            one.cancel()


def _pause_ns(num_failures: int) -> int:
    return int(min(MOST_PAUSE_SECONDS, LEAST_PAUSE_SECONDS * 2 ** min(num_failures - 1, 10)) * 1e9)


def _hangs(model: Model) -> ModelHangs:
    seconds = 0 if model.hang_clock is None else ceil(model.hang_clock.seconds_left)
    text = f"The model '{model.name}' does not respond. Please try again."
    return ModelHangs(text, retry_after_seconds=max(LEAST_RETRY_SECONDS, seconds))


def _not_loaded(model: Model, retry_after_seconds: int | None = None) -> Unavailable:
    text = f"The model '{model.name}' could not be loaded: {model.failure} The server's log says why."
    return Unavailable(text, retry_after_seconds=retry_after_seconds)
