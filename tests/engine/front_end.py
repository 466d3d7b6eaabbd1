"""Requests of all kinds, as front ends make them, and values as text, for comparisons of what has travelled."""

from dataclasses import replace

from oaiserve.engine.request import ChatPrompt, Request, SamplingParams, TextPrompt, TokenPrompt

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
    """Return all fields of a value as text, including those of errors."""
    if isinstance(value, Exception):
        return f"{type(value).__name__} {value.args} {vars(value)}"
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return f"{type(value).__name__}({', '.join(f'{name}={described(getattr(value, name))}' for name in fields)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    return repr(value)
