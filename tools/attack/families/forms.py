"""Requests that are wrong in their form: each refusal has the form of OpenAI's errors."""

from __future__ import annotations

import gzip
import zlib
from functools import partial

import msgspec

from oaiserve.routes.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tools.attack.attack import ATTACKER_KEY, CHAT, COMPLETIONS, ENDED, HI, REFUSED, Attack, Strike, outcomes
from tools.attack.wire import request

DEPTH = 50_000
DEEP = (b"[" * DEPTH + b"]" * DEPTH, b'{"a":' * DEPTH + b"1" + b"}" * DEPTH, b"[" * DEPTH)
BODIES: dict[str, type[msgspec.Struct]] = {
    COMPLETIONS: CompletionBody, CHAT: ChatBody, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody,
}  # fmt: skip
VALID = {COMPLETIONS: b'"prompt": "Hi"', CHAT: b'"messages": [{"role": "user", "content": "Hi"}]',
         "/tokenize": b'"prompt": "Hi"', "/detokenize": b'"tokens": [7]'}  # fmt: skip
BOMB_BYTES = 1 << 30


async def deep_fields(strike: Strike) -> None:
    """Each field of each body, and an unknown one, with a value that is nested 50,000 deep."""
    bodies = [
        (path, b'{"%s": %s, %s}' % (name.encode(), deep, VALID[path]))
        for path, kind in BODIES.items()
        for name in (*kind.__struct_fields__, "response_format", "tools", "metadata", "no_such_name")
        for deep in DEEP[: strike.number(3, 1)]
    ]
    await strike.all([partial(strike.post, path, body) for path, body in bodies], 8)


async def template_arguments(strike: Strike) -> None:
    """Names that the template, its environment or the code that calls it use themselves."""
    names = ("self", "messages", "tools", "conversation", "chat_template", "add_generation_prompt", "loop", "namespace",
             "raise_exception", "strftime_now", "tokenizer", "context", "environment", "args", "kwargs", "tokenize",
             "return_dict", "padding", "truncation", "max_length", "return_tensors", "__class__", "bos_token", "",
             "continue_final_message", "documents", "return_assistant_tokens_mask")  # fmt: skip
    for name in names:
        for value in (1, None, {"self": 1}, "{{ 7 * 7 }}"):
            await strike.post(CHAT, {"messages": HI, "max_tokens": 1, "chat_template_kwargs": {name: value}})


async def deep_tool_calls(strike: Strike) -> None:
    """Arguments of a tool are parsed by some templates, and hold any JSON."""
    as_text = b'"' + b"[" * DEPTH + b"]" * DEPTH + b'"'
    for arguments in (*DEEP[:2], as_text, b'"' + b'{\\"a\\":' * DEPTH + b'"', b'"not JSON"', b"1e999", b'"NaN"'):
        for function in (b'{"name": "f", "arguments": %s}', b'{"name": "f", "arguments": {"x": %s}}'):
            call = b'{"id": "a", "type": "function", "function": %s}' % (function % arguments)
            message = b'{"role": "assistant", "content": null, "tool_calls": [%s]}' % call
            body = b'{"messages": [{"role": "user", "content": "Hi"}, %s], "max_tokens": 1}' % message
            await strike.post(CHAT, body)
            await strike.post("/tokenize", body)


async def compressed(strike: Strike) -> None:
    """Bodies with a content-encoding, true or not: refused in words, and never expanded."""
    plain = b'{"prompt": "Hi", "max_tokens": 1}'
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(BOMB_BYTES >> 20)) + packer.flush()
    for encoding, body in (("gzip", gzip.compress(plain)), ("deflate", zlib.compress(plain)), ("br", plain),
                           ("gzip", plain), ("gzip", bomb), ("gzip, gzip", gzip.compress(bomb)),
                           ("zstd", plain), ("identity, gzip", gzip.compress(plain))):  # fmt: skip
        await strike.post(COMPLETIONS, body, headers={"content-encoding": encoding})


async def broken_json(strike: Strike) -> None:
    bodies = (b"", b"{", b"null", b"[]", b'"x"', b"{}" * 1000, b"\xff\xfe{\0}\0", b'{"prompt": "\xff"}', b"\0" * 1000,
              b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b"{" + b'"a":1,' * 100_000 + b'"a":1}', b"9" * 100_000,
              b"[" * 1_000_000, b'{"prompt":' * 100_000, b'"' + b"\\" * 99_999, b'{"model": 5}')  # fmt: skip
    for path in BODIES:
        await strike.all([partial(strike.post, path, body) for body in bodies], 4)


