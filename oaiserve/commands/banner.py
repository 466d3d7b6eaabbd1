"""The lines that a server prints when it is ready: its model, device and addresses, and a command to try."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oaiserve import __version__
from oaiserve.commands.models import model_at
from oaiserve.commands.table import size
from oaiserve.config import Config, RouteOptions, ServerOptions
from oaiserve.engine.executors.native.cores import default_threads
from oaiserve.engine.pooling import Task
from oaiserve.routes.intake.sampling_defaults import sampling_defaults
from oaiserve.screen import Screen

if TYPE_CHECKING:
    from oaiserve.engine.engine import Engine  # its import is slow

_LABEL_WIDTH = 10
_LONG_NAME = 40  # characters from which on the example request leaves out the model
# An example for each task: a path, and a body without its model.
_EXAMPLES: dict[Task, tuple[str, str]] = {
    "generate": ("/v1/chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'),
    "embed": ("/v1/embeddings", '"input": ["A cat sleeps.", "A dog barks."]'),
    "score": ("/v1/rerank", '"query": "What sleeps?", "documents": ["A dog barks.", "A cat sleeps."]'),
}


@dataclass(frozen=True, slots=True)
class Banner:
    """The lines of a server at its start: the title has its address, and each fact has a label."""

    title: str
    facts: Mapping[str, str]
    example: str = ""  # a command to try
    closing: str = "Ctrl-C stops the server."

    def text(self, screen: Screen) -> str:
        """Return the lines, wrapped for the screen. Addresses and commands stay whole, so that they can be copied."""
        columns = screen.columns() or 100
        title = textwrap.wrap(self.title, columns, break_long_words=False, break_on_hyphens=False)
        lines = ["", *(screen.painted(line, "bold") for line in title), ""]
        for label, fact in self.facts.items():
            width = max(20, columns - _LABEL_WIDTH - 2)
            wrapped = textwrap.wrap(fact, width, break_long_words=False, break_on_hyphens=False) or [""]
            lines.append(f"  {screen.painted(label.ljust(_LABEL_WIDTH), 'dim')}{wrapped[0]}")
            lines += [" " * (_LABEL_WIDTH + 2) + line for line in wrapped[1:]]
        lines.append("")
        if self.example:
            lines += ["  Try it:", textwrap.indent(self.example, "  "), ""]
        lines += [f"  {line}" for line in textwrap.wrap(self.closing, max(20, columns - 2))]
        return "\n".join([*lines, ""])


def address(server: ServerOptions, port: int) -> str:
    scheme = "http" if server.tls_certificate is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)
    if ":" in host and not host.startswith("["):
        return f"{scheme}://[{host}]:{port}"
    return f"{scheme}://{host}:{port}"


def short_name(config: Config) -> str:
    """Return the model's name for people: its file's name, if no other was given."""
    is_path = config.model_name == config.model and Path(config.model).exists()
    if is_path:
        return Path(config.model).name
    return config.model_name


def of_server(config: Config, port: int, task: Task, facts: Mapping[str, str], *, has_pages: bool = True) -> Banner:
    url = address(config.server, port)
    if config.server.needs_key:
        key = " -H 'authorization: Bearer '$OPENAI_API_KEY"
    else:
        key = ""
    path, body = _EXAMPLES[task]
    if len(config.model_name) > _LONG_NAME:
        model = ""
    else:
        model = f'"model": "{config.model_name}", '
    example = f"curl {url}{path}{key} -H 'content-type: application/json' \\\n  -d '{{{model}{body}}}'"
    places = _places(config.server, url, "Chat" if task == "generate" else "Live page", has_pages=has_pages)
    if short_name(config) != config.model_name:
        facts = {"Name": f"{config.model_name} in requests, unless --served-model-name gives another", **facts}
    closing = "Ctrl-C stops the server."
    if task == "generate":
        closing = f"To use it from a coding tool, see 'oaiserve launch'. {closing}"
    return Banner(
        f"oaiserve {__version__} serves {short_name(config)} at {url}/v1", {**facts, **places}, example, closing
    )


def of_models(
    server: ServerOptions, names: Sequence[str], url: str, *, on_demand: bool, has_pages: bool = True
) -> Banner:
    when = "loaded when a request names it" if on_demand else "loading now"
    facts = {"Models": ", ".join(names), "Runs on": f"one process per model, {when}"}
    places = _places(server, url, "Chat", has_pages=has_pages)
    return Banner(f"oaiserve {__version__} serves {len(names)} models at {url}/v1", {**facts, **places})


def of_gateway(options: RouteOptions, url: str, *, has_pages: bool = True) -> Banner:
    if len(options.replica) > 1:
        number = f"{len(options.replica)} servers"
    else:
        number = "one server"
    facts = {"Servers": ", ".join(options.replica)} | _places(options.server, url, "Page", has_pages=has_pages)
    closing = "The log reports when a server starts or stops taking requests. Ctrl-C stops the gateway."
    return Banner(f"oaiserve {__version__} routes to {number} at {url}/v1", facts, closing=closing)


def _places(server: ServerOptions, url: str, page: str, *, has_pages: bool) -> dict[str, str]:
    if not has_pages:
        return {"API": f"{url}/v1"}
    closed = "closed: give --api-key to open it for clients with a key, or --open-dashboard for all"
    return {"API": f"{url}/v1", page: f"{url}/" if server.shows_dashboard else closed}


def engine_facts(config: Config, engine: Engine) -> dict[str, str]:
    facts = {"Model": _model(config, engine), "Runs on": _executor(config, engine)}
    if engine.pooling is None:
        facts["Sampling"] = f"{sampling_defaults(config, engine.default_params)}, unless a request sets others"
    if engine.adapters.served:
        facts["Adapters"] = ", ".join(adapter.name for adapter in engine.adapters.served)
    return facts


def _model(config: Config, engine: Engine) -> str:
    if engine.path is None:
        return config.model_name
    model = model_at(config.model, engine.path)
    form, family = model.described()
    if config.model == "demo" or Path(config.model).exists():
        name = engine.path.name
    else:
        name = config.model
    limits = f"up to {engine.max_model_len:,} tokens a request"
    return f"{name} ({family}), {form.strip()}, {size(model.num_bytes)}, {limits}"


def _executor(config: Config, engine: Engine) -> str:
    info = engine.model_info
    features = engine.features
    parts = [info["device"]]
    if info["device"] == "cpu":
        num_threads = config.engine.cpu_threads or default_threads()
        parts = [f"CPU, {num_threads} thread{'s' if num_threads > 1 else ''}"]
        is_native = features.get("native_step") == "" or engine.pooling is not None
        parts.append("native code" if is_native else "PyTorch, which is slower than native code")
    parts.append(info["dtype"])
    if engine.pooling is None:
        num_tokens = engine.capacity["kv_blocks"] * engine.capacity["block_size"]
        parts.append(f"KV cache of {num_tokens:,} tokens ({engine.kv_bytes / 2**30:.2f} GiB)")
    elif engine.pooling.task == "embed":
        parts.append(f"vectors of {engine.pooling.size:,} numbers")
    return ", ".join(parts)
