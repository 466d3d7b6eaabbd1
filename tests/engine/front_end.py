"""A front end without an engine, which makes requests, and makes records from the events that come back.

`python -m tests.engine.front_end` runs one in a process of its own, which talks through standard input and output.
It imports neither torch nor a tokenizer.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from oaiserve.engine.request import (
    TERMINAL,
    ChatPrompt,
    Event,
    Failed,
    Request,
    SamplingParams,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
)
from oaiserve.engine.streams import LoopStream, RequestEngine
from oaiserve.facts.record import RequestRecord
from oaiserve.facts.trace import TraceContext
from oaiserve.routes.exchange import Accounting, Exchange

NO_ENGINE = cast(RequestEngine, None)
BLOCKED = "blocked"


def requests() -> list[Request]:
    """Return requests of all kinds, which end in all ways. The last one is to be aborted while it is encoded."""
    text, hello = TextPrompt("abc def"), {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    everything = SamplingParams(
        n=2,
        max_tokens=6,
        logprobs=1,
        prompt_logprobs=0,
        logit_bias={5: 1.0},
        bad_words=("no", "never"),
        stop=("cd",),
        repetition_penalty=1.1,
        seed=3,
    )
    few = SamplingParams(max_tokens=9, temperature=0)
    return [
        Request("text", (text, TextPrompt("x")), few, echo=True, received_ns=1),
        Request("ids", (TokenPrompt([1, 2, 3, 4, 5, 6, 7, 8, 9]),), everything, priority=2, received_ns=2),
        Request("again", (TokenPrompt([1, 2, 3, 4, 5, 6, 7, 8, 9]),), few),
        Request("chat", (ChatPrompt([hello], template_kwargs={"tools": [{"name": "t"}]}),), few, stream_interval=0),
        Request("too long", (TokenPrompt([1] * 500),), few),
        Request("no words", (text,), replace(few, bad_words=(" ",))),
        Request("none", (text,), replace(few, max_tokens=0)),
        Request(BLOCKED, (TextPrompt(BLOCKED),), few),
    ]


def record_of(request: Request, events: list[Event]) -> RequestRecord:
    """Return the record that the routes make of a request, without the stamp `responded`."""
    records: list[RequestRecord] = []
    serving = SimpleNamespace(record=records.append, model_name="demo")
    app = SimpleNamespace(state=SimpleNamespace(serving=serving))
    scope = {"type": "http", "method": "POST", "scheme": "http", "app": app, "headers": []}
    exchange = Exchange(request.request_id, request.request_id, TraceContext(trace_id=1, span_id=2), "key-1")
    exchange.stream = LoopStream(request, NO_ENGINE)
    for event in events:
        if isinstance(event, TokenChunk) and event.finish_reason is not None:
            exchange.finish_reasons[event.index] = event.finish_reason
        if isinstance(event, Failed):
            exchange.error = event.error
        exchange.stream.push(event)
    Accounting(cast(Any, None), operation="chat", http_route="/")._finish(scope, exchange)
    (record,) = records
    return replace(record, times=replace(record.times, responded=None))


def described(value: object) -> str:
    """Return all fields of a value as text, including those of errors."""
    if isinstance(value, Exception):
        return f"{type(value).__name__} {value.args} {vars(value)}"
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return f"{type(value).__name__}({', '.join(f'{name}={described(getattr(value, name))}' for name in fields)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    return repr(value)


def main() -> None:
    """Send the requests, take their events until each has ended, and send what these are and the records of them."""
    sent = {request.request_id: request for request in requests()}
    pickle.dump(list(sent.values()), sys.stdout.buffer)
    sys.stdout.buffer.flush()
    events: dict[str, list[Event]] = {request_id: [] for request_id in sent}
    num_open = len(sent)
    while num_open:
        for event in pickle.load(sys.stdin.buffer):
            events[event.request_id].append(event)
            num_open -= isinstance(event, TERMINAL)
    found = {
        name: (described(events[name]), described(record_of(request, events[name]))) for name, request in sent.items()
    }
    pickle.dump(found, sys.stdout.buffer)


if __name__ == "__main__":
    main()