async def every_answer(strike: Strike) -> None:
    """One of each kind of answer: all carry nosniff, an id, and no server's name."""
    key = {"authorization": f"Bearer {ATTACKER_KEY}"}
    question = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
    asked = [
        *(("GET", path, b"", key) for path in ("/health", "/ready", "/version", "/metrics", "/v1/models", "/dashboard",
                                               "/dashboard/static/app.js", "/debug/requests", "/no", "/v1/models/x")),
        ("POST", CHAT, question, key), ("POST", CHAT, question[:-1] + b', "stream": true}', key),
        ("POST", CHAT, b"{", key), ("POST", CHAT, question, {}), ("GET", CHAT, b"", key),
        ("OPTIONS", CHAT, b"", {"origin": "https://x.example", "access-control-request-method": "POST"}),
        ("POST", "/tokenize", b'{"prompt": "Hi"}', key), ("POST", "/v1/embeddings", b"{}", key),
        ("POST", CHAT, b" " * (9 << 20), key),
    ]  # fmt: skip
    for method, path, body, headers in asked:
        answer = await strike.ask(method, path, body, headers, key=None)
        what = f"{method} {path} ({answer.outcome})"
        strike.check(answer.headers.get("x-content-type-options") == "nosniff", f"{what} has no nosniff")
        strike.check("server" not in answer.headers, f"{what} names its server")


async def broken_http(strike: Strike) -> None:
    """Requests that are no HTTP/1.1, or ask for what no server needs to do."""
    key = f"authorization: Bearer {ATTACKER_KEY}\r\n"
    for line in ("GET / HTTP/3.7", "GET /health", "get /health HTTP/1.1", "GET  /health  HTTP/1.1", "\x01 / HTTP/1.1",
                 "GET http://attacker.example/health HTTP/1.1", "CONNECT attacker.example:443 HTTP/1.1",
                 "GET /\x00 HTTP/1.1", "GET /%00%ff%zz HTTP/1.1", "TRACE / HTTP/1.1", "X" * 1000 + " / HTTP/1.1",
                 "GET /../../etc/passwd HTTP/1.1", "GET /dashboard/static/..%2f..%2fapp.py HTTP/1.1",
                 "GET /v1/models/\xff\xfe HTTP/1.1", "GET * HTTP/1.1", "GET ? HTTP/1.1", "GET #a HTTP/1.1",
                 f"GET /{'a/' * 4000} HTTP/1.1", f"GET /health?{'a=b&' * 4000} HTTP/1.1"):  # fmt: skip
        await strike.raw(f"{line}\r\nhost: localhost\r\n{key}connection: close\r\n\r\n".encode("latin-1"))
    await strike.raw(request("POST", COMPLETIONS, b"{}", {"expect": "the-impossible"}))
    await strike.raw(b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")  # no Host
    await strike.raw(b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: close\r\n\r\n")


REFUSED_OR_DONE = REFUSED | outcomes(200)
ATTACKS = (
    Attack("deep-fields", "each field, nested 50,000 deep", deep_fields, REFUSED_OR_DONE, limit_seconds=120),
    Attack("template-arguments", 'chat_template_kwargs {"self": 1} and other names', template_arguments,
           outcomes(200, 400), limit_seconds=120, is_work=True),
    Attack("deep-tool-calls", "arguments of tools nested 50,000 deep", deep_tool_calls, outcomes(200, 400),
           is_work=True),
    Attack("compressed", "gzip bodies, and gzip bombs of 1 GiB", compressed, REFUSED),
    Attack("broken-json", "bodies that are no JSON, or barely", broken_json, REFUSED),
    Attack("broken-http", "request lines that are none", broken_http, REFUSED_OR_DONE | ENDED | outcomes(505, 417, 501),
           bare=True, answer_seconds=10, limit_seconds=120),
    Attack("every-answer", "one of each kind of answer: nosniff on all", every_answer, REFUSED_OR_DONE | outcomes(308),
           is_work=True),
)  # fmt: skip
