"""The figures of explaining what prompts reused."""

from random import Random

import pytest

from oaiserve.engine.request import ChatPrompt
from tools.bench.reuse import BYTES_PER_TOKEN, LEAST_TOKENS_WITH_TOOLS, LENGTHS, measured, table, turn_of


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_turn_has_the_tokens_and_about_the_text_of_its_length(num_tokens: int) -> None:
    turn = turn_of(num_tokens, Random(0))
    (prompt,) = turn.request.prompts
    assert isinstance(prompt, ChatPrompt)
    assert len(turn.token_ids) == num_tokens
    assert bool(prompt.tools) == (num_tokens >= LEAST_TOKENS_WITH_TOOLS)
    num_bytes = len(str(prompt.messages)) + len(str(prompt.tools))
    assert 0.8 * BYTES_PER_TOKEN * num_tokens <= num_bytes <= 1.6 * BYTES_PER_TOKEN * num_tokens


def test_the_table_has_both_parts_and_their_sum() -> None:
    results = {"prompts": {"8000": {"outline": 0.0001, "explanation": 0.0004}}, "evictions_of_a_step": 2e-6}
    assert "| 8,000 | 0.10 | 0.40 | 0.50 |" in table(results)
    assert min(measured(100, 1).values()) > 0
