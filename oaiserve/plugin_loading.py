"""Finds and loads plug-ins, and adds their parts to a server at its start. `plugin/parts.py` defines the parts."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from oaiserve import __version__
from oaiserve.config import EngineOptions, OptionError, ServerOptions, TelemetryOptions, flag_of
from oaiserve.engine.types.sampling_rule import SamplingRule
from oaiserve.errors import StartupError
from oaiserve.http.keys import Keyring
from oaiserve.plugin import Command, Plugin

if TYPE_CHECKING:
    import socket

    from starlette.applications import Starlette
    from starlette.routing import BaseRoute

    from oaiserve.config import Config
    from oaiserve.engine.decoder.families.family import Family
    from oaiserve.engine.decoder.sources.gguf.architecture import Architecture
    from oaiserve.engine.encoder import Media
    from oaiserve.engine.event_streams import LoopStreams
    from oaiserve.engine.start.request import LoadMedia, StartRequest, Way
    from oaiserve.engine.text.tokenizer import Tokenizer
    from oaiserve.http.keys import KeySource
    from oaiserve.plugin.parts import AskReplicas
    from oaiserve.routes.dialects.family import CallFamily
    from oaiserve.routes.pages import Pages

logger = logging.getLogger(__name__)

Settings = Mapping[str, Any]  # a table of the config file
Made = TypeVar("Made")

# The entry point group of installed plug-ins, which is also the package of oaiserve's own.
GROUP = "oaiserve.plugins"
VARIABLE = "OAISERVE_PLUGIN"
OPTIONS = (ServerOptions, EngineOptions, TelemetryOptions)  # options of `serve`, without those of plug-ins
OWN_SOURCE = f"oaiserve {__version__}"
_RAISED = (Exception, SystemExit, GeneratorExit)  # a plug-in's errors; a KeyboardInterrupt comes from the user
# Folders of oaiserve/plugins, any of which may be missing.
OURS = (
    "batches",
    "cuda",
    "dialects",
    "gateway",
    "inspector",
    "keys",
    "media",
    "messages",
    "ollama",
    "pages",
    "pooling",
    "ray",
    "responses",
    "runs",
    "speech",
    "terminal",
)


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    plugin: Plugin
    source: str  # the package and its version, or the flag


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A plug-in that could not be loaded, and without which the server continues."""

    level: int
    message: str
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Found:
    loaded: list[LoadedPlugin]
    left_out: list[LeftOut]

    @property
    def plugins(self) -> list[Plugin]:
        return [each.plugin for each in self.loaded]

    def log(self) -> None:
        for problem in self.left_out:
            logger.log(problem.level, "%s", problem.message, exc_info=problem.error)
        for each in self.loaded:
            if each.source != OWN_SOURCE:
                logger.info("Plug-in '%s' (%s) brings %s", each.plugin.name, each.source, ", ".join(each.plugin.parts))


def find(modules: Iterable[str] = (), settings: Mapping[str, Settings] | None = None) -> Found:
    """Load the plug-ins of oaiserve, the installed ones, and those in these modules or files, with their settings.

    An installed plug-in that cannot be loaded is left out, and so is one of oaiserve whose folder is missing. Raises
    StartupError if a plug-in raises it, if one of the modules cannot be loaded, if two plug-ins have the same name, and
    for settings of an unknown plug-in.
    """
    settings = settings or {}
    names: list[str] = []
    found: list[LoadedPlugin | LeftOut] = []
    for name in OURS:
        names.append(name)
        found.append(_ours(name, settings.get(name, {})))
    for entry in entry_points(group=GROUP):
        source = "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        names.append(entry.name)
        found.append(_installed(entry.name, source, entry.load, settings.get(entry.name, {})))
    for module in modules:
        names.append(_module_name(module))
        found.append(LoadedPlugin(_of_flag(module, settings.get(names[-1], {})), f"--plugin {module}"))
    for name in settings:
        if name not in names:
            raise StartupError(f"[plugins.{name}] in the config file names no plug-in. There are: {', '.join(names)}.")
    by_name: dict[str, LoadedPlugin] = {}
    for each in (each for each in found if isinstance(each, LoadedPlugin)):
        first = by_name.setdefault(each.plugin.name, each)
        if first.plugin is not each.plugin:
            raise StartupError(
                f"Two plug-ins have the name '{each.plugin.name}': one from {first.source}, one from {each.source}. "
                "Remove one of them."
            )
    return Found(list(by_name.values()), [each for each in found if isinstance(each, LeftOut)])


