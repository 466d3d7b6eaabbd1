"""The sentences that say why a request took so long."""

from dataclasses import replace

import pytest

from oaiserve.facts.media import MediaAccount
from oaiserve.facts.record import SLOW_CLOCK, Cause, EngineAccount, OthersTime, RequestRecord, WaitReason, Whose
from oaiserve.facts.times import RequestTimes
from oaiserve.telemetry.explanation import sentences
from tests.records import MS, record_at


def neighbour(request_id: str, steps: range, alone_ms: int, *, prompt_steps: int) -> RequestRecord:
    account = EngineAccount(
        first_step=steps.start,
        num_steps=len(steps),
        num_prefill_steps=prompt_steps,
        prefill_causes_ns={Cause.ALONE: alone_ms * MS},
        decode_causes_ns={Cause.ALONE: alone_ms * MS},
    )
    stamps = (0, 0, 0, 0, 0, alone_ms, 2 * alone_ms, 2 * alone_ms)
    return record_at(*stamps, request_id=request_id, account=account, prompt_tokens=1700)


def test_a_slow_decode_names_its_neighbours_and_the_one_that_had_most() -> None:
    account = EngineAccount(
        first_step=100,
        num_steps=50,
        num_prefill_steps=1,
        prefill_causes_ns={Cause.ALONE: 20 * MS},
        decode_causes_ns={
            Cause.ALONE: 2100 * MS,
            Cause.NEIGHBOUR_DECODES: 900 * MS,
            Cause.NEIGHBOUR_PROMPTS: 4000 * MS,
            Cause.MACHINE: 600 * MS,
            Cause.HOST: 30 * MS,
            Cause.UNEXPLAINED: 350 * MS,
        },
    )
    slow = record_at(0, 0, 0, 0, 0, 20, 8000, 8000, account=account)
    others = [
        neighbour("batch-1", range(110, 130), 3000, prompt_steps=19),
        neighbour("small-2", range(90, 120), 100, prompt_steps=1),
        neighbour("before-3", range(90), 9000, prompt_steps=80),
    ]
    assert list(sentences(slow, [slow, *others])) == [
        "decode took 7.98 s; 4.9 s came from 2 other requests (900 ms decodes and 4 s prompts), most from batch-1 and "
        "its prompt of 1,700 tokens; alone it would have taken 2.1 s; for 600 ms the machine was busy elsewhere; "
        "350 ms are unexplained."
    ]


def test_neighbours_that_still_run_have_no_name() -> None:
    decode_causes_ns = {Cause.ALONE: 50 * MS, Cause.NEIGHBOUR_DECODES: 50 * MS}
    account = EngineAccount(prefill_causes_ns={Cause.ALONE: 10 * MS}, decode_causes_ns=decode_causes_ns)
    slow = record_at(0, 0, 0, 0, 0, 10, 110, 110, account=account)
    assert list(sentences(slow, [slow])) == [
        "decode took 100 ms; 50 ms came from other requests that have not ended (50 ms decodes); alone it would have "
        "taken 50 ms."
    ]


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (OthersTime(Whose.OTHER_CLIENT, "batchjob", 4500 * MS, 400 * MS, 0), "4.9 s of it for prompts of batchjob"),
        (OthersTime(Whose.OTHER_CLIENT, None, 0, 900 * MS, 0), "900 ms of it for decodes of other clients"),
        (OthersTime(Whose.OTHER_CLIENT, "other", 0, 900 * MS, 0), "900 ms of it for decodes of further clients"),
        (
            OthersTime(Whose.SAME_CLIENT, "alice", 0, 0, 70 * MS),
            "70 ms of it for images and sounds of other requests of the same client",
        ),
    ],
)
def test_whose_requests_took_the_time_of_a_phase_is_said(others: OthersTime, said: str) -> None:
    decode_causes_ns = {Cause.ALONE: 3000 * MS, Cause.NEIGHBOUR_PROMPTS: 4900 * MS}
    account = EngineAccount(
        prefill_causes_ns={Cause.ALONE: 10 * MS}, decode_causes_ns=decode_causes_ns, others_ns={"decode": [others]}
    )
    slow = record_at(0, 0, 0, 0, 0, 10, 7910, 7910, account=account)
    expected = f"4.9 s came from other requests that have not ended (4.9 s prompts): {said}; alone"
    (sentence,) = sentences(slow, [slow])
    assert expected in sentence


def test_who_used_the_machine_is_named() -> None:
    users_ns = {"make (process 11)": 900 * MS, "the host of this virtual machine": 200 * MS, "sh (process 2)": 100 * MS}
    causes_ns = {Cause.ALONE: 40 * MS, Cause.MACHINE: 60 * MS}
    account = EngineAccount(prefill_causes_ns=causes_ns, machine_users_ns=users_ns)
    slow = record_at(0, 0, 0, 0, 0, 100, 100, 100, account=account)
    assert next(sentences(slow, [slow])) == (
        "prefill took 100 ms; for 60 ms the machine was busy elsewhere (most of all with make (process 11) and the "
        "host of this virtual machine); alone it would have taken 40 ms."
    )


