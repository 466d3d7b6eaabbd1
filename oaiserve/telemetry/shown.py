"""Reads the facts of a record by their rows, for the JSON of /debug, log lines and attributes of spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from oaiserve.facts.fact import Fact, facts_of
from oaiserve.facts.record import EngineAccount, RequestRecord, StepRecord

_OF_RECORD, _OF_ACCOUNT, _OF_STEP = map(facts_of, (RequestRecord, EngineAccount, StepRecord))


def json_of(record: RequestRecord) -> dict[str, Any]:
    """Return the facts of a request for JSON. An object whose facts all have no value, such as `grammar`, is None."""
    shown: dict[str, Any] = {}
    for owner, rows in _owners(record):
        for row in rows:
            if row.json:
                name, _, inner = row.json.partition(".")
                value = _plain(getattr(owner, row.name))
                if not inner:
                    shown[name] = value
                elif (group := shown.setdefault(name, {})) is not None:
                    group[inner] = value
    return shown | {name: None for name, value in shown.items() if name == "grammar" and value["kind"] is None}


def log_fields(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of the log line of a request. Times are in milliseconds."""
    return {
        row.log: in_ms(value) if row.name.endswith("_ns") else _plain_word(value)
        for owner, rows in _owners(record)
        for row in rows
        if row.log and (not row.log_when or getattr(owner, row.log_when))
        for value in (getattr(owner, row.name),)
    }


def attributes(record: RequestRecord) -> dict[str, Any]:
    """Return the attributes of the span of a request's operation."""
    return {name: value for owner, rows in _owners(record) for name, value in _attributes(owner, rows)}


def step_attributes(step: StepRecord) -> dict[str, Any]:
    """Return the attributes of the span of a step."""
    return dict(_attributes(step, _OF_STEP))


def in_ms(duration_ns: int) -> float:
    """Return a time in milliseconds, to the microsecond."""
    return round(duration_ns / 1e6, 3)


def _owners(record: RequestRecord) -> tuple[tuple[object, tuple[Fact, ...]], ...]:
    return ((record, _OF_RECORD), (record.account, _OF_ACCOUNT))


def _attributes(owner: object, rows: tuple[Fact, ...]) -> Iterator[tuple[str, Any]]:
    for row in rows:
        if row.span and (not row.span_when or getattr(owner, row.span_when)):
            value = _plain_word(getattr(owner, row.name))
            if value is not None:
                yield row.span, value


def _plain_word(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return {str(name): one for name, one in value.items()}
    return _plain_word(value)
