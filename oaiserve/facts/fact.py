"""`Fact` is a row of the table of facts: the meaning of a number or a word, and its name in each place that shows it.

The table is part of the records: the fields of `RequestRecord`, `EngineAccount` and `EngineNumbers` are declared with
their rows. The rows generate the JSON of /debug, log lines, spans and metrics. Reading and writing a field takes no
longer than in any other dataclass. This module needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Fact:
    """The row of one field. If the name for a place is empty, that place does not show the field.

    A time is in nanoseconds, and its field ends in `_ns`. Metrics show it in seconds, log lines in milliseconds.
    """

    name: str  # name of the field, or its path
    meaning: str  # the help text of the metric, if there is one
    json: str = ""  # key in the JSON of /debug/requests; "grammar.kind" is the key `kind` of an object `grammar`
    log: str = ""  # key in the log line of an ended request
    span: str = ""  # the attribute of the span of the request's operation
    server_span: str = ""  # the attribute of the span of the whole request
    metric: str = ""  # name in /metrics
    # Names of fields of the same record. While such a field has no value, the log line or the span omits this fact.
    log_when: str = ""
    span_when: str = ""


def fact(
    meaning: str,
    default: Any = 0,
    *,
    new: Callable[[], Any] | None = None,
    json: str | bool = False,
    log: str | bool = False,
    span: str = "",
    server_span: str = "",
    spans: str = "",
    metric: str = "",
    log_when: str = "",
    span_when: str = "",
    when: str = "",
) -> Any:
    """Declare a field of a dataclass with its row. `json` and `log` are a name, or True for the field's own.

    `when` sets both `log_when` and `span_when`, and `spans` sets both `span` and `server_span`. `new` makes a mutable
    default. A field whose default is `...` is required.
    """
    row = {"meaning": meaning, "json": json, "log": log, "metric": metric}
    row |= {"span": span or spans, "server_span": server_span or spans}
    row |= {"log_when": log_when or when, "span_when": span_when or when}
    if new is not None:
        return field(default_factory=new, metadata=row)
    if default is ...:
        return field(metadata=row)
    return field(default=default, metadata=row)


def facts_within(kind: type) -> Any:
    """Declare a field that contains a record of this kind, whose facts count as facts of the outer record."""
    return field(default_factory=kind, metadata={"kind": kind})


def facts_of(record: type) -> tuple[Fact, ...]:
    """Return the rows of a record's fields. Facts of an inner record are named by their path, such as "media.num"."""
    rows: list[Fact] = []
    for one in fields(record):
        if "kind" in one.metadata:
            rows += (_within(one.name, row) for row in facts_of(one.metadata["kind"]))
        elif one.metadata:
            rows.append(_fact(one.name, **one.metadata))
    return tuple(rows)


def _within(name: str, row: Fact) -> Fact:
    log_when, span_when = (when and f"{name}.{when}" for when in (row.log_when, row.span_when))
    return replace(row, name=f"{name}.{row.name}", log_when=log_when, span_when=span_when)


def _fact(name: str, *, json: str | bool, log: str | bool, **row: str) -> Fact:
    in_log = f"{name.removesuffix('_ns')}_ms" if name.endswith("_ns") else name
    return Fact(name, json=name if json is True else json or "", log=in_log if log is True else log or "", **row)