def load(modules: Iterable[str] = (), settings: Mapping[str, Settings] | None = None) -> list[LoadedPlugin]:
    """Find the plug-ins, and log those that are left out. Raises StartupError."""
    found = find(modules, settings)
    found.log()
    return found.loaded


def tables_in(settings: Settings) -> Mapping[str, Settings]:
    """Return the tables of plug-ins in the settings of a config file, by plug-in. Raises OptionError."""
    tables = settings.get("plugins", {})
    if isinstance(tables, Mapping) and all(isinstance(table, Mapping) for table in tables.values()):
        return tables
    raise OptionError("'plugins' in the config file must have a table for each plug-in, as in: [plugins.ledger]")


def server_for(
    models: Sequence[str], config: Config, plugins: Sequence[Plugin]
) -> Callable[[socket.socket], int] | None:
    """Return the server that a plug-in runs instead of the server of one model, or None. Raises OptionError and
    StartupError."""
    for plugin in plugins:
        if plugin.inner.serve is not None and (serve := plugin.inner.serve(models, config, plugins)) is not None:
            return serve
    return None


def options_of(plugins: Iterable[Plugin]) -> list[tuple[str, type]]:
    """Return the settings classes of the plug-ins, with the titles of their groups. Raises StartupError if two settings
    have the same name."""
    names = {each.name for kind in OPTIONS for each in fields(kind)}
    options: list[tuple[str, type]] = []
    for plugin in plugins:
        for title, kind in plugin.options.items():
            if (title, kind) in options:
                continue
            for each in fields(kind):
                if each.name in names:
                    raise StartupError(
                        f"Plug-in '{plugin.name}' has the flag '{flag_of(each.name)}', which there is already."
                    )
                names.add(each.name)
            options.append((title, kind))
    return options


def commands_of(plugins: Iterable[Plugin]) -> dict[str, Command]:
    return {name: command for plugin in plugins for name, command in plugin.commands.items()}


def _made(found: object, settings: Settings) -> object:
    """Return the plug-in that a module contains, or that the module's function makes from the settings."""
    if isinstance(found, Plugin) and settings:
        raise StartupError(f"it takes no settings, but the config file has {', '.join(settings)}.")
    return found if isinstance(found, Plugin) or not callable(found) else found(settings)


def _ours(name: str, settings: Settings) -> LoadedPlugin | LeftOut:
    module = f"{GROUP}.{name}"
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # the folder of all plug-ins is missing
        spec = None
    if spec is None or spec.origin is None:  # None: a folder without code
        return LeftOut(logging.INFO, f"Plug-in '{name}' of oaiserve is left out, because its folder is missing")
    return _installed(name, OWN_SOURCE, lambda: import_module(module).plugin, settings)


def _installed(name: str, source: str, load_object: Callable[[], object], settings: Settings) -> LoadedPlugin | LeftOut:
    described = f"Plug-in '{name}' ({source})"
    try:
        plugin = _made(load_object(), settings)
    except StartupError as error:
        raise StartupError(f"{described} refuses to start: {error}") from error
    except _RAISED as error:
        return LeftOut(logging.ERROR, f"{described} cannot be loaded, and is left out", error)
    if isinstance(plugin, Plugin):
        return LoadedPlugin(plugin, source)
    return LeftOut(logging.ERROR, f"{described} is left out: its entry point must name an oaiserve.plugin.Plugin")


def _module_name(text: str) -> str:
    return Path(text).stem if text.endswith(".py") else text


def _of_flag(text: str, settings: Settings) -> Plugin:
    try:
        plugin = _made(getattr(_module(text), "plugin", None), settings)
    except StartupError as error:
        raise StartupError(f"Plug-in '{text}' refuses to start: {error}") from error
    except _RAISED as error:
        raise StartupError(
            f"--plugin is '{text}', which cannot be loaded: {type(error).__name__}: {error}. "
            "Give a module that Python can import, or a file that ends in .py."
        ) from error
    if isinstance(plugin, Plugin):
        return plugin
    raise StartupError(
        f"--plugin is '{text}', which has no plug-in. It must have a line such as: plugin = Plugin(name=...)"
    )


