"""`Passed`: one request that the gateway passes to an engine, as its account sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from oaiserve import errors
from oaiserve.engine.request import Finished, Usage
from oaiserve.errors import APIError, InternalError, InvalidRequest
from oaiserve.explain.reuse.recent_prompts import RecentPrompts
from oaiserve.plugins.gateway.engines.account import PassedAccount
from oaiserve.plugins.gateway.engines.engine import ForeignEngine
from oaiserve.plugins.gateway.engines.presence import Presence
from oaiserve.plugins.gateway.engines.read_again import PromptReader, compare
from oaiserve.plugins.gateway.engines.reading import Told
from oaiserve.routes.exchange import Exchange

_KINDS = (
    *(errors.BadGateway, errors.BodyTooLarge, errors.Forbidden, errors.NotFound, errors.Overloaded),
    *(errors.RequestTimeout, errors.Unauthorized, errors.Unavailable),
)
_ERRORS: dict[int, type[APIError]] = {kind.status: kind for kind in _KINDS}
# The reasons of engines, in the words of the record's metrics
_REASONS = {
    **dict.fromkeys(("stop", "tool_calls", "function_call", "end_turn", "stop_sequence", "tool_use"), "stop"),
    "max_tokens": "length",
}


class NamedModel(NamedTuple):
    """A model of an engine, by the name that the engine lists."""

    name: str


@dataclass(slots=True, eq=False)
class Passed(Presence):
    """A request passed to a foreign engine. In its account, it takes the place of a stream of our own engine."""

    account: PassedAccount = field(default_factory=PassedAccount)
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    tokens: int = 0  # tokens of its prompt, estimated from the size of its body until the engine reports them
    prompt: PromptReader | None = None
    ended = True  # read by the list of open requests, to which no engine adds this one

    @property
    def terminal(self) -> Finished:
        """Return the usage, the stamps and the account of the request so far."""
        return Finished("", self.usage, self.times, self.account)

    def on_end(self, callback: Callable[[Finished], None]) -> None:
        """Call back at once: the account asks for this when the answer has ended."""
        callback(self.terminal)

    def note(self, exchange: Exchange, engine: ForeignEngine, told: Told, unread: str, recent: RecentPrompts) -> None:
        """Add the facts in a request's answer to its account, and the other requests at the engine."""
        self.usage = Usage(told.prompt_tokens or 0, told.cached_tokens or 0, told.completion_tokens or 0)
        if told.prompt_tokens is None and told.first_text_ns is not None:  # Limits then count each event as a token.
            exchange.used_tokens = self.tokens + len(told.gaps_ns) + 1
        if self.account.num_choices == 1:
            self.account.note_length(self.usage.completion_tokens)
        identity = engine.identity
        exchange.routing = {"engine": engine.number, "engine_kind": identity.kind, "engine_version": identity.version}
        if unread:
            exchange.routing = {**exchange.routing, "unread": unread}
        exchange.response_id = told.response_id
        exchange.event_gaps_ns = told.gaps_ns
        exchange.answer_facts.finish_reasons = told.finish_reasons
        exchange.answer_facts.reasoning_tokens = told.reasoning_tokens
        exchange.finish_reasons = {index: _REASONS.get(why, why) for index, why in told.finish_reasons.items()}
        if exchange.error is None:
            exchange.error = error_of(exchange.http_status or 200, told.error)
        if exchange.is_streaming and exchange.http_status == 200:
            self.times.first_token = told.first_text_ns or (self.times.first_byte if unread else None)
        reader = self.prompt
        self.prompt = None  # Release the body: this request is still held among the engine's recent ones.
        prompt = None if reader is None or exchange.http_status != 200 else reader.result()
        answered_ns = self.times.last_token or self.times.first_byte
        if prompt is not None and answered_ns is not None:
            self.account.prompts = [[*prompt.pieces]]  # In a recording, the pieces take the place of tokens.
            self.account.said_of_reuse = compare(exchange, prompt, told, self.times, recent, answered_ns)
        tokens = self.tokens if told.prompt_tokens is None else told.prompt_tokens - (told.cached_tokens or 0)
        is_stream = exchange.is_streaming and exchange.error is None
        if is_stream or exchange.http_status == 200:
            self.account.divide(self, engine.presences, told, tokens, engine.reported, is_stream=is_stream)


def error_of(status: int, text: str | None) -> APIError | None:
    """Return the error of ours that is most like an engine's, for the account, or None for none."""
    if status < 400:
        return None if text is None else InternalError("The engine has reported an error in its answer.")
    kind = _ERRORS.get(status, InvalidRequest if status < 500 else InternalError)
    return kind(f"The engine has answered {status}.")
