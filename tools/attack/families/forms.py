"""Requests that are wrong in their form: each refusal has the form of OpenAI's errors."""

from __future__ import annotations

import gzip
import zlib

from oaiserve.routes.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tools.attack.attack import (
    ATTACKER_KEY,
    CHAT,
    COMPLETIONS,
    ENDED,
    HI,
    REFUSED,
    Number,
    Sent,
    Strike,
    attack,
    burst,
    outcomes,
    post,
    request,
)

DEPTH = 50_000
DEEP = (b"[" * DEPTH + b"]" * DEPTH, b'{"a":' * DEPTH + b"1" + b"}" * DEPTH, b"[" * DEPTH)
BODIES = {  # the type of each body, and the fields that it needs
    COMPLETIONS: (CompletionBody, b'"prompt": "Hi"'),
    CHAT: (ChatBody, b'"messages": [{"role": "user", "content": "Hi"}]'),
    "/tokenize": (TokenizeBody, b'"prompt": "Hi"'),
    "/detokenize": (DetokenizeBody, b'"tokens": [7]'),
}
BOMB_BYTES = 1 << 30
REFUSED_OR_DONE = REFUSED | outcomes(200)


@burst("each field, nested 50,000 deep", REFUSED_OR_DONE, 8, limit_seconds=120)
def deep_fields(number: Number) -> list[Sent]:
    return [
        post(path, b'{"%s": %s, %s}' % (name.encode(), deep, valid))
        for path, (kind, valid) in BODIES.items()
        for name in (*kind.__struct_fields__, "response_format", "tools", "metadata", "no_such_name")
        for deep in DEEP[: number(3, 1)]
    ]


@burst('chat_template_kwargs {"self": 1} and other names', outcomes(200, 400), 1, limit_seconds=120, is_work=True)
def template_arguments(number: Number) -> list[Sent]:
    """Names that the template, its environment or the code that calls it use themselves."""
    names = ("self", "messages", "tools", "conversation", "chat_template", "add_generation_prompt", "loop", "namespace",
             "raise_exception", "strftime_now", "tokenizer", "context", "environment", "args", "kwargs", "tokenize",
             "return_dict", "padding", "truncation", "max_length", "return_tensors", "__class__", "bos_token", "",
             "continue_final_message", "documents", "return_assistant_tokens_mask")  # fmt: skip
    return [
        post(CHAT, {"messages": HI, "max_tokens": 1, "chat_template_kwargs": {name: value}})
        for name in names
        for value in (1, None, {"self": 1}, "{{ 7 * 7 }}")
    ]


@burst("arguments of tools nested 50,000 deep", outcomes(200, 400), 1, is_work=True)
def deep_tool_calls(number: Number) -> list[Sent]:
    """Arguments of a tool are parsed by some templates, and hold any JSON."""
    found: list[Sent] = []
    as_text = b'"' + b"[" * DEPTH + b"]" * DEPTH + b'"'
    for arguments in (*DEEP[:2], as_text, b'"' + b'{\\"a\\":' * DEPTH + b'"', b'"not JSON"', b"1e999", b'"NaN"'):
        for function in (b'{"name": "f", "arguments": %s}', b'{"name": "f", "arguments": {"x": %s}}'):
            call = b'{"id": "a", "type": "function", "function": %s}' % (function % arguments)
            message = b'{"role": "assistant", "content": null, "tool_calls": [%s]}' % call
            body = b'{"messages": [{"role": "user", "content": "Hi"}, %s], "max_tokens": 1}' % message
            found += [post(path, body) for path in (CHAT, "/tokenize")]
    return found


