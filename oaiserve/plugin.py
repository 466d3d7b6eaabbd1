"""The interface for plug-ins: what they can bring, and what they may use. docs/plugins.md has an example of each part.

A plug-in is a module with a `plugin`: a `Plugin`, or a function that makes one from its settings, the table
[plugins.NAME] of the config file. The server finds it by an entry point of the group `oaiserve.plugins`, whose name is
NAME, or by `--plugin`, where NAME is that of the module. It may import this module and those in PUBLIC_MODULES.
Everything else may change in any release.

If a plug-in raises `StartupError`, when it is imported or when the server starts, the server does not start. Any other
error is logged with the plug-in's name, and the server continues without that part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, TypeAlias

from oaiserve.errors import StartupError

if TYPE_CHECKING:
    from socket import socket

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute

    from oaiserve.config import Config
    from oaiserve.engine.boundary import AnyEngine
    from oaiserve.engine.decoder.families.family import Family
    from oaiserve.engine.decoder.sources.gguf.architecture import Architecture
    from oaiserve.engine.event_streams import LoopStreams
    from oaiserve.engine.sampling_rule import Rule
    from oaiserve.engine.start.request import LoadMedia, Way
    from oaiserve.engine.text.tokenizer import Tokenizer
    from oaiserve.facts.metric import Metric
    from oaiserve.facts.record import RequestRecord
    from oaiserve.http.keys import KeySource
    from oaiserve.routes.dialects.family import CallFamily
    from oaiserve.routes.pages import Pages

__all__ = ["PUBLIC_MODULES", "AskReplicas", "Command", "Plugin", "StartupError", "engine_of"]

# Sends a GET of a path to all replicas of a gateway, with the API key of a request. Returns the bodies of the answers
# that come in time, by the numbers of the replicas, or a refusal if all replicas refuse.
AskReplicas: TypeAlias = "Callable[[Request, str], Awaitable[Mapping[int, bytes] | Response]]"

PUBLIC_MODULES = (  # A package stands for all of its modules.
    "oaiserve.plugin",
    "oaiserve.plugin_loading",
    "oaiserve.checkpoints.bad_file",
    "oaiserve.checkpoints.checkpoint",
    "oaiserve.checkpoints.demo",
    "oaiserve.checkpoints.gguf",
    "oaiserve.checkpoints.hub",
    "oaiserve.checkpoints.load_errors",
    "oaiserve.checkpoints.progress",
    "oaiserve.checkpoints.quantization",
    "oaiserve.checkpoints.source",
    "oaiserve.commands.banner",
    "oaiserve.commands.client",
    "oaiserve.commands.file_checks",
    "oaiserve.commands.listening",
    "oaiserve.commands.own_server",
    "oaiserve.commands.server_process",
    "oaiserve.commands.servers",
    "oaiserve.commands.settings",
    "oaiserve.commands.table",
    "oaiserve.config",
    "oaiserve.engine.decoder.facts",
    "oaiserve.engine.decoder.families.family",
    "oaiserve.engine.decoder.sources.gguf.architecture",
    "oaiserve.engine.encoder",
    "oaiserve.engine.event_streams",
    "oaiserve.engine.logprobs",
    "oaiserve.engine.media",
    "oaiserve.engine.pooling",
    "oaiserve.engine.request",
    "oaiserve.engine.start.parts",
    "oaiserve.engine.start.request",
    "oaiserve.engine.start.task",
    "oaiserve.engine.text.tokenizer",
    "oaiserve.errors",
    "oaiserve.explain.commands",
    "oaiserve.explain.reuse",
    "oaiserve.explain.step_cost",
    "oaiserve.facts.engine_numbers",
    "oaiserve.facts.metric",
    "oaiserve.facts.record",
    "oaiserve.facts.times",
    "oaiserve.facts.trace",
    "oaiserve.facts.turn",
    "oaiserve.hosts",
    "oaiserve.http.codings",
    "oaiserve.http.connections",
    "oaiserve.http.data_url",
    "oaiserve.http.fair_turns",
    "oaiserve.http.keys",
    "oaiserve.http.refusals",
    "oaiserve.http.shared_limit",
    "oaiserve.routes.adaptations",
    "oaiserve.routes.answer.common_shape",
    "oaiserve.routes.answer.document",
    "oaiserve.routes.answer.feed",
    "oaiserve.routes.answer.logprobs",
    "oaiserve.routes.answer.paging",
    "oaiserve.routes.answer.respond",
    "oaiserve.routes.answer.shape",
    "oaiserve.routes.answer.sse",
    "oaiserve.routes.chat.call_arguments",
    "oaiserve.routes.chat.constraints",
    "oaiserve.routes.chat.contents",
    "oaiserve.routes.chat.conversation",
    "oaiserve.routes.chat.foreign",
    "oaiserve.routes.chat.history",
    "oaiserve.routes.chat.shown_tools",
    "oaiserve.routes.chat.tools",
    "oaiserve.routes.debug",
    "oaiserve.routes.dialects",
    "oaiserve.routes.door.access",
    "oaiserve.routes.door.accounting",
    "oaiserve.routes.door.backend",
    "oaiserve.routes.door.layers",
    "oaiserve.routes.door.middleware",
    "oaiserve.routes.door.own_requests",
    "oaiserve.routes.exchange",
    "oaiserve.routes.intake.bodies",
    "oaiserve.routes.intake.body_types",
    "oaiserve.routes.intake.decode",
    "oaiserve.routes.intake.fields",
    "oaiserve.routes.intake.invalid",
    "oaiserve.routes.intake.last_turn",
    "oaiserve.routes.intake.media",
    "oaiserve.routes.intake.object_types",
    "oaiserve.routes.intake.parameters",
    "oaiserve.routes.intake.read",
    "oaiserve.routes.intake.receive",
    "oaiserve.routes.intake.turns",
    "oaiserve.routes.models",
    "oaiserve.routes.open_requests",
    "oaiserve.routes.operation",
    "oaiserve.routes.pages",
    "oaiserve.routes.prompt_reuse",
    "oaiserve.routes.root",
    "oaiserve.routes.serving",
    "oaiserve.routes.tokens",
    "oaiserve.runtime",
    "oaiserve.standstill",
    "oaiserve.storage.database",
    "oaiserve.storage.group_commit",
    "oaiserve.storage.private",
    "oaiserve.storage.process_claim",
    "oaiserve.storage.store",
    "oaiserve.storage.store_options",
    "oaiserve.telemetry",
    "oaiserve.wire.address",
    "oaiserve.wire.continuation",
    "oaiserve.wire.prefix_keys",
    "oaiserve.wire.report",
    "oaiserve.wire.routing_decision",
    "oaiserve.wire.surrogates",
)


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

    tables: Collection[str] = ()
    """Names of tables of the config file that the plug-in reads by itself, from `config.file`."""

    serve: Callable[[Sequence[str], Config, Sequence[Plugin]], Callable[[socket], int] | None] | None = None
    """Called with the arguments MODEL of `oaiserve serve`, its settings, in which the model is the first of them or
    empty, and all plug-ins. It may take over the start: then it returns a function that serves on the bound socket
    until a signal, and returns the exit code. Raises OptionError and StartupError."""

    check: Callable[[Config], None] | None = None
    """Called before the model is loaded. It raises `StartupError` for settings with which the server cannot start."""

    keys: Callable[[Config], KeySource | None] | None = None
    """Called once, when a server with keys starts, or a gateway in front of its models: API keys that it accepts, too.
    A key may have rights and models of its own, and limits for its uses."""

    routes: Callable[[Config], Iterable[BaseRoute]] | None = None
    """Called once, when the server starts, with its settings. The routes need an API key as the server's own routes do.
    They cannot have the path of one of those."""

    front_routes: Callable[[Config], Iterable[BaseRoute]] | None = None
    """Called like `routes`, also by a gateway, which answers these routes itself. They use nothing but requests to
    `scope["app"]`, which a gateway passes on."""

    pages: Callable[[], Pages] | None = None
    """Called once, when a server starts: pages for browsers, and their files, which need no API key. A server names in
    its answers only pages that there are. Views, and parts of them, need oaiserve's plug-in `pages`, which serves them.
    `oaiserve route` has those of oaiserve's own plug-ins."""

    lifespan: Callable[[Starlette], AbstractAsyncContextManager[object]] | None = None
    """Entered with the application when the engine has started, and left before it stops, on the server's event loop.
    What it sets in `app.state` is for the plug-in's routes, except for `app.state.files`, from which requests read
    images and texts by `file_id`."""

    is_in_front: bool = False
    """With several models, each has a process with the plug-in's routes and lifespan. If this is true, the gateway in
    front of them has both, too, and answers these routes itself. It has `app.state.backend`, but no
    `app.state.serving`."""

    gateway_routes: Callable[[AskReplicas, Config], Iterable[BaseRoute]] | None = None
    """Called once, when a gateway starts: routes that it makes from what its replicas answer. `oaiserve route` has
    those of oaiserve's own plug-ins."""

    metrics: Sequence[Metric] = ()
    """What it adds to /metrics. Its lifespan calls `app.state.serving.telemetry.show` with each metric and a function
    that returns its numbers."""

    observe: Callable[[RequestRecord], None] | None = None
    """Called with the record of each ended request, after its answer, on the telemetry thread. The record is shared, so
    it must not be changed."""

    streams: Callable[[Config], Callable[..., LoopStreams] | None] | None = None
    """Called once, when the server starts: a subclass of `LoopStreams`, which sees each request to the engine and all
    of its events on the event loop, or None. Only one plug-in may bring some. No error in its methods is caught: the
    clients of a step would wait for its events in vain."""

    dialects: Sequence[CallFamily] = ()
    """Ways in which models write tool calls. With `--tool-call-parser auto`, a chat template that has all `signs` of
    one of these selects it, before any of oaiserve."""

    starts: Callable[[], Iterable[Way]] | None = None
    """Called once, before the model is loaded. The ways to start a model are asked in order whether they accept it,
    before those of oaiserve. One that has accepted it returns the model with what computes its steps."""

    media: LoadMedia | None = None
    """Called before the text model of a multimodal model is loaded, with the request to start it and the file of
    --mmproj, if there is one. Returns what reads its images and sounds, or None."""

    sampling_rules: Callable[[Tokenizer], Iterable[Rule]] | None = None
    """Called once, when the model has been loaded. At each draw of each sequence, each rule gets the logits, a float32
    tensor on the model's device that it edits in place, and the ids of the answer so far. If a rule raises, the request
    fails."""

    families: Callable[[], Iterable[Family]] | None = None
    """Called once, before the model is loaded: model families, by the names of their tensors and how they differ from
    Llama."""

    gguf_architectures: Callable[[], Iterable[Architecture]] | None = None
    """Called after `families`: how GGUF files of an architecture name the tensors and settings of a family."""

    @property
    def parts(self) -> list[str]:
        """Return the names of the parts that this plug-in has."""
        return [part.name for part in fields(self) if part.name != "name" and getattr(self, part.name)]


def engine_of(request: Request) -> AnyEngine:
    """Return the engine of the server that received the request. Its `generate` blocks, so call it in a thread."""
    engine: AnyEngine = request.app.state.serving.engine
    return engine
