"""What a prompt reused, what was read again, and why."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.explain.reuse import recent_prompts
from oaiserve.explain.reuse.outline import Change, Outline, Part, part_of
from oaiserve.explain.reuse.prefix_hashes import prefix_hashes
from oaiserve.explain.reuse.recent_prompts import ReadPrompt, RecentPrompts, Reuse
from oaiserve.facts.lost_prefix import Eviction, LostPrefix
from oaiserve.facts.record import ReadAgain
from oaiserve.facts.turn import AgentRun

BLOCK = 4
OTHER = part_of(b"other")
LOST = LostPrefix(76, Eviction(5, "taker"))
TALK = Outline(
    "model",
    tools=(part_of(b"search"), part_of(b"read")),
    system=(part_of(b"You are helpful."),),
    options={"thinking": part_of(b"true")},
    messages=(part_of(b"first question"), part_of(b"first answer")),
)


def read(name: str, token_ids: list[int], outline: Outline = TALK, *, cached: int = 0, **more: object) -> ReadPrompt:
    fields = {"client": "client", "run": AgentRun(), "scheduled_ns": 1, "at_ns": 0} | more
    return ReadPrompt(name, name, outline=outline, hashes=prefix_hashes(token_ids), num_cached=cached, **fields)  # type: ignore[arg-type]


def explained(
    now: Outline, *, before: Outline = TALK, num_common: int = 0, cached: int = 0, lost: LostPrefix | None = None
) -> Reuse:
    """Return what a prompt of 100 tokens reused of one before, with which it has some tokens in common."""
    recent = RecentPrompts(BLOCK, has_cache=True)
    begin = list(range(num_common))
    recent.explain(read("before", begin + [1] * (100 - num_common), before))
    return recent.explain(
        read("now", begin + [2] * (100 - num_common), now, cached=cached, at_ns=40), named="before", lost=lost
    )


CHANGES = {
    ReadAgain.MODEL: (replace(TALK, model="adapter"), None, 88),
    ReadAgain.SALT: (replace(TALK, salt=OTHER), None, 88),
    ReadAgain.TOOLS: (replace(TALK, tools=(TALK.tools[0], OTHER)), 1, 80),
    ReadAgain.SYSTEM: (replace(TALK, system=(OTHER,)), 0, 55),
    ReadAgain.OPTIONS: (replace(TALK, options={}), None, 88),
    ReadAgain.MESSAGE: (replace(TALK, messages=(OTHER, *TALK.messages[1:])), 1, 41),
    ReadAgain.IMAGE: (replace(TALK, images=(part_of(b"now"),)), 0, 72),
    ReadAgain.TEXT: (TALK, None, 88),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_the_first_changed_part_is_the_reason(reason: ReadAgain) -> None:
    outline, place, num_again = CHANGES[reason]
    before = replace(TALK, images=(part_of(b"before"),)) if reason is ReadAgain.IMAGE else TALK
    reuse = explained(outline, before=before, num_common=13, cached=12)
    assert reuse.change is not None
    assert (reuse.change.reason, reuse.change.place) == (reason, place)
    assert (reuse.num_cached, reuse.num_read_again, reuse.num_new) == (12, num_again, 88 - num_again)
    assert reuse.num_missed == 88
    # Images have the same tokens, so only what is cached is known to be the same.
    assert (reuse.compared_with, reuse.age_ns, reuse.num_common) == ("before", 40, 12 if before.images else 13)


def test_a_conversation_that_goes_on_reads_nothing_again() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    longer = replace(TALK, messages=(*TALK.messages, part_of(b"second question")))
    recent.explain(read("first", [1] * 50))
    reuse = recent.explain(read("second", [1] * 80, longer, cached=48))
    assert (reuse.reason, reuse.num_cached, reuse.num_read_again, reuse.num_new) == (None, 48, 0, 32)


def test_evicted_blocks_are_the_reason_where_the_text_is_the_same() -> None:
    reuse = explained(TALK, num_common=100, cached=20, lost=LOST)
    assert (reuse.reason, reuse.num_read_again, reuse.lost) == (ReadAgain.EVICTED, 80, LOST)


def test_a_change_is_the_reason_where_little_was_lost_before_it() -> None:
    changed = replace(TALK, messages=(OTHER,))
    assert explained(changed, num_common=20, lost=LostPrefix(16, Eviction(5, "taker"))).reason is ReadAgain.MESSAGE


def test_a_changed_option_is_named() -> None:
    changed = replace(TALK, options={"thinking": OTHER, "style": OTHER})
    assert explained(changed).change == Change(ReadAgain.OPTIONS, option="style")


def test_full_blocks_that_were_not_cached_are_written() -> None:
    prompt = read("now", [1] * 50, cached=8)
    assert RecentPrompts(BLOCK, has_cache=True).num_written(prompt) == 40
    assert RecentPrompts(BLOCK, has_cache=False).num_written(prompt) == 0


def test_a_state_that_was_not_kept_is_the_reason_where_blocks_are_cached() -> None:
    assert explained(TALK, num_common=100, lost=LostPrefix(96, None)).reason is ReadAgain.STATE


def test_a_prompt_that_was_not_computed_yet_is_the_reason_where_nothing_was_lost() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("before", [1] * 50, at_ns=40))
    assert recent.explain(read("now", [1] * 50, scheduled_ns=39, at_ns=80)).reason is ReadAgain.NOT_YET


def test_a_prompt_that_was_computed_and_whose_eviction_is_forgotten_was_evicted() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("before", [1] * 50, at_ns=40))
    reuse = recent.explain(read("now", [1] * 50, scheduled_ns=41, at_ns=80))
    assert (reuse.reason, reuse.lost) == (ReadAgain.EVICTED, None)


def test_what_another_replica_has_is_the_reason_where_it_has_more() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("before", [1] * 20 + [2] * 80))
    reuse = recent.explain(
        read("now", [1] * 20 + [3] * 80, replace(TALK, system=(OTHER,)), cached=20, held_elsewhere=0.9)
    )
    assert (reuse.reason, reuse.num_cached, reuse.num_read_again, reuse.num_new) == (
        ReadAgain.OTHER_REPLICA,
        20,
        70,
        10,
    )
    again = recent.explain(read("again", [1] * 20 + [3] * 80, cached=100, held_elsewhere=0.9))
    assert (again.reason, again.num_read_again) == (None, 0)


def test_without_a_cache_that_is_the_reason() -> None:
    recent = RecentPrompts(BLOCK, has_cache=False)
    recent.explain(read("before", [1] * 50))
    assert recent.explain(read("now", [1] * 50)).reason is ReadAgain.OFF


def test_lost_blocks_are_told_even_if_the_earlier_prompt_is_forgotten() -> None:
    reuse = RecentPrompts(BLOCK, has_cache=True).explain(
        read("now", [1] * 50, cached=8), lost=LostPrefix(16, Eviction(5, "taker"))
    )
    assert (reuse.reason, reuse.num_cached, reuse.num_read_again, reuse.num_new) == (ReadAgain.EVICTED, 8, 16, 26)


def test_the_first_prompt_of_its_kind_reads_nothing_again() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("other", [1] * 50, Outline(messages=(OTHER,))))
    assert recent.explain(read("first", [2] * 50)).reason is None


def test_without_a_name_the_last_prompt_of_the_run_is_compared() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("of the run", [1] * 50, Outline(messages=(part_of(b"a"),)), run=AgentRun("run")))
    recent.explain(read("of another", [2] * 50, TALK, run=AgentRun("another")))
    assert recent.explain(read("now", [2] * 50, TALK, run=AgentRun("run"))).compared_with == "of the run"


def test_an_edited_system_message_is_read_again_with_all_behind_it() -> None:
    edited = replace(TALK, system=(part_of(b"You are hopeful."),))
    assert explained(edited, num_common=13, cached=12).num_read_again == 88


def test_what_is_read_again_behind_a_clock_is_the_earlier_prompt_however_much_is_new() -> None:
    clock = replace(TALK, system=(part_of(b"You are hopeful."),))
    for number_new, text in ((10, b"short"), (900, b"a long file" * 99)):
        recent = RecentPrompts(BLOCK, has_cache=True)
        recent.explain(read("before", [1] * 100))
        longer = replace(clock, messages=(*TALK.messages, part_of(text)))
        reuse = recent.explain(read("now", [2] * (100 + number_new), longer))
        assert (reuse.reason, reuse.num_read_again, reuse.num_new) == (ReadAgain.SYSTEM, 100, number_new)


def test_another_question_after_the_same_system_message_is_new() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    before = replace(TALK, messages=(part_of(b"a question"),))
    recent.explain(read("before", [1] * 50 + [2] * 50, before))
    now = replace(TALK, messages=(part_of(b"another question"),))
    reuse = recent.explain(read("now", [1] * 50 + [3] * 50, now, cached=48))
    assert (reuse.reason, reuse.num_read_again, reuse.num_new) == (None, 0, 52)


def test_texts_that_only_begin_alike_are_new_behind_that() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("before", [1] * 32 + [2] * 50, Outline(messages=(part_of(b"a"),))))
    reuse = recent.explain(read("now", [1] * 32 + [3] * 50, Outline(messages=(part_of(b"b"),)), cached=32))
    assert (reuse.compared_with, reuse.reason, reuse.num_read_again) == ("before", None, 0)


def test_the_first_prompt_of_a_run_is_not_compared_with_another_that_has_a_message_like_its_own() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("another run", [1] * 50, run=AgentRun("one")))
    clock = replace(TALK, system=(OTHER,))
    assert recent.explain(read("first", [2] * 50, clock, run=AgentRun("two"))).compared_with == ""


def test_a_prompt_that_is_read_twice_under_one_id_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prompts, "MAX_TOKENS", 100)
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("other", [1] * 40))
    for _ in range(3):
        recent.explain(read("same", [1] * 40))
    assert len(recent) == 2


def test_without_a_run_the_prompt_with_the_most_parts_in_common_is_compared() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("same talk", [1] * 50))
    recent.explain(read("same tools", [1] * 50, replace(TALK, messages=(OTHER,))))
    clock = replace(TALK, system=(part_of(b"It is 12:01."),))
    assert recent.explain(read("now", [2] * 50, clock)).compared_with == "same talk"


def test_texts_without_parts_in_common_are_found_by_their_beginning() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("short", [1] * 16 + [3] * 34, Outline(messages=(part_of(b"a"),))))
    recent.explain(read("long", [1] * 32 + [4] * 34, Outline(messages=(part_of(b"b"),))))
    assert recent.explain(read("now", [1] * 32 + [5] * 34, Outline(messages=(part_of(b"c"),)))).compared_with == "long"


def test_prompts_of_others_are_never_compared() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("secret", [1] * 50, client="other"))
    assert recent.explain(read("now", [1] * 50)).compared_with == ""
    assert recent.find("client", "secret") is None
    assert recent.explain(read("named", [1] * 50), named="secret").compared_with == ""


def test_a_prompt_that_reads_no_cache_has_that_as_its_reason() -> None:
    recent = RecentPrompts(BLOCK, has_cache=True)
    recent.explain(read("first", [1] * 50))
    assert recent.explain(read("with log-probabilities", [1] * 50, reads_cache=False)).reason is ReadAgain.OFF


def test_the_oldest_prompts_are_forgotten_with_all_that_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prompts, "MAX_PROMPTS", 2)
    recent = RecentPrompts(BLOCK, has_cache=True)
    for number in range(9):
        outline = Outline(messages=(part_of(bytes([number])),))
        recent.explain(read(f"{number}", [number] * 50, outline, run=AgentRun(f"{number}", f"agent {number}")))
    assert len(recent) == 2
    tables = (recent._by_run, recent._by_agent, recent._by_part, recent._by_checkpoint)
    assert {key for table in tables for key in table.values()} == {"7", "8"}


def test_many_tokens_are_forgotten_before_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prompts, "MAX_TOKENS", 100)
    recent = RecentPrompts(BLOCK, has_cache=True)
    for number in range(9):
        recent.explain(read(f"{number}", [number] * 40))
    assert len(recent) == 2


def test_many_parts_are_forgotten_before_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_prompts, "MAX_PARTS", 8)
    recent = RecentPrompts(BLOCK, has_cache=True)
    for number in range(9):
        recent.explain(read(f"{number}", [number], Outline(tools=(OTHER,), messages=(OTHER,) * 3)))
    assert len(recent) == 2


part = st.sampled_from([Part(b"a", 1), Part(b"b", 20), Part(b"c", 0)])
outlines = st.builds(
    Outline,
    model=st.sampled_from(["m", "n"]),
    tools=st.lists(part, max_size=2).map(tuple),
    system=st.lists(part, max_size=1).map(tuple),
    messages=st.lists(part, max_size=4).map(tuple),
)


losts = st.none() | st.builds(LostPrefix, st.integers(1, 60), st.none() | st.just(Eviction(5, "taker")))
prompts = st.tuples(outlines, st.lists(st.integers(-1, 2), max_size=60), st.integers(0, 60), losts, st.floats(0, 1))


@given(st.lists(prompts, max_size=8), st.booleans())
def test_cached_read_again_and_new_tokens_add_up_for_any_history(
    history: list[tuple[Outline, list[int], int, LostPrefix | None, float]], has_cache: bool
) -> None:
    recent = RecentPrompts(BLOCK, has_cache=has_cache)
    for number, (outline, token_ids, cached, lost, held) in enumerate(history):
        prompt = read(f"{number}", token_ids, outline, cached=cached, at_ns=number, held_elsewhere=held)
        reuse = recent.explain(prompt, lost=lost)
        parts = (reuse.num_cached, reuse.num_read_again, reuse.num_new)
        assert min(parts) >= 0
        assert sum(parts) == len(token_ids)
        assert (reuse.reason is None) == (reuse.num_read_again == 0)
