"""Drafts in the engine: they change no answer, cost nobody else anything, and are as long as measured times allow."""

import json
import random
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.drafting.drafts import MOST_STEP_TOKENS, Drafts, StepTimes
from oaiserve.engine.request import Aborted, Finished, Grammar, Request, SamplingParams, TokenPrompt
from oaiserve.engine.scheduling.policy import POLICIES
from oaiserve.engine.sequences.lookup import FIRST_CHANCES, LEAST_CHANCE, MATCHES, SIZES, Lookup
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Step, StepResult
from tests.engine import device
from tests.engine.device import Device, FutureDrafts, answers, check_answers, some_requests
from tests.engine.doubles import EOS, LETTERS, Launched, request
from tests.engine.drafting.decoding import Decoding, misleading, repeating
from tests.engine.grammars.plain import allowed_ids
from tests.engine.grammars.test_grammars_in_steps import constrained_requests
from tests.engine.memory import NEVER, launched, make, sequence

in_both_ways = pytest.mark.usefixtures("overlap")

# -- answers ----------------------------------------------------------------------------------------------------------


@in_both_ways
@pytest.mark.parametrize("share_right", [1.0, 0.7, 0.0], ids=["right", "partly right", "wrong"])
@pytest.mark.parametrize("kv_blocks", [400, 30], ids=["much cache", "little cache"])
def test_answers_are_those_without_drafts(kv_blocks: int, share_right: float) -> None:
    """There are preemptions, choices, grammars, ends of every kind, edits by ids, shortages and aborts."""
    rng = random.Random(kv_blocks)
    requests = [*some_requests(rng, 60), *constrained_requests(rng, 20)]
    device_short_of_memory = Device(lambda step: step.num_tokens <= rng.choice([8, 48, 48, 48]), seed=1)
    drafts = FutureDrafts(1, share_right)
    outcome = check_answers(
        rng, requests, device_short_of_memory, share_leaving=0.1, drafts=drafts, kv_blocks=kv_blocks
    )
    assert all(isinstance(event, Finished | Aborted) for event in outcome.ended.values())
    num_verified = outcome.total("num_draft_tokens")
    num_accepted = outcome.total("num_accepted_tokens")
    assert drafts.num_verified > 50
    assert num_verified <= drafts.num_verified, "what is verified for a request that has ended counts nowhere"
    assert num_accepted <= drafts.num_right
    assert (num_accepted > 30) == (share_right > 0)


