"""Asks the demo model all prompts that the chat page suggests, and prints its answers: python -m tools.demo_answers

They come with the demo's default parameters, as for a newcomer, or with others, such as those of the model's card:
--params '{"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1}' --seeds 3. It ends with 1 if one is cut off or
repeats itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tools.server_process import running_oaiserve

EXAMPLES = Path(__file__).parents[1] / "oaiserve/plugins/pages/static/examples.js"
LIMIT_SECONDS = 600.0
REPEATED_WORDS = 6  # words that a text has in a row more than
MOST_TIMES = 3  # times if it repeats itself


def prompts() -> list[str]:
    """Return the prompts in the page's source, without the openings of texts, which are for models that don't chat."""
    suggested, _, _ = EXAMPLES.read_text().partition("];")
    return re.findall(r'^  "(.+)",$', suggested, re.MULTILINE)


def repeats_itself(text: str) -> bool:
    words = text.split()
    starts = range(len(words) - REPEATED_WORDS + 1)
    in_a_row = Counter(tuple(words[start : start + REPEATED_WORDS]) for start in starts)
    return max(in_a_row.values(), default=0) > MOST_TIMES


async def answers(url: str, asked: Sequence[str], **params: Any) -> list[tuple[str, str]]:
    """Ask all prompts at once, and return the text and the finish reason of each answer."""
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS) as http:

        async def answer(prompt: str) -> tuple[str, str]:
            body = {"model": "demo", "messages": [{"role": "user", "content": prompt}], **params}
            response = await http.post("/v1/chat/completions", json=body)
            choice = response.raise_for_status().json()["choices"][0]
            return choice["message"]["content"], choice["finish_reason"]

        return list(await asyncio.gather(*(answer(prompt) for prompt in asked)))


def show(asked: Sequence[str], given: Sequence[tuple[str, str]]) -> tuple[int, int]:
    """Print the answers, and return how many are cut off, and how many repeat themselves."""
    num_cut = num_repeating = 0
    for prompt, (text, reason) in zip(asked, given, strict=True):
        is_cut = reason != "stop"
        is_repeating = repeats_itself(text)
        num_cut += is_cut
        num_repeating += is_repeating
        print(f"{'CUT OFF  ' * is_cut}{'REPEATS ITSELF  ' * is_repeating}{prompt}\n{text}\n")
    return num_cut, num_repeating


def parsed(text: str) -> Mapping[str, Any]:
    params = json.loads(text)
    if not isinstance(params, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object of parameters")
    return params


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=parsed, default={}, help="parameters of the requests, in JSON")
    parser.add_argument(
        "--seeds", type=int, default=1, help="answers to each prompt, each with another seed (default: 1)"
    )
    args = parser.parse_args()
    asked = prompts()
    counts = []
    with running_oaiserve() as server:
        for seed in range(args.seeds):
            given = asyncio.run(answers(server.url, asked, seed=seed, **args.params))
            counts.append(show(asked, given))
    num_cut, num_repeating = (sum(column) for column in zip(*counts, strict=True))
    print(f"Of {args.seeds * len(asked)} answers, {num_repeating} repeat themselves and {num_cut} are cut off.")
    return int(num_cut > 0 or num_repeating > 0)


if __name__ == "__main__":
    sys.exit(main())
