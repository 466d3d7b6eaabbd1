"""The sentence on what was read again names the amount, the time, the change and what helps."""

import pytest

from oaiserve.facts.record import ReadAgain
from oaiserve.telemetry.reuse_explanation import read_again
from tests.telemetry.conftest import MakeRecord

COMPARED = {"compared_with": "req-0", "age_ns": 40_000_000_000, "common_tokens": 13}


@pytest.mark.parametrize(
    ("reason", "reuse", "said"),
    [
        (
            ReadAgain.SYSTEM,
            COMPARED,
            "the system message differs from the one 40 s before, at the prompt's token 14. Put what changes, such as "
            "a clock, at the end of the conversation.",
        ),
        (
            ReadAgain.TOOLS,
            COMPARED | {"place": 2},
            "the tools differ from those 40 s before, from tool 3 on, at the prompt's token 14. Send the tools in the "
            "same order, and new ones last.",
        ),
        (
            ReadAgain.EVICTED,
            COMPARED | {"evicted_ns": 2_000_000_000, "evicted_for": "chatcmpl-1"},
            "request chatcmpl-1 took the place of their blocks 2 s before. A larger --kv-cache-memory, or "
            "--prefix-cache-dir, keeps more.",
        ),
        (ReadAgain.EVICTED, {"evicted_ns": 0, "evicted_for": ""}, "blocks that were read from disk took the place of"),
        (ReadAgain.MODEL, COMPARED, "the model or adapter differs from the one 40 s before."),
    ],
)
def test_a_reason_is_a_sentence(make_record: MakeRecord, reason: ReadAgain, reuse: dict[str, int], said: str) -> None:
    record = make_record(
        prompt_tokens=1_430, cached_tokens=0, read_again_tokens=1_312, read_again_reason=reason, reuse=reuse
    )
    sentence = read_again(record)
    assert sentence is not None
    assert sentence.startswith("1,312 of 1,430 prompt tokens were read again, which took ")
    assert said in sentence


@pytest.mark.parametrize("reason", ReadAgain)
def test_each_reason_has_a_sentence(make_record: MakeRecord, reason: ReadAgain) -> None:
    sentence = read_again(make_record(prompt_tokens=100, read_again_tokens=90, read_again_reason=reason))
    assert sentence is not None
    assert "{" not in sentence


def test_a_small_part_that_was_read_again_has_no_sentence(make_record: MakeRecord) -> None:
    assert read_again(make_record(prompt_tokens=100, read_again_tokens=9, read_again_reason=ReadAgain.TEXT)) is None
    assert read_again(make_record(prompt_tokens=100)) is None