def goes_round(ids: list[int], mask: np.ndarray | None = None) -> int:
    """Return a letter or the end, in place of `drawn_after`: texts go round, with a change after every 24 tokens."""
    choices = [*LETTERS, EOS] if mask is None else allowed_ids(mask)
    return choices[hash((ids[-1], len(ids) // 24)) % len(choices)]


@in_both_ways
@pytest.mark.parametrize("kv_blocks", [400, 30], ids=["much cache", "little cache"])
def test_answers_that_sometimes_repeat_themselves_are_those_without_drafts(
    kv_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps overlap until a draft pays. Answers end by stop strings, clients leave, and sequences are preempted."""
    monkeypatch.setattr(device, "drawn_after", goes_round)
    monkeypatch.setattr(StepTimes, "expected", lambda _: [1.0] * (MOST_STEP_TOKENS + 1))  # so drafts cost nothing
    rng = random.Random(kv_blocks)
    requests = [*some_requests(rng, 5), *constrained_requests(rng, 3)]
    for number in range(10):
        prompt = TokenPrompt(rng.sample(range(50), 5))
        requests.append(Request(f"long {number}", (prompt,), SamplingParams(max_tokens=70, stop=("abc", "xx"))))
    sizes = {"kv_blocks": kv_blocks, "max_running": 24}  # None waits where there are drafts.
    outcome = check_answers(rng, requests, Device(), share_leaving=0.1, drafts=Drafts(), **sizes)
    assert outcome.total("num_accepted_tokens") > 5
    assert (outcome.num_preemptions > 0) == (kv_blocks == 30)


class NotedDevice(Device):
    """An asynchronous device that notes of each launch whether a step is in flight, and whether the new one has
    drafts."""

    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[int, bool]] = []
        self._num_in_flight = 0

    def launch(self, step: Step) -> Launched:
        self.launches.append((self._num_in_flight, step.num_draft_tokens > 0))
        self._num_in_flight += 1
        return super().launch(step)

    def collect(self, launched: Launched) -> StepResult:
        self._num_in_flight -= 1
        return super().collect(launched)


def test_steps_overlap_except_those_with_drafts_and_the_one_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [*LETTERS, *LETTERS[-4:] * 10, *LETTERS[::-1]]  # only its middle repeats what came before
    prompt = [1] * 5
    monkeypatch.setattr(device, "drawn_after", lambda ids, mask=None: text[len(ids) - len(prompt)])
    monkeypatch.setattr(StepTimes, "expected", lambda _: [1.0] * (MOST_STEP_TOKENS + 1))
    noted = NotedDevice()
    one = request(prompt_len=len(prompt), max_tokens=len(text), ignore_eos=True)
    outcome = answers(noted, [one], drafts=Drafts(), kv_blocks=400, max_model_len=200)
    assert outcome.token_ids["r", 0] == text
    launches = noted.launches
    overlapped = (1, False)
    drafting = (0, True)
    assert launches[1 : len(LETTERS)] == [overlapped] * (len(LETTERS) - 1)
    assert launches[-20:] == [overlapped] * 20
    middle = launches[len(LETTERS) : -20]
    assert 3 <= middle.count(drafting) <= len(middle) // 2
    assert (1, True) not in launches
    assert all(later[0] == 0 for before, later in pairwise(launches) if before == drafting)
    num_waits_in_vain = sum(before == (0, False) == later for before, later in pairwise(middle))
    assert num_waits_in_vain <= 2


@in_both_ways
@pytest.mark.parametrize("kv_blocks", [400, 30], ids=["much cache", "little cache"])
def test_parts_of_answers_obey_their_grammar_with_drafts_as_without(kv_blocks: int) -> None:
    """Wherever "a" or "bc" comes, "xy" or three letters from the end of the alphabet have to follow."""
    lark = 'start: "A" "xy" REST | "B" /[u-z]{3}/ REST\nREST: /(?s:.*)/'
    grammar = Grammar("lark_with_schemas", json.dumps({"lark": lark, "schemas": {}}), leads=("a", "bc"))
    requests = [
        Request(f"r{i}", (TokenPrompt([i % 7, i]),), SamplingParams(max_tokens=60, grammar=grammar)) for i in range(30)
    ]
    outcome = [
        answers(Device(), requests, drafts=drafts, kv_blocks=kv_blocks, max_model_len=80)
        for drafts in (None, FutureDrafts(1, 0.8))
    ]
    texts = [[each.choices[one.request_id, 0].text for one in requests] for each in outcome]
    assert texts[0] == texts[1]
    assert outcome[1].total("num_accepted_tokens") > 30
    joined = " ".join(texts[0])
    num_parts = len(re.findall("a|bc", joined))
    assert num_parts > 10
    assert num_parts == len(re.findall("a(?=xy|x?(?: |$))|bc(?=[u-z]{3}|[u-z]{0,2}(?: |$))", joined))


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("only_if_exact", [True, False])
def test_by_default_there_are_drafts_only_where_a_token_is_computed_alike_in_all_steps(
    is_exact: bool, only_if_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "is_exact", is_exact)
    monkeypatch.setattr(StepTimes, "expected", lambda _: [1.0] * (MOST_STEP_TOKENS + 1))  # so drafts cost nothing
    requests = [request(max_tokens=40, ignore_eos=True)]
    drafts = Drafts(only_if_exact=only_if_exact)
    outcome = answers(Device(), requests, drafts=drafts, kv_blocks=400, max_model_len=80)
    assert (outcome.ended["r"].account.num_draft_tokens > 0) == (is_exact or not only_if_exact)


# -- the scheduler ----------------------------------------------------------------------------------------------------


def decoding(scheduler: object, *sequences: Sequence) -> None:
    """Compute the prompts, and commit token 7 of each."""
    for one in sequences:
        scheduler.add(one)
    step = launched(scheduler)
    for chunk in step.chunks:
        scheduler.commit(chunk, [7])


def test_accepted_tokens_are_computed_and_published_and_the_first_wrong_one_is_computed_next() -> None:
    scheduler = make()
    one = sequence("a", [1, 2], max_tokens=12)
    decoding(scheduler, one)
    one.draft = [8, 9, NEVER]
    step = scheduler.schedule()
    (chunk,) = step.chunks
    assert (chunk.start, chunk.num_tokens, chunk.max_draws, chunk.draft) == (2, 4, 4, (8, 9, NEVER))
    assert [(draw.end, draw.draft) for draw in chunk.draws()] == [(3, ()), (4, (8,)), (5, (8, 9)), (6, (8, 9, NEVER))]
    scheduler.advance(step)
    assert (one.num_computed, one.is_held, scheduler.pool.num_cached) == (3, True, 0)
    one.draft = []
    scheduler.commit(chunk, [8, 9, 5])
    assert (one.generated_ids, one.num_computed, one.num_tokens) == ([7, 8, 9, 5], 5, 6)
    assert scheduler.pool.num_cached == 1, "the block with the four first tokens, all of them confirmed"
    (chunk,) = scheduler.schedule().chunks
    assert (chunk.start, chunk.num_tokens) == (5, 1)


def test_a_draft_is_cut_to_the_length_of_the_answer_and_to_the_tokens_of_the_step() -> None:
    scheduler = make(max_step_tokens=8)
    one = sequence("a", [1, 2], max_tokens=4)
    two = sequence("b", [1, 2])
    decoding(scheduler, one, two)
    one.draft = [NEVER] * 6
    two.draft = [NEVER] * 6
    step = scheduler.schedule()
    assert [(chunk.sequence, len(chunk.draft)) for chunk in step.chunks] == [(one, 2), (two, 4)]
    assert step.num_tokens == 8


def test_no_sequence_is_preempted_for_a_draft_and_others_keep_the_blocks_that_they_need_next() -> None:
    scheduler = make(kv_blocks=4)
    one = sequence("a", 3, max_tokens=9)
    two = sequence("b", 3, max_tokens=9)
    decoding(scheduler, one, two)
    one.draft = [NEVER] * 7
    step = scheduler.schedule()
    assert [len(chunk.draft) for chunk in step.chunks] == [0, 0], "two blocks are free, and two sequences may need them"
    assert scheduler.foreground.num_preemptions == 0


def test_service_counts_the_tokens_that_came_true() -> None:
    scheduler = make(policy=POLICIES["fair"])
    one = sequence("a", [1, 2], client_name="a")
    other = sequence("b", [1, 2], client_name="b")
    decoding(scheduler, one, other)
    one.draft = [8, 9]
    other.draft = [NEVER, NEVER]
    before = [one.client.service, other.client.service]
    step = launched(scheduler)
    for chunk, tokens in zip(step.chunks, [[8, 9, 10], [8]], strict=True):
        scheduler.commit(chunk, tokens)
    assert [one.client.service - before[0], other.client.service - before[1]] == [6, 2]


# -- the look-up ------------------------------------------------------------------------------------------------------


def plain_draft(ids: list[int], most: int) -> list[int]:
    """Look for the longest of the runs at the end, from the end of the text to its beginning."""
    for size in SIZES:
        for place in range(len(ids) - 1, size - 1, -1):
            if ids[place - size : place] == ids[-size:]:
                result = ids[place:]
                while len(result) < most:
                    result += result[: most - len(result)]
                return result[:most]
    return []


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 9), st.integers(1, 20))
def test_a_guess_is_what_followed_the_longest_and_latest_run(ids: list[int], most: int, by: int) -> None:
    lookup = Lookup()
    for end in range(0, len(ids), by):  # however many tokens come at once
        draft, chances = lookup.draft(ids[:end], most)
        assert draft == plain_draft(ids[:end], most)[: len(chances)]


@pytest.mark.parametrize("match", [2, 6, 20])
def test_chances_by_the_length_of_the_match_follow_what_comes_true(match: int) -> None:
    """Whether or not a draft was verified."""
    lookup = Lookup()
    ids = [0, 1]
    run = [*range(100, 100 + match)]
    for number in range(200):  # When the run recurs, the same token follows three times out of four.
        ids += [7 if number % 4 else -number]
        lookup.draft(ids, 0)
        ids += [1000 + number, *run]
        _, chances = lookup.draft(ids, 1)
    assert 0.4 < chances[0] < 0.8
    kinds = [abs(chance - first) > 1e-9 for chance, first in zip(lookup.chances, FIRST_CHANCES, strict=True)]
    assert kinds == [least <= match < most for least, most in pairwise([*MATCHES, 99])]


def test_a_guess_ends_where_it_hardly_comes_true() -> None:
    draft, chances = Lookup().draft([1, 2, 3, 4, 5, 6, 1, 2], 15)
    assert 1 <= len(draft) == len(chances) < 15
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] >= LEAST_CHANCE


# -- what a draft is worth --------------------------------------------------------------------------------------------

CHEAP = [8_000 + 250 * n for n in range(600)]  # a step reads the weights, and further tokens cost little


def test_where_drafts_come_true_and_cost_little_they_are_long() -> None:
    sizes = Decoding([repeating]).run(1000, CHEAP)[500:]
    assert sum(size >= 12 for size in sizes) >= 480
    assert sizes.count(1) >= 7, "the time without drafts must stay known"


def test_where_drafts_never_come_true_they_end() -> None:
    sizes = Decoding([misleading]).run(2000, CHEAP)
    assert any(size > 1 for size in sizes)
    assert max(sizes[500:]) == 1


def test_a_slow_step_is_forgotten() -> None:
    decoding = Decoding([repeating])
    decoding.run(50, CHEAP)
    decoding.run(10, [10**9] * 600)
    assert sum(decoding.run(400, CHEAP)[300:]) > 100 * 8


def test_large_steps_and_steps_that_others_wait_for_have_no_drafts() -> None:
    drafts = Drafts()
    Decoding([repeating], drafts).run(100, CHEAP)
    many = Decoding([repeating] * MOST_STEP_TOKENS, drafts).running
    one = many[0]
    drafts.propose([one], others_wait=False)
    assert one.draft
    drafts.propose(many, others_wait=False)
    assert not any(one.draft for one in many)
    drafts.propose([one], others_wait=False)
    drafts.propose([one], others_wait=True)
    assert not one.draft
    prompt = sequence("p", 100)
    drafts.propose([one, prompt], others_wait=False)
    assert not one.draft


def test_a_step_with_drafts_has_no_more_tokens_than_its_bound_and_the_best_guesses_come_first() -> None:
    decoding = Decoding([repeating] * 6)
    assert max(decoding.run(100, CHEAP)) <= MOST_STEP_TOKENS
    running = decoding.running
    for index, one in enumerate(running):
        one.lookup.chances[:] = [0.5 if index == 0 else 0.9] * len(MATCHES)
    decoding.drafts.propose(running, others_wait=False)
    assert len(running[0].draft) < min(len(one.draft) for one in running[1:])


def test_a_new_sequence_begins_with_what_came_true_in_others() -> None:
    drafts = Drafts()
    Decoding([misleading], drafts).run(500, CHEAP)
    low = Decoding([misleading], drafts)
    low.run(1, CHEAP)
    assert low.running[0].lookup.chances[0] < FIRST_CHANCES[0] / 2
    Decoding([repeating], drafts).run(500, CHEAP)
    high = Decoding([repeating], drafts)
    high.run(1, CHEAP)
    assert high.running[0].lookup.chances[-1] > 0.95
