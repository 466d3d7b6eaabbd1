"""Writes what docs have of flags, parameters, metrics and sampling, from the code: python -m tools.reference

The command line says which flags there are, the structs that check bodies say which parameters, and names.py and the
plug-ins say which metrics. Each table stands between two markers of its page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from cyclopts import ArgumentCollection
from starlette.routing import Route

from oaiserve.app import routes
from oaiserve.checkpoints import recommended_sampling as recommended
from oaiserve.cli import command_line
from oaiserve.config import Config
from oaiserve.facts.metric import Metric
from oaiserve.plugin_loading import options_of, own_plugins
from oaiserve.routes.intake.body_types import SamplingBody
from oaiserve.routes.intake.object_types import Message
from oaiserve.routes.operation import operation_of
from oaiserve.telemetry import names, vllm_names
from tools.markdown import as_markdown, write_between

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
# The routes whose bodies are listed, by the markers of their table and the heads of its columns.
BODIES = {
    "generation-parameters": {"chat": "/v1/chat/completions", "completions": "/v1/completions"},
    "response-parameters": {"responses": "/v1/responses"},
    "messages-parameters": {"messages": "/v1/messages"},
    "pooling-parameters": {
        "embeddings": "/v1/embeddings",
        "score": "/v1/score",
        "rerank": "/v1/rerank",
        "`/v2/embed`": "/v2/embed",
        "`/embed`": "/embed",
        "`/embed_sparse`": "/embed_sparse",
        "`/embed_all`": "/embed_all",
    },
    "tokenizer-parameters": {"`/tokenize`": "/tokenize", "`/detokenize`": "/detokenize"},
}
BESIDE_CHAT = ("responses", "messages")  # Their tables leave out the fields that mean the same as in chat.


def bodies_of_routes() -> dict[str, type[msgspec.Struct]]:
    """Return the structs that check what clients send, by the paths of the routes. Those of missing plug-ins are not
    among them."""
    # A path may have several routes, such as one for a WebSocket.
    operations = [
        (route.path, operation_of(route.endpoint)) for route in routes(Config("demo")) if isinstance(route, Route)
    ]
    return {path: each.body for path, each in operations if each is not None and each.body is not None}


def tables() -> dict[tuple[str, str], str]:
    """Return the text between the markers, by the name of the page and of the markers."""
    bodies = bodies_of_routes()
    titles = [title for title, _ in options_of(own_plugins())]
    return {
        ("flags.md", "flags"): flags(SERVER_FLAGS, ()),
        **{
            ("flags.md", name): flags(groups, SERVER_FLAGS)
            for name, groups in FLAGS_OF_PLUGINS.items()
            if groups[0][1] in titles
        },
        ("api.md", "message-fields"): parameters({"all": Message}),
        **{
            ("api.md", name): parameters({head: bodies[path] for head, path in paths.items()})
            for name, paths in BODIES.items()
            if bodies.keys() >= {*paths.values()}
        },
        ("metrics.md", "metrics"): metrics(names.METRICS),
        **{
            ("metrics.md", f"{plugin.name}-metrics"): metrics(plugin.metrics)
            for plugin in own_plugins()
            if plugin.metrics
        },
        ("models.md", "recommended sampling"): recommended_sampling(),
        ("metrics.md", "genai-metrics"): metrics(names.GEN_AI_METRICS),
        ("metrics.md", "vllm-metrics"): textwrap.fill(
            f"{', '.join(f'`{metric.name}`' for metric in vllm_names.METRICS)}.", 120, break_on_hyphens=False
        ),
    }


# Groups of flags: their command, their title in the help, and their heading.
SERVER_FLAGS = (
    ("serve", "Parameters", "Settings in a file"),
    ("serve", "Server", "Server"),
    ("serve", "Engine", "Engine"),
    ("serve", "Telemetry", "Telemetry"),
)
FLAGS_OF_PLUGINS = {  # by their markers
    "store-flags": (("serve", "Stored responses and files", "Stored responses and files"),),
    "keys-flags": (("serve", "Stored keys", "Stored keys"),),
    "gateway-flags": (
        ("serve", "Several models", "Several models"),
        ("route", "Route", "Gateway: `oaiserve route`"),
        ("route", "Other engines", "Gateway in front of other engines"),
    ),
}
Groups = Iterable[tuple[str, str, str]]


@cache
def _arguments_of(command: str) -> ArgumentCollection:
    """Return the arguments of a command. Assembling them takes seconds, and several tables need those of `serve`."""
    app = command_line(lambda config, sock: 0, own_plugins())
    return app[command].assemble_argument_collection(default_parameter=app.default_parameter, parse_docstring=True)


def flags(groups: Groups, above: Groups) -> str:
    """Return a table for each group of flags, without the rows of those that are `above`."""

    def rows_of(command: str, group: str) -> list[list[str]]:
        return [
            _flag(argument)
            for argument in _arguments_of(command)
            if argument.parse and argument.names[0].startswith("--") and argument.parameter.group[0].name == group
        ]

    lines: list[str] = []
    before = [row for command, group, _ in above for row in rows_of(command, group)]
    for command, group, title in groups:
        rows = rows_of(command, group)
        lines += [f"## {title}", ""]
        if again := [row[0] for row in rows if row in before]:
            lines += [textwrap.fill(f"As of the server: {', '.join(again)}.", 120, break_on_hyphens=False), ""]
        lines += [*as_markdown([["flag", "default", "what it sets"], *(row for row in rows if row not in before)]), ""]
        before += rows
    return "\n".join(lines)


def _flag(argument: Any) -> list[str]:
    default = argument.field_info.default
    text = " ".join(argument.parameter.help.split())
    text = text.replace("|", "\\|")  # This character separates cells of a table.
    choices = argument.get_choices() or ()
    # The text explains each choice, or names the page that lists them.
    if len(choices) <= 10 and not all(f"{choice}:" in text for choice in choices):
        text += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    if isinstance(default, bool):
        default = "on" if default else "off"
    shown = "" if default in ((), None) else f"`{default}`"
    return [f"`{argument.names[0]}`", shown, text]


def parameters(bodies: dict[str, type[msgspec.Struct]]) -> str:
    """Return a table of the fields of these structs, by the bodies that have them and by JSON's types."""
    types: dict[str, dict[str, str]] = {}  # types of each field, in each body that has it
    for head, body in bodies.items():
        _, schemas = msgspec.json.schema_components([body])
        for name, field in schemas[body.__name__]["properties"].items():
            # Routes that generate text share these fields with chat, with the same meaning.
            if head not in BESIDE_CHAT or name not in SamplingBody.__struct_fields__:
                types.setdefault(name, {})[head] = " or ".join(_types(field))
    rows: dict[tuple[str, str], list[str]] = {}
    for name, kinds in types.items():
        for kind in dict.fromkeys(kinds.values()):
            where = [head for head in kinds if kinds[head] == kind]
            rows.setdefault(("all" if len(where) == len(bodies) else ", ".join(where), kind), []).append(f"`{name}`")
    table = [["in", "type", "fields"], *([where, kind, ", ".join(names)] for (where, kind), names in rows.items())]
    several = len(bodies) > 1
    return "\n".join(as_markdown([row if several else row[1:] for row in table]))