def test_a_lower_clock_frequency_is_named_where_time_is_unexplained() -> None:
    causes_ns = {Cause.ALONE: 40 * MS, Cause.UNEXPLAINED: 60 * MS}
    account = EngineAccount(prefill_causes_ns=causes_ns, machine_users_ns={SLOW_CLOCK: 50 * MS})
    slow = record_at(0, 0, 0, 0, 0, 100, 100, 100, account=account)
    assert next(sentences(slow, [slow])) == (
        "prefill took 100 ms; 60 ms are unexplained (meanwhile there was a lower clock frequency of the cores); alone "
        "it would have taken 40 ms."
    )


def test_others_in_steps_of_an_unknown_kind_are_named() -> None:
    others = [OthersTime(Whose.OTHER_CLIENT, "batchjob", 40 * MS, 2 * MS, 0)]
    account = EngineAccount(
        prefill_causes_ns={Cause.NOT_KNOWN_YET: 57 * MS, Cause.MACHINE: 43 * MS}, others_ns={"prefill": others}
    )
    first = record_at(0, 0, 0, 0, 0, 100, 100, 100, account=account)
    assert next(sentences(first, [first])) == (
        "prefill took 100 ms; for 57 ms it was in steps of a kind that the server had hardly seen before: 42 ms of it "
        "for prompts of batchjob; for 43 ms the machine was busy elsewhere; what it would have taken alone is not "
        "known yet."
    )


def test_a_queue_names_the_client_whose_requests_were_computed_meanwhile() -> None:
    others = [OthersTime(Whose.OTHER_CLIENT, "batchjob", 580 * MS, 2 * MS, 0)]
    account = EngineAccount(waits_ns={WaitReason.TOKEN_BUDGET: 600 * MS}, others_ns={"queue": others})
    slow = record_at(0, 0, 0, 0, 600, 610, 620, 650, account=account)
    assert next(sentences(slow, [])) == (
        "queue took 600 ms; 600 ms for token budget; 582 ms of it went to prompts of batchjob."
    )


def test_a_time_alone_that_is_not_known_yet_says_so() -> None:
    account = EngineAccount(prefill_causes_ns={Cause.NOT_KNOWN_YET: 57 * MS, Cause.MACHINE: 330 * MS})
    first = record_at(0, 0, 0, 0, 0, 387, 387, 387, account=account)
    expected = (
        "prefill took 387 ms; for 330 ms the machine was busy elsewhere (with what is not known: it took too short a "
        "time, or the system does not tell); for 57 ms it was in steps of a kind that the "
        "server had hardly seen before; what it would have taken alone is not known yet."
    )
    assert list(sentences(first, [first])) == [expected]
    assert [*first.causes_ns["prefill"]] == [Cause.MACHINE, Cause.NOT_KNOWN_YET]


def test_a_long_queue_has_its_reasons_and_other_phases_have_none() -> None:
    account = EngineAccount(waits_ns={WaitReason.STEP_UNDER_WAY: 2 * MS, WaitReason.BATCH_FULL: 598 * MS})
    slow = record_at(0, 300, 300, 300, 900, 910, 920, 1000, account=account)
    assert list(sentences(slow, [])) == ["queue took 600 ms; 598 ms for batch full.", "receive took 300 ms."]


def test_a_queue_names_the_host_memory_from_which_a_prefix_was_restored() -> None:
    account = EngineAccount(waits_ns={WaitReason.PREFIX_RESTORED: 600 * MS})
    slow = record_at(0, 0, 0, 0, 600, 610, 620, 650, account=account)
    (said,) = sentences(slow, [])
    assert said == "queue took 600 ms; 600 ms for its prefix to be restored from host memory."


def test_the_media_of_a_request_took_a_part_of_their_phase() -> None:
    times = RequestTimes(0, 0, 0, 0, 90 * MS, 91 * MS, 92 * MS, 92 * MS, 100 * MS, has_media=True)
    slow = replace(
        record_at(0, 0), times=times, account=EngineAccount(media=MediaAccount(num_images=1, encode_ns=20 * MS))
    )
    assert list(sentences(slow, [])) == ["encode media took 90 ms; its own images and sounds took 20 ms of that."]


def test_the_time_after_the_last_step_of_a_request_that_ended_early_is_the_hosts() -> None:
    account = EngineAccount(prefill_causes_ns={Cause.ALONE: 4 * MS, Cause.HOST: MS})
    record = record_at(0, 0, 0, 0, 0, 10, account=account)
    assert record.causes_ns == {"prefill": {Cause.ALONE: 4 * MS, Cause.HOST: 6 * MS}}
