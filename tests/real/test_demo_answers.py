"""What a newcomer reads first: the demo model's answers to the prompts that the chat page suggests."""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.e2e.live import serve_process

EXAMPLES = Path(__file__).parents[2] / "oaiserve/plugins/pages/static/examples.js"
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


async def answers(url: str, asked: Sequence[str]) -> list[tuple[str, str]]:
    """Ask all prompts at once, and return the text and the finish reason of each answer."""
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_SECONDS) as http:

        async def answer(prompt: str) -> tuple[str, str]:
            body = {"model": "demo", "messages": [{"role": "user", "content": prompt}]}
            response = await http.post("/v1/chat/completions", json=body)
            choice = response.raise_for_status().json()["choices"][0]
            return choice["message"]["content"], choice["finish_reason"]

        return list(await asyncio.gather(*(answer(prompt) for prompt in asked)))


def test_each_suggested_prompt_gets_an_answer_that_ends_and_does_not_repeat_itself(tmp_path: Path) -> None:
    asked = prompts()
    with serve_process("demo", tmp_path / "log") as server:
        given = asyncio.run(answers(server.url, asked))
    assert len(asked) == 20
    for prompt, (text, reason) in zip(asked, given, strict=True):
        assert reason == "stop", f"{prompt}: {text}"
        assert not repeats_itself(text), f"{prompt}: {text}"
    assert given[asked.index("What is the capital of France?")][0] == "The capital of France is Paris."


def test_an_answer_without_end_is_found() -> None:
    endless = "L'Étoile, " + "la Marseillaise, la femme, la femme, la femme, " * 4
    assert repeats_itself(endless)
    assert not repeats_itself("The capital of France is Paris.")