def _module(text: str) -> ModuleType:
    if not text.endswith(".py"):
        return import_module(text)
    path = Path(text).resolve()
    name = f"oaiserve_plugin_{path.stem}"  # The prefix keeps a file from replacing another module of its name.
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None) == str(path):
        return module
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses and commands look up their module there.
    spec.loader.exec_module(module)
    return module


def made(plugins: Iterable[Plugin], what: str, make: Callable[[Plugin], Made | None]) -> Iterator[tuple[Plugin, Made]]:
    """Yield each plug-in with what `make` returns for it. `make` calls a part of the plug-in, or returns None without
    it.

    If the part raises StartupError, so does this. Any other error is logged, and the server goes on without that part.
    """
    for plugin in plugins:
        try:
            value = make(plugin)
        except StartupError:
            raise
        except _RAISED:
            logger.exception("Plug-in '%s' could not make its %s, and has none", plugin.name, what)
            continue
        if value is not None:
            yield plugin, value


def add_models(plugins: Iterable[Plugin]) -> None:
    """Add the model families and GGUF architectures of the plug-ins. Raises StartupError if one already exists."""
    bringing = [plugin for plugin in plugins if plugin.families or plugin.gguf_architectures]
    if not bringing:
        return
    from oaiserve.engine.decoder.families import add_families  # imports torch
    from oaiserve.engine.decoder.sources.gguf.architectures import add_architectures

    for plugin, (families, architectures) in made(bringing, "models", _models_of):
        try:
            add_families(families)
            add_architectures(architectures)
        except ValueError as error:
            raise StartupError(f"Plug-in '{plugin.name}' cannot add its models: {error}.") from error


def _models_of(plugin: Plugin) -> tuple[list[Family], list[Architecture]]:
    families = plugin.families() if plugin.families else ()
    architectures = plugin.gguf_architectures() if plugin.gguf_architectures else ()
    return [*families], [*architectures]


def rules_of(plugins: Iterable[Plugin], tokenizer: Tokenizer) -> tuple[SamplingRule, ...]:
    """Return the sampling rules of the plug-ins, for a model with this tokenizer."""
    rules = made(
        plugins, "sampling rules", lambda plugin: plugin.sampling_rules and [*plugin.sampling_rules(tokenizer)]
    )
    return tuple(SamplingRule(plugin.name, rule) for plugin, of_plugin in rules for rule in of_plugin)


def dialects_of(plugins: Iterable[Plugin]) -> list[list[CallFamily]]:
    """Return the dialects of the plug-ins, in one list per plug-in."""

    def of_plugin(plugin: Plugin) -> list[CallFamily] | None:
        return [*(plugin.dialects() if callable(plugin.dialects) else plugin.dialects)] or None

    return [dialects for _, dialects in made(plugins, "dialects", of_plugin)]


def ways_of(plugins: Iterable[Plugin]) -> list[Way]:
    """Return the plug-ins' ways to start a model."""
    ways = made(plugins, "ways to start a model", lambda plugin: plugin.inner.starts and [*plugin.inner.starts()])
    return [way for _, of_plugin in ways for way in of_plugin]


def findings_of(plugins: Iterable[Plugin]) -> list[tuple[str, str]]:
    """Return the findings of the plug-ins on this machine, for `oaiserve doctor`."""
    findings = made(plugins, "findings", lambda plugin: plugin.inner.findings and [*plugin.inner.findings()])
    return [finding for _, of_plugin in findings for finding in of_plugin]


def media_of(plugins: Iterable[Plugin]) -> LoadMedia | None:
    """Return a function that loads a reader of images and sounds, from the first plug-in that has one for the model, or
    None if no plug-in has this part."""
    loading = [plugin for plugin in plugins if plugin.inner.media is not None]

    def load_media(request: StartRequest, mmproj: Path | None) -> Media | None:
        readers = made(
            loading,
            "reader of images and sounds",
            lambda plugin: plugin.inner.media and plugin.inner.media(request, mmproj),
        )
        return next((media for _, media in readers), None)

    return load_media if loading else None


def own_plugins() -> list[Plugin]:
    """Return oaiserve's own plug-ins whose folders exist, without settings."""
    found = (_ours(name, {}) for name in OURS)
    return [each.plugin for each in found if isinstance(each, LoadedPlugin)]


