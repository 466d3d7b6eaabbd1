"""The sentence on what was read again names the amount, the time, the change and what helps."""

import pytest

from oaiserve.facts.record import EngineAccount, ReadAgain, WaitReason
from oaiserve.telemetry.explanation import sentences
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
            "request chatcmpl-1 took the place of their blocks 2 s before. A larger --kv-cache-memory, "
            "--prefix-cache-dir on a CPU or --kv-offload on a GPU keeps more.",
        ),
        (ReadAgain.EVICTED, COMPARED, "other requests took the place of their blocks. A larger"),
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


@pytest.mark.parametrize(
    ("waits_ns", "said"),
    [
        ({WaitReason.PREFIX_RESTORED: 6_000_000}, "came back from host memory, for which it waited 6 ms."),
        ({WaitReason.BATCH_FULL: 9, WaitReason.PREFIX_READ: 2_000_000_000}, "came back from disk, for which it waited"),
        ({WaitReason.BATCH_FULL: 9}, "came back from below the prefix cache, without a wait."),
    ],
)
def test_tokens_that_came_back_have_a_sentence_with_their_cost(
    make_record: MakeRecord, waits_ns: dict[WaitReason, int], said: str
) -> None:
    account = EngineAccount(num_restored_tokens=1_312, waits_ns=waits_ns)
    first, *_ = sentences(make_record(prompt_tokens=1_430, cached_tokens=1_312, account=account), [])
    assert first.startswith("1,312 of 1,430 prompt tokens came back from ")
    assert said in first
