"""Shows the facts of a record, according to their rows, and summaries, in the JSON of /debug, in log lines and in span
attributes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from math import ceil
from operator import attrgetter
from typing import Any, NamedTuple

from oaiserve.facts.fact import Fact, facts_of
from oaiserve.facts.record import OF_NEIGHBOURS, Cause, EngineAccount, RequestRecord
from oaiserve.telemetry.names import ROUTING_PREFIX

MOST_SORTED = 8192  # most gaps that one call sorts, which holds the GIL for about a millisecond
# A field's path from the record, the name under which it is shown, and the path of the field that it depends on.
_Row = tuple[str, str, str]


class _Place:
    """The rows that one place shows, grouped by the field that they depend on: without its value, they are omitted.

    The fields of a group are read by one call of an attrgetter, which is fast, because a log line has more than twenty.
    """

    def __init__(self, rows: Iterable[_Row]) -> None:
        groups: dict[str, list[_Row]] = {}
        for row in rows:
            groups.setdefault(row[2], []).append(row)
        self._groups: list[tuple[Callable[[Any], Any] | None, list[str], Callable[[Any], tuple[Any, ...]]]] = []
        for when, group in groups.items():
            paths = [path for path, _, _ in group]
            # The first path is given twice, because attrgetter returns a tuple only for several paths.
            getter = attrgetter(*paths, paths[0])
            self._groups.append((attrgetter(when) if when else None, [name for _, name, _ in group], getter))

    def values(self, record: object) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for when, names, values in self._groups:
            if when is None or when(record):
                fields.update(zip(names, values(record), strict=False))
        return fields


def _rows(name: Callable[[Fact], str], when: Callable[[Fact], str]) -> list[_Row]:
    return [
        (prefix + row.name, name(row), prefix + when(row) if when(row) else "")
        for prefix, record in (("", RequestRecord), ("account.", EngineAccount))
        for row in facts_of(record)
        if name(row)
    ]


_JSON_ROWS = _rows(lambda row: row.json, lambda row: "")
_JSON = _Place(row for row in _JSON_ROWS if "." not in row[1])
_GRAMMAR, _MEDIA, _LOOP, _COST = (
    _Place((path, name.removeprefix(within), "") for path, name, _ in _JSON_ROWS if name.startswith(within))
    for within in ("grammar.", "media.", "loop.", "cost.")
)
_LOG_ROWS = _rows(lambda row: row.log, lambda row: row.log_when)
_LOG = _Place(_LOG_ROWS)
_LOG_TIMES = frozenset(name for path, name, _ in _LOG_ROWS if path.endswith("_ns"))
_SPAN = _Place(_rows(lambda row: row.span, lambda row: row.span_when))
_SERVER_SPAN = _Place(_rows(lambda row: row.server_span, lambda row: row.span_when))
_SIMPLE = frozenset({int, float, str, bool, type(None)})  # types of values that are shown as they are


def json_of(record: RequestRecord) -> dict[str, Any]:
    """Return the facts of a request for JSON. If it has no grammar, media or loop, that key is None."""
    grammar = _GRAMMAR.values(record)
    shown = {name: value if type(value) in _SIMPLE else _plain(value) for name, value in _JSON.values(record).items()}
    shown["grammar"] = None if grammar["kind"] is None else grammar
    shown["media"] = _MEDIA.values(record) if record.account.media.num else None
    shown["loop"] = _LOOP.values(record) if record.account.num_loops else None
    shown["cost"] = _COST.values(record)
    return shown


def log_fields(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of the log line of a request. Times are in milliseconds."""
    return {name: in_ms(value) if name in _LOG_TIMES else value for name, value in _LOG.values(record).items()}


def attributes(record: RequestRecord) -> dict[str, Any]:
    return _attributes(_SPAN, record) | _routing(record)


def server_attributes(record: RequestRecord) -> dict[str, Any]:
    return _attributes(_SERVER_SPAN, record) | _routing(record)


def _routing(record: RequestRecord) -> dict[str, Any]:
    return {ROUTING_PREFIX + name: value for name, value in record.routing.items()}


def _attributes(place: _Place, record: object) -> dict[str, Any]:
    return {name: value for name, value in place.values(record).items() if value is not None}


def in_ms(duration_ns: int) -> float:
    """Return a time in milliseconds, rounded to the microsecond."""
    return round(duration_ns / 1e6, 3)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return {str(name): one for name, one in value.items()}
    return value


_SUMMED = (Cause.ALONE, *OF_NEIGHBOURS, Cause.MACHINE)


def phase_row(name: str, duration_ns: int, causes_ns: Mapping[Cause, int]) -> list[str | int]:
    """Return the name of a phase and its time. If its causes are known, three cumulative times follow: alone, with the
    time that neighbours added, and with the machine's delays. If there are other causes, the largest of them comes
    last, which may be `not_known_yet`."""
    if not causes_ns:
        return [name, duration_ns]
    alone_ns = causes_ns.get(Cause.ALONE, 0)
    shared_ns = alone_ns + sum(causes_ns.get(cause, 0) for cause in OF_NEIGHBOURS)
    delayed_ns = shared_ns + causes_ns.get(Cause.MACHINE, 0)
    rest = [cause for cause in causes_ns if cause not in _SUMMED]
    largest = max(rest, key=causes_ns.__getitem__, default=None)
    return [name, duration_ns, alone_ns, shared_ns, delayed_ns, *([] if largest is None else [largest.value])]


class Steps(NamedTuple):
    """The engine's steps from the first to the last step of a request, including the sequences of other requests."""

    first: int
    number: int
    mean_sequences: float
    mean_tokens: float
    model_ns: int
    between_ns: int | None  # the rest of prefill and decode; None if there was no last token


def steps_of(record: RequestRecord) -> Steps | None:
    account = record.account
    times = record.times
    if account.first_step is None or account.num_steps == 0:
        return None
    between_ns = None
    if times.scheduled is not None and times.last_token is not None:
        between_ns = times.last_token - times.scheduled - account.model_ns
    return Steps(
        account.first_step,
        account.num_steps,
        account.num_step_sequences / account.num_steps,
        account.num_step_tokens / account.num_steps,
        account.model_ns,
        between_ns,
    )


class TokenGaps(NamedTuple):
    """The distribution of the time between two events of a choice in a stream (ITL), by nearest rank."""

    number: int
    p50_ns: int
    p99_ns: int
    max_ns: int


def token_gaps(gaps_ns: array[int]) -> TokenGaps | None:
    """Return percentiles and maximum of the gaps, or None if no choice has a second event.

    The percentiles of more than MOST_SORTED gaps are those of an evenly spaced sample. The maximum is always exact.
    """
    if not gaps_ns:
        return None
    ranked = sorted(gaps_ns[:: ceil(len(gaps_ns) / MOST_SORTED)])
    max_ns = max(max(gaps_ns[start : start + MOST_SORTED]) for start in range(0, len(gaps_ns), MOST_SORTED))
    return TokenGaps(len(gaps_ns), _percentile(ranked, 50), _percentile(ranked, 99), max_ns)


def mean_event_tokens(record: RequestRecord) -> float | None:
    """Return the mean number of tokens in an event of a stream, or None if there was no event."""
    if record.event_tokens:
        return sum(record.event_tokens) / len(record.event_tokens)
    return None


def _percentile(ranked: list[int], percent: int) -> int:
    return ranked[ceil(len(ranked) * percent / 100) - 1]