def import_early(plugins: Iterable[Plugin], *, reads_calls: bool) -> None:
    """Import the routes and dialects of oaiserve's plug-ins. This takes tens of milliseconds, and needs no model."""
    for plugin in plugins:
        if plugin.name not in OURS:
            continue
        if find_spec(module := f"{GROUP}.{plugin.name}.routes") is not None:
            import_module(module)
        if reads_calls and callable(plugin.dialects):
            plugin.dialects()


def check(plugins: Iterable[Plugin], config: Config) -> None:
    """Let the plug-ins check the settings of a server. Raises StartupError."""
    for plugin in plugins:
        if plugin.check is not None:
            plugin.check(config)


def keyring(plugins: Iterable[Plugin], config: Config) -> Keyring | None:
    """Return the keys that a server accepts, or None if it needs none. Raises StartupError."""
    if not config.needs_key:
        return None
    ring = Keyring(config.server.api_key, config.server.api_key_file)

    def added_keys(plugin: Plugin) -> KeySource | None:
        source = plugin.keys(config) if plugin.keys else None
        if source is not None:
            ring.add(source)
        return source

    brought = [*made(plugins, "keys", added_keys)]
    if not (config.server.api_key or config.server.api_key_file or brought):
        raise StartupError("Clients need an API key, but no plug-in brought the keys. The log says why.")
    return ring


def pages_of(plugins: Iterable[Plugin]) -> Pages:
    """Return the pages of the plug-ins."""
    from oaiserve.routes.pages import Pages  # imports an HTTP server, which the command line doesn't need

    pages = Pages()

    def checked(plugin: Plugin) -> Pages | None:
        added = plugin.inner.pages() if plugin.inner.pages else None
        if added is not None:
            added.check(pages)
        return added

    for _, added in made(plugins, "pages", checked):
        pages = pages.and_those(added)
    return pages


def routes_of(
    plugins: Iterable[Plugin], config: Config, taken: Collection[str], *, ask: AskReplicas | None = None
) -> list[BaseRoute]:
    """Return the routes of the plug-ins: with `ask`, the routes for a gateway in front of replicas, else those for a
    server. Raises StartupError if a path is already taken."""

    def of_plugin(plugin: Plugin) -> list[BaseRoute]:
        makers = [plugin.inner.front_routes]
        if ask is None:
            makers.append(plugin.routes)
        elif plugin.inner.gateway_routes is not None:
            makers.append(partial(plugin.inner.gateway_routes, ask))
        return [route for make in makers if make is not None for route in make(config)]

    paths = set(taken)
    routes: list[BaseRoute] = []
    for plugin, added in made(plugins, "routes", of_plugin):
        for route in added:
            path = getattr(route, "path", "")
            if path in paths:
                raise StartupError(f"Plug-in '{plugin.name}' has the route '{path}', which there is already.")
        routes += added
        paths.update(getattr(route, "path", "") for route in added)
    return routes


def streams_of(plugins: Iterable[Plugin], config: Config) -> Callable[..., LoopStreams] | None:
    """Return the part of a plug-in that replaces the engine's streams of requests. Raises StartupError if two plug-ins
    have one."""
    brought = [*made(plugins, "streams", lambda plugin: plugin.inner.streams and plugin.inner.streams(config))]
    if len(brought) > 1:
        (first, _), (second, _), *_ = brought
        raise StartupError(f"Plug-ins '{first.name}' and '{second.name}' both bring streams of requests. Turn one off.")
    return brought[0][1] if brought else None


@asynccontextmanager
async def running(plugins: Sequence[Plugin], app: Starlette) -> AsyncIterator[None]:
    """Enter the lifespans of the plug-ins, and leave them in the opposite order."""
    async with AsyncExitStack() as stack:
        for plugin in plugins:
            if plugin.lifespan is None:
                continue
            try:
                context = plugin.lifespan(app)
                await context.__aenter__()
            except StartupError:
                raise
            except (Exception, SystemExit):
                logger.exception("Plug-in '%s' could not start, and the server goes on without it", plugin.name)
            else:
                stack.push_async_callback(_leave, plugin.name, context)
        yield


async def _leave(name: str, context: AbstractAsyncContextManager[object]) -> None:
    try:
        await context.__aexit__(None, None, None)
    except (Exception, SystemExit):
        logger.exception("Plug-in '%s' failed while the server stopped", name)
