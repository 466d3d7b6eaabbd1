"""Writes what docs/reference has of flags, parameters and metrics, from the code: python -m tools.reference

The command line says which flags there are, the structs that check bodies say which parameters, and names.py says which
metrics. Each table stands between two markers of its page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from oaiserve.cli import command_line
from oaiserve.routes.bodies import ChatBody, CompletionBody, DetokenizeBody, ResponsesBody, SamplingBody, TokenizeBody
from oaiserve.routes.embeddings import EmbeddingBody
from oaiserve.routes.messages.body import MessagesBody
from oaiserve.routes.objects import AssistantMessage, FunctionMessage, ToolMessage, UserMessage
from oaiserve.routes.scores import RerankBody, ScoreBody
from oaiserve.telemetry import names, vllm_names
from tools.markdown import as_markdown, write_between

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
# The structs that check what clients send, by the markers of their table and the heads of its columns.
BODIES: dict[str, dict[str, type[msgspec.Struct]]] = {
    "generation-parameters": {"chat": ChatBody, "completions": CompletionBody},
    "message-fields": {
        "system, developer, user": UserMessage,
        "assistant": AssistantMessage,
        "tool": ToolMessage,
        "function": FunctionMessage,
    },
    "response-parameters": {"responses": ResponsesBody},
    "messages-parameters": {"messages": MessagesBody},
    "pooling-parameters": {"embeddings": EmbeddingBody, "score": ScoreBody, "rerank": RerankBody},
    "tokenizer-parameters": {"`/tokenize`": TokenizeBody, "`/detokenize`": DetokenizeBody},
}


def tables() -> dict[tuple[str, str], str]:
    """Return the text between the markers, by the name of the page and of the markers."""
    return {
        ("flags.md", "flags"): flags(),
        **{("api.md", name): parameters(bodies) for name, bodies in BODIES.items()},
        ("metrics.md", "metrics"): metrics(names.METRICS),
        ("metrics.md", "genai-metrics"): metrics(names.GEN_AI_METRICS),
        ("metrics.md", "vllm-metrics"): metrics(vllm_names.METRICS),
    }


def flags() -> str:
    """Return a table for each group of flags."""
    app = command_line(lambda config, sock: 0)
    lines: list[str] = []
    for command, group, title in (
        ("serve", "Parameters", "Settings in a file"),
        ("serve", "Server", "Server"),
        ("serve", "Engine", "Engine"),
        ("serve", "Telemetry", "Telemetry"),
        ("serve", "Several models", "Several models"),
        ("route", "Route", "Gateway: `oaiserve route`"),
    ):
        arguments = app[command].assemble_argument_collection(
            default_parameter=app.default_parameter, parse_docstring=True
        )
        table = [["flag", "default", "what it sets"]]
        for argument in arguments:
            if argument.names[0].startswith("--") and argument.parameter.group[0].name == group:
                table.append(_flag(argument))
        lines += [f"## {title}", "", *as_markdown(table), ""]
    return "\n".join(lines)


def _flag(argument: Any) -> list[str]:
    default = argument.field_info.default
    text = " ".join(argument.parameter.help.split())
    text = text.replace("|", "\\|")  # which means something in a table
    if choices := argument.get_choices():
        text += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
    if isinstance(default, bool):
        default = "on" if default else "off"
    shown = "" if default in ((), None) else f"`{default}`"
    return [", ".join(f"`{name}`" for name in argument.names), shown, text]


def parameters(bodies: dict[str, type[msgspec.Struct]]) -> str:
    """Return a table of the fields of these structs, with the types that JSON has for them."""
    columns = {}
    for head, body in bodies.items():
        _, schemas = msgspec.json.schema_components([body])
        columns[head] = schemas[body.__name__]["properties"]
        if body is MessagesBody:  # the others mean what they mean on /v1/chat/completions
            usual = set(SamplingBody.__struct_fields__) - {"model", "max_tokens", "stream"}
            columns[head] = {name: field for name, field in columns[head].items() if name not in usual}
    fields = dict.fromkeys(name for properties in columns.values() for name in properties)
    table = [["parameter" if len(bodies) > 1 else "field", *bodies]]
    for name in fields:
        kinds = (" or ".join(_types(properties[name])) if name in properties else "" for properties in columns.values())
        table.append([f"`{name}`", *kinds])
    return "\n".join(as_markdown(table))


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


def metrics(rows: Iterable[names.Metric]) -> str:
    table = [["metric", "type", "labels", "what"]]
    for metric in rows:
        table.append([f"`{metric.name}`", metric.type, ", ".join(f"`{label}`" for label in metric.labels), metric.help])
    return "\n".join(as_markdown(table))


def main() -> None:
    for (page, name), text in tables().items():
        write_between(FOLDER / page, name, text)


if __name__ == "__main__":
    main()
