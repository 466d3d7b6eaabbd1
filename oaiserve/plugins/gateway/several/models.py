"""`Models` loads and unloads the models of a server, as memory and time permit.

All of it runs on the event loop, so a state changes only where something is awaited.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import sleep
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from oaiserve.config import Config
from oaiserve.engine.types.pooling import Task
from oaiserve.errors import ModelNotFound, StartupError, Unavailable, invalid
from oaiserve.plugins.gateway.options import ModelsOptions
from oaiserve.plugins.gateway.several.loaded import LoadedModel

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LEAST_PAUSE_SECONDS = 1.0  # shortest pause between a failed load and the next one
MOST_PAUSE_SECONDS = 60.0
NEXT_SECONDS = 30.0  # At a start of the server, the next model doesn't wait longer for the one before.
STABLE_SECONDS = 60.0  # A model whose engine has failed after a longer time is loaded again without a pause.


@dataclass(slots=True)
class Model:
    name: str
    config: Config
    num_bytes: int  # memory when it is loaded; before the first load, the size of its files
    task: Task | None = None  # by its settings or files; None if these are not on this disk yet
    loaded: LoadedModel | None = None  # set while it takes requests
    loading: asyncio.Task[None] | None = None
    has_room: bool = False  # There is room for it, and it is being loaded.
    num_users: int = 0  # requests for it that have not ended
    used_ns: int = 0  # time at which a request last ended
    loaded_ns: int = 0
    is_leaving: bool = False  # It is unloaded for another model once it has no users. New requests wait.
    num_failures: int = 0  # failed loads in a row
    num_crashes: int = 0  # failures of its engine soon after a load, in a row
    failure: str = ""  # message of the last failure
    retry_ns: int = 0
    num_loads: int = 0
    num_requests: int = 0
    free: asyncio.Event = field(default_factory=asyncio.Event)  # set while it has no users


class Models:
    """The models of a server, loaded or not."""

    def __init__(
        self,
        models: Iterable[Model],
        options: ModelsOptions,
        load: Callable[[Config], Awaitable[LoadedModel]],
        clock_ns: Callable[[], int],
    ) -> None:
        """`load` loads a model. If it is cancelled, nothing of the model stays. It raises StartupError and OSError."""
        self.by_name = {model.name: model for model in models}
        self._of = {
            name: model
            for model in self.by_name.values()
            for name in (*model.config.accepted_names, *model.config.engine.adapters)
        }
        self._options = options
        self._load_model = load
        self._clock_ns = clock_ns
        self._room = asyncio.Lock()  # Models make room one by one.
        self._ending: set[LoadedModel] = set()  # They take no more requests, and need memory until they have ended.
        self._watching: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.is_draining = False  # set by a signal handler: models that fail are loaded again only for requests

    @property
    def names(self) -> Iterable[str]:
        """Return the names of all models, and of the adapters in their settings."""
        configs = [model.config for model in self.by_name.values()]
        return [name for config in configs for name in (*config.model_names, *config.engine.adapters)]

    @property
    def loaded_by_name(self) -> dict[str, LoadedModel]:
        return {name: model.loaded for name, model in self.by_name.items() if model.loaded is not None}

    @property
    def hung(self) -> list[str]:
        """Return the names of the models whose engine hangs."""
        return [name for name, loaded in self.loaded_by_name.items() if loaded.engine.hang]

    def _model(self, name: str) -> Model:
        """Return the model with this name, or with an adapter of this name. Raises ModelNotFound."""
        if (model := self._of.get(name)) is not None:
            return model
        for own_name, loaded in self.loaded_by_name.items():
            if loaded.engine.adapters.get(name) is not None:
                return self.by_name[own_name]
        raise ModelNotFound(name, *self.names)

    @property
    def failure(self) -> StartupError | None:
        """Return an error if no model can be loaded: each has failed, and none is loaded or loading."""
        if any(model.num_loads or not model.num_failures or model.loading for model in self.by_name.values()):
            return None
        return StartupError("None of the models could be loaded.")

    def names_for(self, requested: str) -> tuple[str, ...]:
        """Return the names of the model or adapter for a request, its own first. One that names none gets the first
        model that is loaded. Raises ModelNotFound."""
        model = self._model(requested or [*self.loaded_by_name, *self.by_name][0])
        names = model.config.accepted_names
        return names if not requested or requested in names else (requested,)

    def name_for(self, requested: str) -> str:
        return self.names_for(requested)[0]

    def is_loaded(self, requested: str) -> bool:
        """Return whether the model for a request is loaded. Raises ModelNotFound."""
        return self._model(self.name_for(requested)).loaded is not None

    def name_for_adapter(self, requested: str, adapter: str, *, is_new: bool) -> str:
        """Return the name of the model that an adapter is loaded into, or unloaded from. Raises InvalidRequest and
        ModelNotFound."""
        if is_new and adapter in self._of:
            raise invalid("lora_name", f"is the name of a model, or of an adapter in the settings: '{adapter}'")
        if requested or (adapter and not is_new):
            return self._model(requested or adapter).name
        models = [model.name for model in self.by_name.values() if model.config.engine.lora_dir is not None]
        if len(models) > 1:
            raise invalid("model", f"must name the model in the query, as in ?model={models[0]}: there are several")
        return self.name_for(models[0] if models else "")

    @asynccontextmanager
    async def in_use(self, name: str) -> AsyncIterator[tuple[LoadedModel, int]]:
        """Keep a model loaded in the `with` block, and yield it with the nanoseconds that it took to load. Raises
        ModelNotFound and Unavailable."""
        model = self._model(self.name_for(name))
        began_ns = self._clock_ns()
        while model.is_leaving:  # The model is unloaded, and loaded again after another one got its room.
            async with self._room:
                pass
        model.num_users += 1
        model.num_requests += 1
        model.free.clear()
        try:
            was_loaded = model.loaded is not None
            loaded = await self.loaded(model.name)
            yield loaded, 0 if was_loaded else self._clock_ns() - began_ns
        finally:
            model.num_users -= 1
            model.used_ns = self._clock_ns()
            if not model.num_users:
                model.free.set()

    async def loaded(self, name: str) -> LoadedModel:
        """Wait until a model is loaded, and return it. All requests for it wait for the same load.

        Raises ModelNotFound and Unavailable."""
        model = self._model(self.name_for(name))
        while model.loaded is None:
            if model.loading is None:
                if self._is_closed:
                    raise Unavailable("The server is shutting down. Please try again.")
                if (wait_ns := model.retry_ns - self._clock_ns()) > 0:
                    raise _not_loaded(model, retry_after_seconds=-(-wait_ns // 10**9))
                model.loading = asyncio.create_task(self._load(model))
            await asyncio.shield(model.loading)
        return model.loaded

    async def load_all(self) -> None:
        """Load all models, as far as there is room for them without unloading another one."""
        loads: list[asyncio.Task[None]] = []
        for model in self.by_name.values():
            is_first = not any(each.loaded or each.has_room for each in self.by_name.values())
            if is_first or self._excess(model.num_bytes) <= 0:
                load = asyncio.create_task(self._loaded_or_logged(model))
                loads.append(load)
                await asyncio.wait({load}, timeout=NEXT_SECONDS)
        await asyncio.gather(*loads)

    async def _loaded_or_logged(self, model: Model) -> None:
        with suppress(Unavailable):  # It is logged, and the others can be used.
            await self.loaded(model.name)

    async def watch(self) -> None:
        """Replace engines that have failed, and unload idle models, until it is cancelled."""
        while True:
            await sleep(LOOK_SECONDS)
            for name, loaded in self.loaded_by_name.items():
                model = self.by_name[name]
                if loaded.engine.failure is not None:
                    self._keep(self._replace(model, loaded))
                elif self._is_idle(model):
                    self._keep(self._unload_if_idle(model))

    def _is_idle(self, model: Model) -> bool:
        idle_ns = int(self._options.idle_unload_seconds * 1e9)
        is_unused = model.loaded is not None and not model.num_users
        return is_unused and idle_ns > 0 and self._clock_ns() - model.used_ns >= idle_ns

    async def _unload_if_idle(self, model: Model) -> None:
        if self._is_idle(model):  # A request may have arrived meanwhile.
            await self._unload(model, f"it was idle for {self._options.idle_unload_seconds:g} s")

    async def close(self) -> None:
        self._is_closed = True
        loading = [model.loading for model in self.by_name.values() if model.loading is not None]
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        await asyncio.gather(*(self._unload(model, "") for model in self.by_name.values()))

    async def _load(self, model: Model) -> None:
        """Load a model. Raises Unavailable."""
        try:
            async with self._room:
                await self._make_room(model)
                model.has_room = True
            began_ns = self._clock_ns()
            try:
                async with asyncio.timeout(model.config.engine.load_timeout_seconds):
                    loaded = await self._load_model(model.config)
            except TimeoutError:
                raise StartupError(
                    f"It was not loaded within {model.config.engine.load_timeout_seconds:g} s "
                    f"(--load-timeout-seconds), so its engine process was killed."
                ) from None
            with suppress(OSError):  # Its process has just ended, and another one is being started.
                model.num_bytes = loaded.num_bytes
            model.loaded = loaded
            model.num_failures = 0
            model.used_ns = model.loaded_ns = self._clock_ns()
            model.num_loads += 1
            seconds = (model.loaded_ns - began_ns) / 1e9
            log.info("Loaded the model %s in %.1f s; it takes %d MiB", model.name, seconds, model.num_bytes >> 20)
        except (StartupError, OSError) as error:
            model.num_failures += 1
            model.retry_ns = self._clock_ns() + _pause_ns(model.num_failures)
            model.failure = str(error)
            log.error("The model %s could not be loaded: %s", model.name, model.failure)
            raise _not_loaded(model) from None
        finally:
            model.loading = None
            model.has_room = False

    def _keep(self, watching: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(watching)
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _make_room(self, model: Model) -> None:
        """Unload others, the least recently used first, until there is room for a model. This waits for a busy model,
        which gets no further requests meanwhile, so that each model gets its turn."""
        while self._excess(model.num_bytes) > 0:
            if ending := [loaded for loaded in self._ending if not loaded.has_ended.is_set()]:
                await ending[0].has_ended.wait()
                continue
            others = [self.by_name[name] for name in self.loaded_by_name]
            loading = [other.loading for other in self.by_name.values() if other.has_room and other.loading]
            if not others and loading:
                await asyncio.wait(loading, return_when=asyncio.FIRST_COMPLETED)
                continue
            if not others:
                text = "The model %s alone may need more than --memory-budget: %d MiB"
                log.warning(text, model.name, model.num_bytes >> 20)
                return
            other = min(others, key=lambda other: (other.num_users > 0, other.used_ns))
            other.is_leaving = True
            try:
                if other.num_users:
                    await other.free.wait()
                await self._unload(other, f"{model.name} needs its memory")
            finally:
                other.is_leaving = False

    def _excess(self, num_bytes: int) -> int:
        """Return by how many bytes the models that are loaded or loading, those whose processes end, and one more of
        `num_bytes` exceed the budget."""
        if self._options.memory_budget is None:
            return 0
        used = sum(model.num_bytes for model in self.by_name.values() if model.has_room and model.loaded is None)
        for name, loaded in self.loaded_by_name.items():
            model = self.by_name[name]
            with suppress(OSError):  # Its process has just ended.
                model.num_bytes = loaded.num_bytes
            used += model.num_bytes
        for loaded in self._ending:
            if not loaded.has_ended.is_set():
                with suppress(OSError):  # Its process has just ended.
                    used += loaded.num_bytes
        return used + num_bytes - self._options.memory_budget

    async def _unload(self, model: Model, why: str) -> None:
        loaded = model.loaded
        model.loaded = None
        if loaded is None:
            return
        self._ending.add(loaded)
        try:
            if why:
                log.info("Unloaded the model %s: %s", model.name, why)
            await loaded.end()
        finally:
            self._ending.discard(loaded)

    async def _replace(self, model: Model, failed: LoadedModel) -> None:
        """Unload a model whose engine has failed, and load it again if it is still needed. If the engine failed soon
        after the load, there is a pause before the next one."""
        if model.loaded is not failed or self._is_closed:
            return
        now_ns = self._clock_ns()
        if now_ns - model.loaded_ns > STABLE_SECONDS * 1e9:
            model.num_crashes = 0
        model.failure = str(failed.engine.failure)
        if model.num_crashes:
            model.retry_ns = now_ns + _pause_ns(model.num_crashes)
        model.num_crashes += 1
        await self._unload(model, "its engine has failed")
        while model.loaded is None and not self._is_closed and self._is_needed(model):
            await sleep(max(0, model.retry_ns - self._clock_ns()) / 1e9)
            with suppress(Unavailable):
                await self.loaded(model.name)

    def _is_needed(self, model: Model) -> bool:
        stays = not (self._options.load_on_demand or self.is_draining) and self._excess(model.num_bytes) <= 0
        return stays or model.num_users > 0


def _pause_ns(num_failures: int) -> int:
    return int(min(MOST_PAUSE_SECONDS, LEAST_PAUSE_SECONDS * 2 ** min(num_failures - 1, 10)) * 1e9)


def _not_loaded(model: Model, retry_after_seconds: int | None = None) -> Unavailable:
    text = f"The model '{model.name}' could not be loaded: {model.failure} The server's log says why."
    return Unavailable(text, retry_after_seconds=retry_after_seconds)
