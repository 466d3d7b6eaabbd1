"""Counts the answers of models that repeat themselves without end: python -m tools.loops MODEL [MODEL ...]

Each model gets 15 prompts with the sampling that its server takes for requests that set none, or with other parameters:
--params '{"temperature": 0.7, "repetition_penalty": 1}'. A model without a chat template continues 15 texts. An answer
repeats itself by a rule that the server does not have: most 8 tokens in a row of its last half are there more than
once. It counts as a loop if it also goes on up to the limit. The last column is the number of answers that the server
noted by its own rule.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tools.demo_answers import parsed
from tools.markdown import add_publishing, as_markdown, publish, results_of
from tools.server_process import exit_on_sigterm, running_oaiserve

LIMIT_SECONDS = 3600.0
TOKENS_IN_A_ROW = 8
MOST_REPEATED = 0.5  # share of the last half
PROMPTS = (
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "Write a Python function that merges two sorted lists, and explain it.",
    "List ten ideas for a birthday party, with a sentence on each.",
    "Write a poem about the sea in winter.",
    "What is the difference between TCP and UDP?",
    "Give me a weekly plan to learn the guitar.",
    "Describe the water cycle for a child of eight.",
    "Write a letter to a neighbor about a noisy dog.",
    "Why did the Roman Empire fall?",
    "Write an SQL schema for a small library, with some rows of data.",
    "Compare tea and coffee in a table, and say which is healthier.",
    "Tell me everything you know about volcanoes.",
    "Write a dialogue between a robot and a gardener.",
    "How do I prepare for a job interview?",
)
OPENINGS = (
    "Once upon a time, in a house by the sea,",
    "The history of the bicycle begins",
    "To bake bread, you need the following:\n\n1.",
    "Chapter 1\n\nIt was raining when the train arrived.",
    "The three main causes of the war were",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "The best way to learn a language is",
    "In this article, we will look at",
    "My grandmother always told me that",
    "The solar system consists of",
    "She opened the door and saw",
    "Question: Why is the sky blue?\nAnswer:",
    "Volcanoes are formed when",
    "A good night's sleep is important because",
)


def repeated_share(token_ids: Sequence[int]) -> float:
    """Return the share of the last half's rows of 8 tokens that are in the whole text more than once."""
    rows = [tuple(token_ids[start : start + TOKENS_IN_A_ROW]) for start in range(len(token_ids) - TOKENS_IN_A_ROW + 1)]
    counts = Counter(rows)
    last = rows[len(rows) // 2 :]
    return sum(counts[row] > 1 for row in last) / max(1, len(last))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    models = {}
    for model in arguments.models:
        print(f"{model} ...", file=sys.stderr, flush=True)
        flags = ("--max-running", str(len(PROMPTS)))
        with running_oaiserve(*flags, model=model, start_limit_seconds=LIMIT_SECONDS) as server:
            models[Path(model).name] = asyncio.run(_asked(server.url, arguments))
    return {"params": arguments.params, "max_tokens": arguments.max_tokens, "models": models}


async def _asked(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS, trust_env=False) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
        chats = model["has_chat_template"]

        async def answer(seed: int, prompt: str) -> dict[str, Any]:
            asked = {"messages": [{"role": "user", "content": prompt}]} if chats else {"prompt": prompt}
            path = "/v1/chat/completions" if chats else "/v1/completions"
            common = {"model": model["id"], "max_tokens": arguments.max_tokens, "seed": seed, "return_token_ids": True}
            response = (await http.post(path, json=asked | common | arguments.params)).raise_for_status()
            (choice,) = response.json()["choices"]
            record = await _record(http, response.headers["x-request-id"])
            return {
                "prompt": prompt,
                "text": choice["message"]["content"] if chats else choice["text"],
                "num_tokens": len(choice["token_ids"]),
                "repeated_share": repeated_share(choice["token_ids"]),
                "finish_reason": choice["finish_reason"],
                "loop": record.get("loop"),
            }

        prompts = PROMPTS if chats else OPENINGS
        seeds = range(arguments.seed, arguments.seed + len(prompts))
        answers = await asyncio.gather(*map(answer, seeds, prompts))
    shown = {name: model.get(name) for name in ("default_sampling", "default_sampling_source")}
    return {**shown, "answers": answers}


async def _record(http: httpx.AsyncClient, request_id: str) -> Mapping[str, Any]:
    """Return the record of a request, which is there shortly after its answer."""
    while True:
        response = await http.get(f"/debug/requests/{request_id}")
        if response.is_success:
            return response.json()  # type: ignore[no-any-return]
        await asyncio.sleep(0.1)


def repeats(answer: Mapping[str, Any]) -> bool:
    return bool(answer["repeated_share"] > MOST_REPEATED)


def is_loop(answer: Mapping[str, Any]) -> bool:
    return repeats(answer) and answer["finish_reason"] == "length"


def report(results: dict[str, Any]) -> str:
    rows = [("model", "answers", "loops", "repeat themselves", "at the limit", "noted by the server")]
    total = Counter[str]()
    for name, of_model in results["models"].items():
        answers = of_model["answers"]
        counts = {
            "answers": len(answers),
            "loops": sum(map(is_loop, answers)),
            "repeat": sum(map(repeats, answers)),
            "cut": sum(answer["finish_reason"] == "length" for answer in answers),
            "noted": sum(bool((answer["loop"] or {}).get("choices")) for answer in answers),
        }
        total.update(counts)
        rows.append((name, *map(str, counts.values())))
    rows.append(("all", *(str(number) for number in total.values())))
    return "\n".join(as_markdown(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="*", default=["demo"], metavar="MODEL", help="as for `oaiserve serve` (default: demo)")
    add("--params", type=parsed, default={}, help="parameters of the requests, in JSON")
    add("--max-tokens", type=int, default=400, help="of an answer (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the first answer; the others have the next ones (default: 1)")
    add("--most", type=int, help="loops in all, beyond which the exit code is 1")
    add("--texts", action="store_true", help="print the answers that loop")
    add_publishing(parser, "loops")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, measure)
    answers = [answer for of_model in results["models"].values() for answer in of_model["answers"]]
    loops = list(filter(is_loop, answers))
    if arguments.texts:
        for answer in loops:
            print(f"{answer['prompt']}\n{answer['text']}\n")
    publish(arguments, "loops", results, report(results))
    return int(arguments.most is not None and len(loops) > arguments.most)


if __name__ == "__main__":
    sys.exit(main())
