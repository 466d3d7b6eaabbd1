"""Attacks by what a request holds: prompts, work, values and forms."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from oaiserve.routes.intake.body_types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tools.attack.attack import (
    CHAT,
    COMPLETIONS,
    FULL,
    HI,
    REFUSED,
    Family,
    Number,
    Sent,
    Strike,
    outcomes,
    post,
    request,
)

# -- prompts that can never fit: their refusal must cost next to nothing, whatever they are made of -------------------

PROMPTS = Family("prompts", "one request ends the engine")
MB = 1_000_000
BODY_BYTES = 8 * 2**20 - 1024  # just within the default of --body-limit
SENTENCE = "The old river sings under seven hills, and nobody asks why. "
TOO_LONG = outcomes(400, 413) | FULL
ANY = TOO_LONG | outcomes(200)


def flood(
    name: str,
    sends: str,
    path: str,
    body: Callable[[], dict[str, Any]],
    numbers: tuple[int, int] = (16, 4),
    at_once: int = 4,
    outcomes: frozenset[str] = TOO_LONG,
    **limits: Any,
) -> None:
    """Add an attack that repeats the same body, fewer times in a quick run."""

    def same(number: Number) -> list[Sent]:
        return [post(path, json.dumps(body(), ensure_ascii=False).encode())] * number(*numbers)

    PROMPTS.burst(sends, outcomes, at_once, name=name, **limits)(same)


def prompt(content: Any) -> dict[str, Any]:
    return {"prompt": content, "max_tokens": 1}


def messages(content: Any, number: int = 1) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}] * number, "max_tokens": 1}


def long_text() -> str:
    return SENTENCE * (BODY_BYTES // len(SENTENCE))


EMOJI = "\N{GRINNING FACE}" * (MB // 4)
PART = {"type": "text", "text": "Word. " * 100}
flood("completions-8mb", "8 MB of text that can never fit, 8 at once", COMPLETIONS, lambda: prompt(long_text()),
      (200, 8), 8)  # fmt: skip
# Up to the limit of the route they are encoded, which takes a second each.
flood("tokenize-8mb", "8 MB of text to /tokenize, 8 at once", "/tokenize", lambda: {"prompt": long_text()}, (40, 8), 8,
      ANY, limit_seconds=180)  # fmt: skip
flood("chat-8mb", "a message of 8 MB, 8 at once", CHAT, lambda: messages(long_text()), (40, 4), 8)
flood("prompt-spaces", "a prompt of a million spaces", COMPLETIONS, lambda: prompt(" " * MB))
flood("prompt-one-letter", "a prompt of a million times a", COMPLETIONS, lambda: prompt("a" * MB))
flood("prompt-emoji", "a megabyte of emoji", COMPLETIONS, lambda: prompt(EMOJI))
flood("content-parts", "a message of 2,000 parts", CHAT, lambda: messages([PART] * 2000))
flood("many-messages", "20,000 messages", CHAT, lambda: messages("Word. ", 20_000))
flood("detokenize-million", "a million ids to /detokenize", "/detokenize", lambda: {"tokens": [7] * MB}, outcomes=ANY)
flood("prompt-ids", "a prompt of a million ids", COMPLETIONS, lambda: prompt([7] * MB))
flood("many-prompts", "2,048 prompts in one body", COMPLETIONS,
      lambda: prompt([f"{number}: {SENTENCE}" for number in range(2048)]), (4, 1), 2, ANY, answer_seconds=120,
      is_work=True)  # fmt: skip


# -- well-formed work, but more of it than one client should get done before others -----------------------------------

CROWDS = Family("crowds", "a client that takes all")
WORDS = ("river", "hill", "seven", "why", "under", "old", "sings", "fox", "sea", "then")
crowd = partial(CROWDS.burst, outcomes=outcomes(200, 400) | FULL, answer_seconds=120, limit_seconds=130, is_work=True)


def fresh(number: int, num_words: int) -> str:
    """Return a prompt that begins like no other, so that nothing of it is cached."""
    return f"{number}: " + " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(num_words))


def prompts(num_prompts: int, num_words: int, **fields: object) -> list[Sent]:
    return [post(COMPLETIONS, {"prompt": fresh(number, num_words), **fields}) for number in range(num_prompts)]


@crowd("16 prompts with n = 128 in one body", at_once=1, name="2048-sequences")
def sequences(number: Number) -> list[Sent]:
    fields = {"n": number(128, 16), "max_tokens": 8, "ignore_eos": True}
    return [post(COMPLETIONS, {"prompt": [fresh(each, 20) for each in range(16)], **fields})]


@crowd("64 prompts of 1,500 words from one address, 32 at once", at_once=32)
def long_prompts(number: Number) -> list[Sent]:
    return prompts(number(64, 8), 1500, max_tokens=1)


@crowd("128 answers of 60 tokens at once", at_once=128)
def long_answers(number: Number) -> list[Sent]:
    return prompts(number(128, 16), 10, max_tokens=60, ignore_eos=True)


@crowd("2,000 small requests, 1,500 at once", at_once=1500)
def many_requests(number: Number) -> list[Sent]:
    return prompts(number(2000, 200), 10, max_tokens=4)


# -- values at and beyond the edge: of parameters, of text, and of how many names there are ---------------------------

EXTREMES = Family("extremes", "one request ends the engine")
HUGE = ("1e308", "-1e308", "1e999", "NaN", "-Infinity", "9223372036854775808", "-9223372036854775809", "1" + "0" * 400,
        "0", "-1", "-0.0", "1e-320", "0.1", "true", '"1"', "[]", "{}", "null")  # fmt: skip
NUMBERS = ("n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k",
           "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "logprobs", "top_logprobs",
           "prompt_logprobs", "priority", "stream_interval")  # fmt: skip
DONE = REFUSED | outcomes(200)
TOKENS = 4  # so that what is accepted is soon done


@EXTREMES.burst("every number of every parameter: 1e308, NaN, 2**63, -1, ...", outcomes(200, 400) | FULL, 16,
                answer_seconds=120, limit_seconds=180, is_work=True)  # fmt: skip
def numbers(number: Number) -> list[Sent]:
    sent: list[Sent] = []
    for path, prompt in ((COMPLETIONS, '"prompt": "Hi"'), (CHAT, f'"messages": {json.dumps(HI)}')):
        for name in NUMBERS:
            for value in HUGE[:: number(1, 4)]:
                limit = "" if name in ("max_tokens", "max_completion_tokens") else f'"max_tokens": {TOKENS}, '
                # Only an answer that is limited otherwise ends soon; a stop string of one letter does.
                stop = "" if limit else '"stop": ["e", " ", "a"], '
                sent.append(post(path, f'{{{limit}{stop}"{name}": {value}, {prompt}}}'.encode()))
    return sent


@EXTREMES.burst("logit_bias with 100,000 entries, 10,000 stops, ...", DONE, 8, answer_seconds=60, limit_seconds=120,
                is_work=True)  # fmt: skip
def lists(number: Number) -> list[Sent]:
    """Lists and maps with many more entries than anyone needs."""
    many = number(100_000, 10_000)
    fields: tuple[dict[str, object], ...] = (
        {"logit_bias": {str(i): -1 for i in range(many)}},
        {"logit_bias": {str(i): 100 for i in range(40_000)}},
        {"logit_bias": {"9" * 10: 1}}, {"logit_bias": {"0" * 8_000_000: 1}},
        {"stop": [f"s{i}" for i in range(10_000)]}, {"stop": ["x" * 1_000_000]}, {"stop": ["\0", "\n", "\u202e"]},
        {"bad_words": [f"w{i}" for i in range(10_000)]}, {"bad_words": ["a b c d " * 1000]},
        {"bad_words": ["x" * 30] * 128}, {"stop": ["y" * 30] * 128},
        {"stop_token_ids": list(range(many))}, {"stop_token_ids": [7] * many},
        {"allowed_token_ids": list(range(40_000))}, {"allowed_token_ids": [7] * many},
        {"n": 128, "allowed_token_ids": [7] * many}, {"n": 128, "logit_bias": {str(i): 1 for i in range(40_000)}},
        {"n": 128, "stop_token_ids": list(range(40_000)), "min_tokens": 2},
        {"cache_salt": "x" * 1_000_000}, {"model": "m" * 1_000_000},
        {"stream_options": {f"o{i}": True for i in range(many)}, "stream": True},
        {"n": 128, "logprobs": 20, "prompt_logprobs": 20}, {"best_of": 20, "n": 20, "logprobs": 20},
        {"echo": True, "logprobs": 20, "max_tokens": 0},
    )  # fmt: skip
    return [post(COMPLETIONS, {"prompt": "Hi", "max_tokens": TOKENS} | each) for each in fields]


@EXTREMES.burst("NULs, surrogates, RTL, combining marks, added tokens x 100,000", DONE, 8, answer_seconds=60,
                limit_seconds=150, is_work=True)  # fmt: skip
def texts(number: Number) -> list[Sent]:
    """Texts that are strange for tokenizers and for what prints them."""
    many = number(100_000, 20_000)
    strange = (
        "\0" * many, "\u202e" * many, "e" + "\u0301" * many, "<|im_start|>" * many, "<|im_end|>" * many,
        "<|endoftext|>" * many, "\U0010ffff" * many, "\ufeff" * many, "\r\n" * many, "\ufdfa" * many,
        "1" * many, "-" * many, "\u0e33" * many, "a\u200b" * many, "' '" * many, "\U000e0041" * many,
    )  # fmt: skip
    sent: list[Sent] = []
    for text in strange:
        sent.append(post(COMPLETIONS, {"prompt": text, "max_tokens": TOKENS}))
        sent.append(post("/tokenize", {"prompt": text}))
        sent.append(post(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}))
    for half in (b'"\\ud83d"', b'"\\ude00\\ud83d"', b'"a\\udfff"', b'"\xed\xa0\x80"'):
        sent.append(post(COMPLETIONS, b'{"prompt": %s}' % half))
        sent.append(post(CHAT, b'{"messages": [{"role": "user", "content": %s}]}' % half))
        sent.append(post(COMPLETIONS, b'{"prompt": "Hi", "max_tokens": 1, "stop": [%s]}' % half))
    return sent


@EXTREMES.burst("marks, quotes and line ends of 400 KB in fields that are no prompt", DONE, 4, answer_seconds=60,
                limit_seconds=150, is_work=True)  # fmt: skip
def repeated(number: Number) -> list[Sent]:
    """What a parser might search again and again: half marks of streams, and places in messages of errors."""
    size = number(400_000, 100_000)
    sent: list[Sent] = []
    for unit in (": tokens ", ": tokens []", "\n: tokens ", "data: ", " - at `$.", '\\"', "\n", " ", "<tool_call>"):
        text = unit * (size // len(unit)) + "\n"
        schema = {"type": "object", "description": text, "properties": {"a": {"enum": ["b"]}}}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "' + text}}
        form = {"type": "json_schema", "name": "f", "schema": schema}
        chat: dict[str, Any] = {"messages": HI, "max_tokens": TOKENS, "stream": True}
        response = {"input": "Hi", "max_output_tokens": TOKENS, "stream": True, "store": False}
        sent += [
            post("/v1/responses", response | {"user": text}),
            post("/v1/responses", response | {"text": {"format": form}}),
            post(CHAT, chat | {"user": text}),
            post(CHAT, chat | {"response_format": {"type": text}}),
            post(CHAT, chat | {"structured_outputs": {"grammar": text}}),
            post(CHAT, chat | {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}, *HI]}),
        ]
    return sent


@EXTREMES.attack("2,000 unknown parameters, and 50,000 in one body", DONE, is_work=True)
async def unknown_names(strike: Strike) -> None:
    body = {"prompt": "Hi", "max_tokens": 0}
    names = [post(COMPLETIONS, body | {f"unknown_{i}_{'x' * 200}": i}) for i in range(strike.number(2000, 200))]
    flood = post(COMPLETIONS, body | {f"flood_{i}\n{'y' * 100}": i for i in range(50_000)})
    await strike.ask_all([*names, flood], 16)
    unfolded = [line for line in strike.log.splitlines() if line.startswith(b"yyy")]
    strike.check(not unfolded, "a name of the client began a line of the log")


@EXTREMES.attack("2,000 unknown paths, methods and ids", DONE, bare=True)
async def unknown_paths(strike: Strike) -> None:
    """Another path, method and request id with each request: no metric and no line of log may grow with them."""
    before = await strike.ask(request("GET", "/metrics"))
    asks = [
        request(("GET", "POST", "PUT", f"M{i}")[i % 4], f"/v1/nothing/{i}/{'p' * 300}", headers={
                "x-request-id": f"id-{i}", "traceparent": f"00-{i + 1:032x}-{i + 1:016x}-01", "user-agent": "u" * 999})
        for i in range(strike.number(2000, 200))
    ]  # fmt: skip
    await strike.ask_all(asks, 16)
    after = await strike.ask(request("GET", "/metrics"))
    growth = after.num_body_bytes - before.num_body_bytes
    strike.check(growth < 20_000, f"/metrics grew by {growth:,} bytes")


# -- requests that are wrong in their form: each refusal has the form of OpenAI's errors ------------------------------

FORMS = Family("forms", "one request ends the engine")
DEPTH = 50_000
DEEP = (b"[" * DEPTH + b"]" * DEPTH, b'{"a":' * DEPTH + b"1" + b"}" * DEPTH, b"[" * DEPTH)
BODIES = {  # the type of each body, and the fields that it needs
    COMPLETIONS: (CompletionBody, b'"prompt": "Hi"'),
    CHAT: (ChatBody, b'"messages": [{"role": "user", "content": "Hi"}]'),
    "/tokenize": (TokenizeBody, b'"prompt": "Hi"'),
    "/detokenize": (DetokenizeBody, b'"tokens": [7]'),
}
REFUSED_OR_DONE = REFUSED | outcomes(200)


@FORMS.burst("each field, nested 50,000 deep", REFUSED_OR_DONE, 8, limit_seconds=120)
def deep_fields(number: Number) -> list[Sent]:
    return [
        post(path, b'{"%s": %s, %s}' % (name.encode(), deep, valid))
        for path, (kind, valid) in BODIES.items()
        for name in (*kind.__struct_fields__, "response_format", "tools", "metadata", "no_such_name")
        for deep in DEEP[: number(3, 1)]
    ]


@FORMS.burst('chat_template_kwargs {"self": 1} and other names', outcomes(200, 400), 1, limit_seconds=120, is_work=True,
             of_class="templates")  # fmt: skip
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


@FORMS.burst("arguments of tools nested 50,000 deep", outcomes(200, 400), 1, is_work=True, of_class="templates")
def deep_tool_calls(number: Number) -> list[Sent]:
    """Arguments of a tool are parsed by some templates, and hold any JSON."""
    sent: list[Sent] = []
    as_text = b'"' + b"[" * DEPTH + b"]" * DEPTH + b'"'
    for arguments in (*DEEP[:2], as_text, b'"' + b'{\\"a\\":' * DEPTH + b'"', b'"not JSON"', b"1e999", b'"NaN"'):
        for function in (b'{"name": "f", "arguments": %s}', b'{"name": "f", "arguments": {"x": %s}}'):
            call = b'{"id": "a", "type": "function", "function": %s}' % (function % arguments)
            message = b'{"role": "assistant", "content": null, "tool_calls": [%s]}' % call
            body = b'{"messages": [{"role": "user", "content": "Hi"}, %s], "max_tokens": 1}' % message
            sent += [post(path, body) for path in (CHAT, "/tokenize")]
    return sent
