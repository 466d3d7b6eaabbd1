"""The count of answers that repeat themselves, by a rule of its own."""

from typing import Any

import pytest

from tools import loops

DIFFERENT = list(range(400))


@pytest.mark.parametrize(
    ("token_ids", "share"),
    [
        (DIFFERENT, 0),
        ([], 0),
        ([1] * 5, 0),
        ([1, 2, 3] * 100, 1),
        ([*range(200), *[1, 2] * 100], pytest.approx(1, abs=0.05)),
        ([*[1, 2] * 100, *range(10, 410)], 0),  # only the last half counts
        ([*range(300), *range(100)], pytest.approx(0.47, abs=0.01)),
    ],
)
def test_share_is_of_rows_in_the_last_half_that_are_there_again(token_ids: list[int], share: float) -> None:
    assert loops.repeated_share(token_ids) == share


def answer(share: float, reason: str, loop: Any = None) -> dict[str, Any]:
    return {"repeated_share": share, "finish_reason": reason, "loop": loop}


def test_report_counts_a_loop_only_where_the_answer_goes_on_up_to_its_limit() -> None:
    answers = [answer(0.9, "length", {"choices": 1}), answer(0.9, "stop"), answer(0.1, "length"), answer(0, "stop")]
    lines = loops.report({"models": {"a": {"answers": answers}, "b": {"answers": answers[:1]}}}).splitlines()
    assert lines[2:] == ["| a | 4 | 1 | 2 | 2 | 1 |", "| b | 1 | 1 | 1 | 1 | 1 |", "| all | 5 | 2 | 3 | 3 | 2 |"]


def test_there_are_fifteen_prompts_of_each_kind() -> None:
    assert len(set(loops.PROMPTS)) == len(set(loops.OPENINGS)) == 15
