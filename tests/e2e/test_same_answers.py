"""The demo model in bfloat16 gives a request the same answer alone, again, and amid others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import LiveServer

pytestmark = pytest.mark.compiler
BUILD_SECONDS = 300  # in which the native step must be compiled, on a busy machine
TOPICS = ("whale", "violin", "volcano", "harbour", "winter", "bakery")
OPENINGS = (
    "Here is a long list of things that everybody should know about a {}, in the order of their importance. First,",
    "Once upon a time there was a {} that nobody in the whole village had ever seen before, and when the morning came",
    "def describe_the_{}(name: str, size: int) -> str:\n    # Returns one sentence that describes it, in plain words\n",
)
PROMPTS = [opening.replace("{}", topic) for topic in TOPICS for opening in OPENINGS]


@pytest.mark.parametrize("draws", [{"temperature": 0}, {"temperature": 1, "seed": 3}], ids=["greedy", "seeded"])
def test_a_request_has_the_same_answer_alone_again_and_amid_others(live: LiveServer, draws: dict[str, Any]) -> None:
    live.wait_for_log("native step is ready", BUILD_SECONDS)
    with live.sdk() as sdk:

        def ask(prompt: str) -> tuple[str, list[float | None], int]:
            """Return the text, its log-probabilities, and how many tokens of the prompt were cached."""
            answer = sdk.completions.create(model="demo", prompt=prompt, max_tokens=16, logprobs=0, **draws)
            (choice,), details = answer.choices, answer.usage.prompt_tokens_details
            return choice.text, choice.logprobs.token_logprobs, details.cached_tokens

        alone = [ask(prompt) for prompt in PROMPTS]
        again = [ask(prompt) for prompt in PROMPTS[:3]]
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            together = list(clients.map(ask, PROMPTS))
    assert [cached for *_, cached in again] == [16] * 3
    assert [answer for *answer, _ in again] == [answer for *answer, _ in alone[:3]]
    assert [answer for *answer, _ in together] == [answer for *answer, _ in alone]
    assert len({text for text, *_ in alone}) == len(PROMPTS)
