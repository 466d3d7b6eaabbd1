"""The engine doesn't change the requests that it gets."""

from dataclasses import replace

import pytest

from oaiserve.engine.request import (
    Aborted,
    ChatPrompt,
    Failed,
    Finished,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)
from tests.engine.doubles import (
    BlockedTokenizer,
    Inbox,
    ScriptedRunner,
    device_is_gone,
    make_engine,
    request,
)

BLOCKED = "blocked"


def requests() -> list[Request]:
    """Return requests of all kinds, which end in all ways. The last one is aborted while it is encoded."""
    text = TextPrompt("abc def")
    hello = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
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
        Request("text", (text, TextPrompt("x")), few, received_ns=1),
        Request("ids", (TokenPrompt([1, 2, 3, 4, 5, 6, 7, 8, 9]),), everything, priority=2, received_ns=2),
        Request("again", (TokenPrompt([1, 2, 3, 4, 5, 6, 7, 8, 9]),), few),
        Request("chat", (ChatPrompt([hello], template_kwargs={"tools": [{"name": "t"}]}),), few, stream_interval=0),
        Request("too long", (TokenPrompt([1] * 500),), few),
        Request("no words", (text,), replace(few, bad_words=(" ",))),
        Request("none", (text,), replace(few, max_tokens=0)),
        Request(BLOCKED, (TextPrompt(BLOCKED),), few),
    ]


def described(value: object) -> str:
    """Return all fields of a value as text, at all levels."""
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return f"{type(value).__name__}({', '.join(f'{name}={described(getattr(value, name))}' for name in fields)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    return repr(value)


def serve(asked: list[Request]) -> None:
    """Run the requests until all have ended as they are expected to."""
    inbox = Inbox()
    tokenizer = BlockedTokenizer()
    with make_engine(tokenizer=tokenizer, kv_blocks=64) as engine:
        for request in asked:
            engine.submit(request, inbox)
        tokenizer.entered.wait()
        engine.abort(BLOCKED)
        ended = inbox.wait_terminal(*(request.request_id for request in asked))
        tokenizer.release.set()
    assert {name: type(event) for name, event in ended.items()} == {
        **dict.fromkeys(("text", "ids", "again", "chat", "none"), Finished),
        **dict.fromkeys(("too long", "no words"), Failed),
        BLOCKED: Aborted,
    }


@pytest.mark.usefixtures("overlap")
def test_requests_are_unchanged_after_they_have_ended() -> None:
    submitted = requests()
    before = [described(request) for request in submitted]
    serve(submitted)
    assert [described(request) for request in submitted] == before


@pytest.mark.parametrize("reason", ["the step fails", "the server stops"])
def test_a_request_that_is_encoded_when_the_engine_ends_is_in_that_phase(reason: str) -> None:
    tokenizer = BlockedTokenizer()
    inbox = Inbox()
    engine = make_engine(ScriptedRunner(computing=device_is_gone), tokenizer=tokenizer)
    engine.start()
    blocked = requests()[-1]
    engine.submit(blocked, inbox)
    tokenizer.entered.wait()
    if reason == "the step fails":
        engine.submit(request("fails"), inbox)
    else:
        engine.world.begin(engine.stop)
    ended = inbox.wait_terminal(BLOCKED)[BLOCKED]
    assert isinstance(ended, Failed)
    assert ended.times.ended(engine.world.clock_ns).phases()[-1].name == "tokenize"
    tokenizer.release.set()
    engine.stop()
