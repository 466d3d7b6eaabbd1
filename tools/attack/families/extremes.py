"""Values at and beyond the edge: of parameters, of text, and of how many names there are."""

from __future__ import annotations

import json

from tools.attack.attack import (
    CHAT,
    COMPLETIONS,
    FULL,
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

HUGE = ("1e308", "-1e308", "1e999", "NaN", "-Infinity", "9223372036854775808", "-9223372036854775809", "1" + "0" * 400,
        "0", "-1", "-0.0", "1e-320", "0.1", "true", '"1"', "[]", "{}", "null")  # fmt: skip
NUMBERS = ("n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k",
           "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "logprobs", "top_logprobs",
           "prompt_logprobs", "priority", "stream_interval")  # fmt: skip
DONE = REFUSED | outcomes(200)
TOKENS = 4  # so that what is accepted is soon done


@burst("every number of every parameter: 1e308, NaN, 2**63, -1, ...", outcomes(200, 400) | FULL, 16,
       answer_seconds=120, limit_seconds=180, is_work=True)  # fmt: skip
def numbers(number: Number) -> list[Sent]:
    found: list[Sent] = []
    for path, given in ((COMPLETIONS, '"prompt": "Hi"'), (CHAT, f'"messages": {json.dumps(HI)}')):
        for name in NUMBERS:
            for value in HUGE[:: number(1, 4)]:
                limit = "" if name in ("max_tokens", "max_completion_tokens") else f'"max_tokens": {TOKENS}, '
                # Only an answer that is limited otherwise ends soon; a stop string of one letter does.
                stop = "" if limit else '"stop": ["e", " ", "a"], '
                found.append(post(path, f'{{{limit}{stop}"{name}": {value}, {given}}}'.encode()))
    return found


@burst("logit_bias with 100,000 entries, 10,000 stops, ...", DONE, 8, answer_seconds=60, limit_seconds=120,
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
        {"cache_salt": "x" * 1_000_000}, {"model": "m" * 1_000_000},
        {"stream_options": {f"o{i}": True for i in range(many)}, "stream": True},
        {"n": 128, "logprobs": 20, "prompt_logprobs": 20}, {"best_of": 20, "n": 20, "logprobs": 20},
        {"echo": True, "logprobs": 20, "max_tokens": 0},
    )  # fmt: skip
    return [post(COMPLETIONS, {"prompt": "Hi", "max_tokens": TOKENS} | each) for each in fields]


@burst("NULs, surrogates, RTL, combining marks, added tokens x 100,000", DONE, 8, answer_seconds=60,
       limit_seconds=150, is_work=True)  # fmt: skip
def texts(number: Number) -> list[Sent]:
    """Texts that are strange for tokenizers and for what prints them."""
    many = number(100_000, 20_000)
    strange = (
        "\0" * many, "\u202e" * many, "e" + "\u0301" * many, "<|im_start|>" * many, "<|im_end|>" * many,
        "<|endoftext|>" * many, "\U0010ffff" * many, "\ufeff" * many, "\r\n" * many, "\ufdfa" * many,
        "1" * many, "-" * many, "\u0e33" * many, "a\u200b" * many, "' '" * many, "\U000e0041" * many,
    )  # fmt: skip
    found: list[Sent] = []
    for text in strange:
        found.append(post(COMPLETIONS, {"prompt": text, "max_tokens": TOKENS}))
        found.append(post("/tokenize", {"prompt": text}))
        found.append(post(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}))
    for half in (b'"\\ud83d"', b'"\\ude00\\ud83d"', b'"a\\udfff"', b'"\xed\xa0\x80"'):
        found.append(post(COMPLETIONS, b'{"prompt": %s}' % half))
        found.append(post(CHAT, b'{"messages": [{"role": "user", "content": %s}]}' % half))
        found.append(post(COMPLETIONS, b'{"prompt": "Hi", "max_tokens": 1, "stop": [%s]}' % half))
    return found


@attack("2,000 unknown parameters, and 50,000 in one body", DONE, is_work=True)
async def unknown_names(strike: Strike) -> None:
    body = {"prompt": "Hi", "max_tokens": 0}
    names = [post(COMPLETIONS, body | {f"unknown_{i}_{'x' * 200}": i}) for i in range(strike.number(2000, 200))]
    flood = post(COMPLETIONS, body | {f"flood_{i}\n{'y' * 100}": i for i in range(50_000)})
    await strike.ask_all([*names, flood], 16)
    unfolded = [line for line in strike.log.splitlines() if line.startswith(b"yyy")]
    strike.check(not unfolded, "a name of the client began a line of the log")


@attack("2,000 unknown paths, methods and ids", DONE, bare=True)
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
