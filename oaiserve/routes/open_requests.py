"""Lists the open requests for `/debug/requests` and the live page: the engine's, and those that only this process
knows, because their bodies are still arriving or the ends of their answers are still being written."""

from __future__ import annotations

from itertools import islice
from typing import Any

from oaiserve.facts.open_row import MOST_SHOWN, OpenRow
from oaiserve.facts.record import Origin
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.serving import AnyServing


def open_requests(serving: AnyServing) -> list[OpenRow]:
    """Return the newest open requests, newest first. Call it in a worker thread, since it may take milliseconds."""
    in_engine = serving.telemetry.recent.open()
    epoch_offset_ns = serving.runtime.unix_ns() - serving.runtime.clock_ns()
    own = (
        exchange
        for exchange in reversed(serving.exchanges.copy().values())
        if exchange.received_ns is not None
        and exchange.engine_id not in in_engine
        and (exchange.stream is None or exchange.stream.ended)
    )
    rows = [_row(serving, exchange, epoch_offset_ns) for exchange in islice(own, MOST_SHOWN)]
    return sorted([*in_engine.values(), *rows], key=lambda row: -row.received_unix_ns)


def open_request(serving: AnyServing, request_id: str) -> OpenRow | None:
    """Return the open request with this id, if there is one, however many are newer. Call it in a worker thread."""
    exchanges = serving.exchanges.copy().values()
    named = (each for each in exchanges if each.request_id == request_id and each.received_ns is not None)
    exchange = next(named, None)
    if exchange is None:  # A front process may have it.
        return next((row for row in serving.telemetry.recent.open().values() if row.request_id == request_id), None)
    if exchange.engine_id is not None and (rows := serving.telemetry.recent.open(exchange.engine_id)):
        return rows[exchange.engine_id]
    return _row(serving, exchange, serving.runtime.unix_ns() - serving.runtime.clock_ns())


def _row(serving: AnyServing, exchange: Exchange, epoch_offset_ns: int) -> OpenRow:
    model = serving.name_of(exchange.adapter)
    origin = Origin(exchange.request_id, exchange.operation, exchange.http_route, model, client=exchange.key_name)
    tokens: dict[str, Any] = {}
    if exchange.stream is not None and exchange.stream.terminal is not None:
        usage = exchange.stream.terminal.usage
        tokens = {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "computed_prompt_tokens": usage.prompt_tokens if exchange.times.first_token is not None else 0,
            "completion_tokens": usage.completion_tokens,
        }
    return OpenRow.of(origin, exchange.times, exchange.clock_ns, epoch_offset_ns, **tokens)