def _types(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the types that a schema allows, except null, which means the same as to leave the parameter out."""
    kinds = [kind for kind in _type(schema) if kind != "null"]
    # Where an integer is meant, 2.0 is accepted as well.
    yield from (kind for kind in dict.fromkeys(kinds) if not (kind == "number" and "integer" in kinds))


def _type(option: dict[str, Any]) -> Iterator[str]:
    if "anyOf" in option:
        for each in option["anyOf"]:
            yield from _type(each)
    elif "$ref" in option:
        yield "object"
    elif option.get("type") == "array":
        items = list(_types(option["items"])) if option.get("items") else []
        plurals = [f"lists{item[4:]}" if item.startswith("list") else f"{item}s" for item in items]
        yield f"list of {' or '.join(plurals)}" if items else "list"
    else:
        yield option.get("type", "string")  # an enum has no type, and all of ours are of strings


def metrics(rows: Sequence[Metric]) -> str:
    everywhere = [label for label in rows[0].labels if all(label in metric.labels for metric in rows)]
    table = [["metric", "type", "further labels" if everywhere else "labels", "what"]]
    for metric in rows:
        labels = ", ".join(f"`{label}`" for label in metric.labels if label not in everywhere)
        table.append([f"`{metric.name}`", metric.type, labels, metric.help])
    head = [f"Labels of all: {', '.join(f'`{label}`' for label in everywhere)}.", ""] if everywhere else []
    return "\n".join(head + as_markdown(table))


def recommended_sampling() -> str:
    table = [["models", "sampling", "recommended by"]]
    for row in recommended.ROWS:
        values = ", ".join(f"{name} {value:g}" for name, value in row.values.items())
        table.append([row.models, values, f"[{row.publisher}]({row.source})"])
    return "\n".join(as_markdown(table))


def main() -> None:
    for (page, name), text in tables().items():
        write_between(FOLDER / page, name, text)


if __name__ == "__main__":
    main()