@burst("gzip bodies, and gzip bombs of 1 GiB", REFUSED, 1)
def compressed(number: Number) -> list[Sent]:
    """Bodies with a content-encoding, true or not: refused in words, and never expanded."""
    plain = b'{"prompt": "Hi", "max_tokens": 1}'
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(BOMB_BYTES >> 20)) + packer.flush()
    bodies = (("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain)), ("br", plain), ("gzip", plain),
              ("gzip", bomb), ("gzip, gzip", gzip.compress(bomb)), ("zstd", plain),
              ("identity, gzip", gzip.compress(plain)))  # fmt: skip
    return [post(COMPLETIONS, body, {"content-encoding": encoding}) for encoding, body in bodies]


@burst("bodies that are no JSON, or barely", REFUSED, 4)
def broken_json(number: Number) -> list[Sent]:
    bodies = (b"", b"{", b"null", b"[]", b'"x"', b"{}" * 1000, b"\xff\xfe{\0}\0", b'{"prompt": "\xff"}', b"\0" * 1000,
              b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b"{" + b'"a":1,' * 100_000 + b'"a":1}', b"9" * 100_000,
              b"[" * 1_000_000, b'{"prompt":' * 100_000, b'"' + b"\\" * 99_999, b'{"model": 5}')  # fmt: skip
    return [post(path, body) for path in BODIES for body in bodies]


@burst("request lines that are none", REFUSED_OR_DONE | ENDED | outcomes(505, 417, 501), 1, bare=True,
       answer_seconds=10, limit_seconds=120)  # fmt: skip
def broken_http(number: Number) -> list[Sent]:
    """Requests that are no HTTP/1.1, or ask for what no server needs to do."""
    lines = ("GET / HTTP/3.7", "GET /health", "get /health HTTP/1.1", "GET  /health  HTTP/1.1", "\x01 / HTTP/1.1",
             "GET http://attacker.example/health HTTP/1.1", "CONNECT attacker.example:443 HTTP/1.1",
             "GET /\x00 HTTP/1.1", "GET /%00%ff%zz HTTP/1.1", "TRACE / HTTP/1.1", "X" * 1000 + " / HTTP/1.1",
             "GET /../../etc/passwd HTTP/1.1", "GET /dashboard/static/..%2f..%2fapp.py HTTP/1.1",
             "GET /v1/models/\xff\xfe HTTP/1.1", "GET * HTTP/1.1", "GET ? HTTP/1.1", "GET #a HTTP/1.1",
             f"GET /{'a/' * 4000} HTTP/1.1", f"GET /health?{'a=b&' * 4000} HTTP/1.1")  # fmt: skip
    rest = f"\r\nhost: localhost\r\nauthorization: Bearer {ATTACKER_KEY}\r\nconnection: close\r\n\r\n"
    return [
        *(f"{line}{rest}".encode("latin-1") for line in lines),
        post(COMPLETIONS, b"{}", {"expect": "the-impossible"}, key=None),
        b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n",  # no Host
        b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: close\r\n\r\n",
    ]


@attack("one of each kind of answer: nosniff on all", REFUSED_OR_DONE | outcomes(308), is_work=True)
async def every_answer(strike: Strike) -> None:
    """One of each kind of answer: all carry nosniff, an id, and no server's name."""
    question = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
    preflight = {"origin": "https://x.example", "access-control-request-method": "POST"}
    paths = ("/health", "/ready", "/version", "/metrics", "/v1/models", "/dashboard", "/dashboard/static/app.js",
             "/debug/requests", "/no", "/v1/models/x", CHAT)  # fmt: skip
    posts = ((CHAT, question), (CHAT, question[:-1] + b', "stream": true}'), (CHAT, b"{"), (CHAT, b" " * (9 << 20)),
             ("/tokenize", b'{"prompt": "Hi"}'), ("/v1/embeddings", b"{}"))  # fmt: skip
    asked = [("GET", path, request("GET", path)) for path in paths]
    asked += [("POST", path, post(path, body)) for path, body in posts]
    asked += [("POST", CHAT, post(CHAT, question, key=None))]
    asked += [("OPTIONS", CHAT, request("OPTIONS", CHAT, headers=preflight, key=None))]
    for method, path, data in asked:
        answer = await strike.ask(data)
        about = f"{method} {path} ({answer.outcome})"
        strike.check(answer.headers.get("x-content-type-options") == "nosniff", f"{about} has no nosniff")
        strike.check("server" not in answer.headers, f"{about} names its server")
