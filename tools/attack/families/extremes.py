"""Values at and beyond the edge: of parameters, of text, and of how many names there are."""

from __future__ import annotations

import json
from functools import partial

from tools.attack.attack import CHAT, COMPLETIONS, FULL, HI, REFUSED, Attack, Strike, outcomes

HUGE = ("1e308", "-1e308", "1e999", "NaN", "-Infinity", "9223372036854775808", "-9223372036854775809", "1" + "0" * 400,
        "0", "-1", "-0.0", "1e-320", "0.1", "true", '"1"', "[]", "{}", "null")  # fmt: skip
NUMBERS = ("n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k",
           "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "logprobs", "top_logprobs",
           "prompt_logprobs", "priority", "stream_interval")  # fmt: skip
TOKENS = 4  # so that what is accepted is soon done


async def numbers(strike: Strike) -> None:
    """Every parameter that is a number, with every number."""
    asks = []
    for path, given in ((COMPLETIONS, '"prompt": "Hi"'), (CHAT, f'"messages": {json.dumps(HI)}')):
        for name in NUMBERS:
            for value in HUGE[:: strike.number(1, 4)]:
                limit = "" if name in ("max_tokens", "max_completion_tokens") else f'"max_tokens": {TOKENS}, '
                # Only an answer that is limited otherwise ends soon; a stop string of one letter does.
                stop = "" if limit else '"stop": ["e", " ", "a"], '
                asks.append(partial(strike.post, path, f'{{{limit}{stop}"{name}": {value}, {given}}}'.encode()))
    await strike.all(asks, 16)


async def lists(strike: Strike) -> None:
    """Lists and maps with many more entries than anyone needs."""
    many = strike.number(100_000, 10_000)
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
    bodies = [{"prompt": "Hi", "max_tokens": TOKENS} | each for each in fields]
    await strike.all([partial(strike.post, COMPLETIONS, body) for body in bodies], 8)


async def texts(strike: Strike) -> None:
    """Texts that are strange for tokenizers and for what prints them."""
    many = strike.number(100_000, 20_000)
    strange = (
        "\0" * many, "\u202e" * many, "e" + "\u0301" * many, "<|im_start|>" * many, "<|im_end|>" * many,
        "<|endoftext|>" * many, "\U0010ffff" * many, "\ufeff" * many, "\r\n" * many, "\ufdfa" * many,
        "1" * many, "-" * many, "\u0e33" * many, "a\u200b" * many, "' '" * many, "\U000e0041" * many,
    )  # fmt: skip
    asks = []
    for text in strange:
        asks.append(partial(strike.post, COMPLETIONS, {"prompt": text, "max_tokens": TOKENS}))
        asks.append(partial(strike.post, "/tokenize", {"prompt": text}))
        asks.append(partial(strike.post, CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}))
    halves = (b'"\\ud83d"', b'"\\ude00\\ud83d"', b'"a\\udfff"', b'"\xed\xa0\x80"')
    for half in halves:
        asks.append(partial(strike.post, COMPLETIONS, b'{"prompt": %s}' % half))
        asks.append(partial(strike.post, CHAT, b'{"messages": [{"role": "user", "content": %s}]}' % half))
        asks.append(partial(strike.post, COMPLETIONS, b'{"prompt": "Hi", "max_tokens": 1, "stop": [%s]}' % half))
    await strike.all(asks, 8)


async def unknown_names(strike: Strike) -> None:
    """Another unknown parameter with each request, and many in one."""
    number = strike.number(2000, 200)
    asks = [
        partial(strike.post, COMPLETIONS, {"prompt": "Hi", "max_tokens": 0, f"unknown_{i}_{'x' * 200}": i})
        for i in range(number)
    ]
    flood = {"prompt": "Hi", "max_tokens": 0} | {f"flood_{i}\n{'y' * 100}": i for i in range(50_000)}
    await strike.all([*asks, partial(strike.post, COMPLETIONS, flood)], 16)
    unfolded = [line for line in strike.log.splitlines() if line.startswith(b"yyy")]
    strike.check(not unfolded, "a name of the client began a line of the log")


async def unknown_paths(strike: Strike) -> None:
    """Another path, method and request id with each request: no metric and no line of log may grow with them."""
    number = strike.number(2000, 200)
    before = await strike.ask("GET", "/metrics")
    asks = [
        partial(strike.ask, ("GET", "POST", "PUT", f"M{i}")[i % 4], f"/v1/nothing/{i}/{'p' * 300}", b"",
                {"x-request-id": f"id-{i}", "traceparent": f"00-{i + 1:032x}-{i + 1:016x}-01", "user-agent": "u" * 999})
        for i in range(number)
    ]  # fmt: skip
    await strike.all(asks, 16)
    after = await strike.ask("GET", "/metrics")
    growth = after.num_body_bytes - before.num_body_bytes
    strike.check(growth < 20_000, f"/metrics grew by {growth:,} bytes")


DONE = REFUSED | outcomes(200)
ATTACKS = (
    Attack("numbers", "every number of every parameter: 1e308, NaN, 2**63, -1, ...", numbers, outcomes(200, 400) | FULL,
           answer_seconds=120, limit_seconds=180, is_work=True),
    Attack("lists", "logit_bias with 100,000 entries, 10,000 stops, ...", lists, DONE, answer_seconds=60,
           limit_seconds=120, is_work=True),
    Attack("texts", "NULs, surrogates, RTL, combining marks, added tokens x 100,000", texts, DONE, answer_seconds=60,
           limit_seconds=150, is_work=True),
    Attack("unknown-names", "2,000 unknown parameters, and 50,000 in one body", unknown_names, DONE, is_work=True),
    Attack("unknown-paths", "2,000 unknown paths, methods and ids", unknown_paths, DONE, bare=True),
)  # fmt: skip
