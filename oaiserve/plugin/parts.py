"""`Plugin`: what a plug-in brings to a server, all of it optional, and `InnerParts` for those of oaiserve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from socket import socket

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from oaiserve.config import Config
    from oaiserve.engine.decoder.families.family import Family
    from oaiserve.engine.decoder.sources.gguf.architecture import Architecture
    from oaiserve.engine.event_streams import LoopStreams
    from oaiserve.engine.start.request import LoadMedia, Way
    from oaiserve.engine.text.tokenizer import Tokenizer
    from oaiserve.engine.types.sampling_rule import Rule
    from oaiserve.facts.metric import Metric
    from oaiserve.facts.record import RequestRecord
    from oaiserve.http.keys import KeySource
    from oaiserve.routes.dialects.family import CallFamily
    from oaiserve.routes.pages import Pages


# Sends a GET of a path to all replicas of a gateway, with the API key of a request. Returns the bodies of the answers
# that come in time, by the numbers of the replicas, or a refusal if all replicas refuse.
AskReplicas: TypeAlias = "Callable[[Request, str], Awaitable[Mapping[int, bytes] | Response]]"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line, such as `oaiserve chat`."""

    help: str  # one sentence
    module: str
    """Imported when the command runs. Its function `command` becomes a command line of cyclopts, from its parameters
    and docstring, and returns the exit code. If there are several subcommands, they are in `COMMANDS`."""

    has_settings: bool = False
    """Whether its parameters are also variables OAISERVE_... and keys of the file of --config, as those of `serve`. The
    module is then imported with the command line, so its import must be fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerParts:
    """What only the plug-ins in oaiserve/plugins bring. They are made and released with the core, whose modules they
    may import, so nothing here is promised to other plug-ins. Every part is optional."""

    tables: Collection[str] = ()
    """Names of tables of the config file that the plug-in reads by itself, from `config.file`."""

    serve: Callable[[Sequence[str], Config, Sequence[Plugin]], Callable[[socket], int] | None] | None = None
    """Called with the arguments MODEL of `oaiserve serve`, its settings, in which the model is the first of them or
    empty, and all plug-ins. It may take over the start: then it returns a function that serves on the bound socket
    until a signal, and returns the exit code. Raises OptionError and StartupError."""

    front_routes: Callable[[Config], Iterable[BaseRoute]] | None = None
    """Called like `Plugin.routes`, also by a gateway, which answers these routes itself. They use nothing but requests
    to `scope["app"]`, which a gateway passes on."""

    pages: Callable[[], Pages] | None = None
    """Called once, when a server starts: pages for browsers, and their files, which need no API key. A server names in
    its answers only pages that there are. Views, and parts of them, need oaiserve's plug-in `pages`, which serves them.
    `oaiserve route` has those of oaiserve's own plug-ins."""

    is_in_front: bool = False
    """With several models, each has the plug-in's routes and lifespan. If this is true, only the app in front of them
    has both. It has `app.state.backend`, but no `app.state.serving`."""

    gateway_routes: Callable[[AskReplicas, Config], Iterable[BaseRoute]] | None = None
    """Called once, when a gateway starts: routes that it makes from what its replicas answer. `oaiserve route` has
    those of oaiserve's own plug-ins."""

    streams: Callable[[Config], Callable[..., LoopStreams] | None] | None = None
    """Called once, when the server starts: a subclass of `LoopStreams`, which sees each request to the engine and all
    of its events on the event loop, or None. Only one plug-in may bring some. No error in its methods is caught: the
    clients of a step would wait for its events in vain."""

    starts: Callable[[], Iterable[Way]] | None = None
    """Called once, before the model is loaded. The ways to start a model are asked in order whether they accept it,
    before those of oaiserve. One that has accepted it returns the model with what computes its steps."""

    findings: Callable[[], Iterable[tuple[str, str]]] | None = None
    """Called by `oaiserve doctor`: names of parts of this machine, each with sentences about what it means for serving.
    """

    media: LoadMedia | None = None
    """Called before the text model of a multimodal model is loaded, with the request to start it and the file of
    --mmproj, if there is one. Returns what reads its images and sounds, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """A plug-in. Every part but the name is optional, and a server pays nothing for a part that no plug-in has."""

    name: str

    commands: Mapping[str, Command] = field(default_factory=dict)
    """Commands by name, which replace none of oaiserve. They need an installed plug-in, or one in OAISERVE_PLUGIN."""

    options: Mapping[str, type] = field(default_factory=dict)
    """Settings of `oaiserve serve`, by the titles of their groups in the help: dataclasses like those in `config.py`,
    frozen, with a default and a docstring for each field. A field is a flag, a variable OAISERVE_... and a key of the
    config file. `config.of(TYPE)` returns the settings of a server. Several plug-ins may have the same ones. If they
    have a property `needs_key` that is true, clients need an API key."""

    check: Callable[[Config], None] | None = None
    """Called before the model is loaded. It raises `StartupError` for settings with which the server cannot start."""

    keys: Callable[[Config], KeySource | None] | None = None
    """Called once, when a server with keys starts, or a gateway in front of its models: API keys that it accepts, too.
    A key may have rights and models of its own, and limits for its uses."""

    routes: Callable[[Config], Iterable[BaseRoute]] | None = None
    """Called once, when the server starts, with its settings. The routes need an API key as the server's own routes do.
    They cannot have the path of one of those."""

    lifespan: Callable[[Starlette], AbstractAsyncContextManager[object]] | None = None
    """Entered with the application when the engine has started, and left before it stops, on the server's event loop.
    What it sets in `app.state` is for the plug-in's routes, except for `app.state.files`, from which requests read
    images and texts by `file_id`."""

    metrics: Sequence[Metric] = ()
    """What it adds to /metrics. Its lifespan calls `Server(app).show` with each metric and a function that returns its
    numbers."""

    observe: Callable[[RequestRecord], None] | None = None
    """Called with the record of each ended request, after its answer, on the telemetry thread. The record is shared, so
    it must not be changed."""

    dialects: Sequence[CallFamily] | Callable[[], Iterable[CallFamily]] = ()
    """Ways in which models write tool calls, or a function that returns them, which is called when a server may read
    calls. With `--tool-call-parser auto`, a chat template that has all `signs` of one of these selects it, before those
    of oaiserve with the same `rank`. The flag also takes their names."""

    sampling_rules: Callable[[Tokenizer], Iterable[Rule]] | None = None
    """Called once, when the model has been loaded. At each draw of each sequence, each rule gets the logits, a float32
    tensor on the model's device that it edits in place, and the ids of the answer so far. If a rule raises, the request
    fails."""

    families: Callable[[], Iterable[Family]] | None = None
    """Called once, before the model is loaded: model families, by the names of their tensors and how they differ from
    Llama."""

    gguf_architectures: Callable[[], Iterable[Architecture]] | None = None
    """Called after `families`: how GGUF files of an architecture name the tensors and settings of a family."""

    inner: InnerParts = field(default_factory=InnerParts)
    """Further parts, for oaiserve's own plug-ins. They may change in any release."""

    @property
    def parts(self) -> list[str]:
        """Return the names of the parts that this plug-in has."""
        of_plugin = [part.name for part in fields(self) if part.name not in ("name", "inner")]
        of_inner = [part.name for part in fields(self.inner)]
        return [name for name in of_plugin if getattr(self, name)] + [
            name for name in of_inner if getattr(self.inner, name)
        ]
