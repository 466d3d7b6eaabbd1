"""The log-probabilities of completions point into the text, with the demo model's tokenizer."""

import json
import random
from typing import Any

import pytest

from tests.e2e.live import LiveServer

SPLIT = "Hi 🚀 there, Größe"
SPECIAL = {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}


def pieces(choice: dict[str, Any]) -> list[str]:
    """Return the parts of a choice's text between its offsets, each of which is that of a token."""
    text = choice["text"]
    logprobs = choice["logprobs"]
    offsets = logprobs["text_offset"]
    parts = [text[start:end] for start, end in zip(offsets, [*offsets[1:], len(text)], strict=True)]
    assert "".join(parts) == text
    for part, name, top in zip(parts, logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert name == part or (part == "" and name in SPECIAL)
        assert top is None or name in top
    return parts


def streamed(server: LiveServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a stream, put together."""
    choices: dict[int, dict[str, Any]] = {}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            (delta,) = json.loads(line.removeprefix("data: "))["choices"]
            choice = choices.setdefault(delta["index"], {"text": "", "logprobs": {}})
            choice["text"] += delta["text"]
            for name, values in (delta["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)]


def bodies() -> list[dict[str, Any]]:
    rng = random.Random(7)
    characters = ["a", " ", "é", "e\u0301", "🚀", "漢", "\n", "<|im_end|>", "▁", "\u200d", "The capital", "ß"]
    texts = ["".join(rng.choices(characters, k=rng.randint(1, 12))) for _ in range(4)]
    biased = {"logit_bias": {"2": 4.0, "1": 3.0}}  # towards special tokens
    return [
        {"prompt": [SPLIT, *texts], "echo": True},
        {"prompt": texts, "echo": True, "n": 2, "stop": ["e", "the ", "\n\n", "und"]},
        {"prompt": [[19556, 239, 254], [905, 7, 1, 33]], "echo": True, "stop": ["a", " of the"]},
        {"prompt": SPLIT, "n": 3, "stop": [" a", "is"], "include_stop_str_in_output": True},
        {"prompt": SPLIT, "skip_special_tokens": False, "ignore_eos": True, **biased},
        {"prompt": SPLIT, "echo": True, "ignore_eos": True, **biased},
        {"prompt": "🚀" * 9, "allowed_token_ids": [*range(180, 260)], "stop": ["\ufffd\ufffd", "ab"]},
        {"prompt": SPLIT, "echo": True, "max_tokens": 0},
    ]


@pytest.mark.parametrize("options", bodies())
def test_offsets_cut_the_text_into_that_of_the_tokens_whole_and_streamed(
    live: LiveServer, options: dict[str, Any]
) -> None:
    body = {"max_tokens": 24, "logprobs": 2, "seed": 5, "temperature": 1, **options}
    with live.http() as http:
        whole = http.post("/v1/completions", json=body).json()["choices"]
    for choice, other in zip(whole, streamed(live, body), strict=True):
        pieces(choice)
        assert (other["text"], other["logprobs"]) == (choice["text"], choice["logprobs"])
        if options.get("echo") and isinstance(options["prompt"], str):
            assert choice["text"].startswith(options["prompt"])


def test_the_bytes_of_a_chats_tokens_are_its_content(live: LiveServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "Write emoji."}],
        "logprobs": True,
        "seed": 5,
        "max_tokens": 40,
        "min_tokens": 10,
        "allowed_token_ids": [*range(180, 260), 2],
    }
    with live.http() as http:
        (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    data = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
    assert data.decode(errors="replace") == choice["message"]["content"]
