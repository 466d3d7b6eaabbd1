"""A device that computes with a memory of token ids, and the answers of an engine that runs on it."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oaiserve.engine.grammars import grammar
from oaiserve.engine.request import Grammar, Reasoning, Request, SamplingParams, TokenPrompt
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, ChunkResult, Draw, Logprobs, Masks, OutOfMemory, Step
from tests.engine.answers import Answers, run_to_the_end
from tests.engine.doubles import EOS, LETTERS, TOKENIZER, Launched, ScriptedRunner, make_engine
from tests.engine.grammars.plain import allowed_ids
from tests.engine.memory import NEVER, Cache

STAGES = ("before", "written")  # how far a step gets that there is no memory for


class Device(ScriptedRunner):
    """A device that computes a step when it is launched, and returns what it draws when the step is collected.

    A slot of the cache holds all ids up to its token. A draw that is edited by ids waits until the host knows these,
    and one under a grammar until it has its mask. `has_room` returns which steps fit, `can_copy` which copies do. Of a
    draft, as many draws count as behind its right tokens. With `max_draws`, 0 to `max_draws` tokens are drawn instead.
    """

    def __init__(self, has_room: Callable[[Step], bool] = lambda _: True, *, seed: int = 0, max_draws: int = 1) -> None:
        super().__init__(max_draws=max_draws)
        self.has_room = has_room
        self.can_copy: Callable[[list[tuple[int, int]]], bool] = lambda _: True
        self.tried: list[tuple[int, bool]] = []  # tokens of each launch, and whether they fitted
        self.num_copied = 0
        self.num_copies_refused = 0
        self.num_waited = 0  # draws
        self.num_void = 0  # chunks whose last token was never drawn
        self.num_superseded = 0  # chunks whose draw was forced meanwhile
        self._random = random.Random(seed)
        self._cache = Cache(block_size=4)
        # For each sequence of the last step: the number of ids before its draws, and the drawn ids.
        self._drawn: dict[Sequence, tuple[int, list[int]]] = {}

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        assert copies
        if not self.can_copy(copies):
            self.num_copies_refused += 1
            raise OutOfMemory("1 MiB was asked for")
        self._cache.copy_blocks(copies)
        self.num_copied += len(copies)

    def launch(self, step: Step) -> Launched:
        self._cache.copy_states(step.state_copies)
        fits = self.has_room(step)
        self.tried.append((step.num_tokens, fits))
        if not fits:
            if self._random.choice(STAGES) == "written":
                for chunk in step.chunks:
                    written = self._cache.slots_of(chunk.sequence, chunk.start, chunk.end)
                    self._cache.slots |= dict.fromkeys(written, (-1,))  # some layers have it, others do not
                    if chunk.sequence.state is not None:
                        self._cache.states[chunk.sequence.state] = (-1,)
            raise OutOfMemory("2 GiB were asked for")
        launched = self.begin(step)
        for chunk in step.chunks:
            del chunk.sequence.draft[self._random.randrange(self.max_draws) :]
        ids_of = {chunk.sequence: self._ids(chunk) for chunk in step.chunks}
        written = {chunk.sequence: [*ids_of[chunk.sequence][: chunk.known_end], *chunk.draft] for chunk in step.chunks}
        self._cache.compute(step, written)
        self._waiting = {chunk.sequence for chunk in step.chunks if chunk.draw is Draw.LATE}
        self.num_waited += len(self._waiting)
        self._drawn = {}
        launched.results = [self._result(chunk, ids_of[chunk.sequence]) for chunk in step.chunks]
        return launched

    def draw(self, launched: Launched, masks: Masks | None) -> None:
        super().draw(launched, masks)
        for chunk, result in zip(launched.step.chunks, launched.results, strict=True):
            self.num_superseded += chunk.draw is Draw.SUPERSEDED
            if chunk.draw is Draw.LATE:
                self._draw(chunk, chunk.sequence.token_ids, result, masks)

    def _result(self, chunk: Chunk, ids: list[int]) -> ChunkResult:
        sequence = chunk.sequence
        result = ChunkResult()
        if sequence not in self._waiting:
            self._draw(chunk, ids, result)
        if sequence.wants_prompt_logprobs:
            last = min(chunk.end, sequence.prompt_len - 1)
            result.prompt_logprobs = [Logprobs(ids[i + 1], -float(i + 1), [], []) for i in range(chunk.start, last)]
        return result

    def _draw(self, chunk: Chunk, ids: list[int], result: ChunkResult, masks: Masks | None = None) -> None:
        assert chunk.max_draws == 0 or chunk.known_end == len(ids)
        num_tokens = chunk.max_draws if self.max_draws == 1 else self._random.randint(0, chunk.max_draws)
        first_mask = None if masks is None else masks.rows.get(chunk.sequence)
        drawn: list[int] = []
        for index in range(num_tokens):
            if self.max_draws == 1 and drawn != [*chunk.draft[:index]]:
                break  # The numbers after the draft belong to another text.
            mask = None if masks is None or first_mask is None else masks.words[first_mask + index]
            if index and mask is not None and not mask.any():
                break  # the draft has come to the end of the answer
            drawn.append(drawn_after([*ids, *drawn], mask))
        result.token_ids = drawn
        if chunk.sequence.params.logprobs is not None:
            result.logprobs = [Logprobs(token_id, -float(len(ids) + i), [], []) for i, token_id in enumerate(drawn)]
        self._drawn[chunk.sequence] = (len(ids), drawn)

    def _ids(self, chunk: Chunk) -> list[int]:
        """Return the ids of a sequence, with those that the step before has drawn and the engine does not know yet."""
        ids = chunk.sequence.token_ids.copy()
        if chunk.known_end > len(ids):
            num_before, drawn = self._drawn.get(chunk.sequence, (len(ids), []))
            assert num_before == len(ids)
            self.num_void += not drawn
            ids += drawn or [NEVER]
        assert chunk.known_end <= len(ids)
        return ids


class FutureDrafts:
    """Writes drafts in place of `Drafts`: whatever the device is going to draw, with a wrong token now and then.

    A share of the steps waits for the results of the step before, and so has drafts.
    """

    only_if_exact = False
    model = None

    def __init__(self, seed: int, share_right: float = 0.8, share_waiting: float = 0.5) -> None:
        self._random = random.Random(seed)
        self._share_waiting = share_waiting
        self._share_right = share_right
        self.num_verified = 0  # tokens
        self.num_right = 0  # tokens, before the first wrong one of their drafts

    def need_results(self, running: list[Sequence], *, others_wait: bool) -> bool:
        return any(one.draft for one in running) or self._random.random() < self._share_waiting

    def propose(self, running: list[Sequence], *, others_wait: bool) -> None:
        for sequence in running:
            sequence.draft = []
            is_right = True
            for _ in range(self._random.randrange(6) if not sequence.num_pending else 0):
                if (right := self._next(sequence)) is None:
                    break
                is_wrong = self._random.random() >= self._share_right
                sequence.draft.append(self._wrong() if is_wrong else right)
                is_right = is_right and sequence.draft[-1] == right
                self.num_right += is_right
            if sequence.constraint is not None:
                sequence.draft = sequence.constraint.possible(sequence.draft)

    def verified(self, step: Step, step_ns: int) -> None:
        self.num_verified += step.num_draft_tokens

    def _wrong(self) -> int:
        return LETTERS[0]

    def _next(self, sequence: Sequence) -> int | None:
        """Return the id after the sequence and its draft, if it is known."""
        draft = sequence.draft
        constraint = sequence.constraint
        mask = None
        if constraint is not None and not constraint.is_free:
            possible = constraint.possible(draft)
            rows = np.zeros((1 + len(possible), -(-TOKENIZER.vocab_size // 32)), np.uint32)
            constraint.fill_masks(rows, sequence.num_generated, possible)
            mask = rows[-1] if rows[-1].any() else None  # There is no mask after the end.
        return drawn_after([*sequence.token_ids, *draft], mask)


def drawn_after(ids: list[int], mask: np.ndarray | None = None) -> int:
    """Return the id that this device draws after `ids`: one that the mask allows, or a letter or the end."""
    choices = [*LETTERS, EOS, EOS, EOS] if mask is None else allowed_ids(mask)
    return choices[hash(tuple(ids)) % len(choices)]  # The hash of integers is the same in every process.


OBJECT = """{
    "type": "object",
    "properties": {"is_it_so": {"enum": ["alpha", "beta"]}, "n": {"type": "integer"}},
    "required": ["is_it_so", "n"],
    "additionalProperties": false
}"""
GRAMMARS = (
    Grammar("json_schema", OBJECT),
    Grammar("json_schema", '{"enum": ["hello hello hello", "world", "words"]}'),
    Grammar("regex", "[a-f]{1,4}(xyzzy|hello)[a-z]{0,6}"),
)
REASONING = (None, None, Reasoning("c"), Reasoning("c", budget=3), Reasoning("b", opening="a", budget=2))


def some_requests(rng: random.Random, number: int = 40) -> list[Request]:
    """Return requests with several choices, common prefixes, ends of every kind, edits by ids, grammars, logprobs."""
    requests = []
    for i in range(number):
        prompt = [*range(rng.randrange(3) * 6), *(rng.randrange(50) for _ in range(rng.randint(1, 30)))]
        options = rng.choice([*[{}] * 4, {"logprobs": 0}, {"prompt_logprobs": 0}, {"repetition_penalty": 1.2}])
        ends = rng.choice([*[{}] * 3, {"stop": ("a", "bc", "xyz")}, {"stop_token_ids": (LETTERS[3], LETTERS[4])}])
        params = SamplingParams(
            max_tokens=rng.choice([0, 1, 2, 8, 16]),
            n=rng.choice([1, 1, 2, 3]),
            grammar=rng.choice([None, None, *GRAMMARS]),
            reasoning=rng.choice(REASONING),
            min_tokens=rng.choice([0, 0, 0, 4]),
            ignore_eos=rng.random() < 0.1,
            **options,
            **ends,
        )
        requests.append(Request(f"r{i}", (TokenPrompt(prompt),), params))
    return requests


def check_answers(
    rng: random.Random, requests: list[Request], device: Device, *, share_leaving: float = 0.0, **options: Any
) -> Answers:
    """Check that clients get the same from a device as from one with much memory, even if others leave."""
    expected = answers(Device(), requests, kv_blocks=400, max_model_len=80)
    leaves = {each.request_id: rng.randint(1, 6) for each in requests if rng.random() < share_leaving}
    outcome = answers(device, requests, leaves, **{"kv_blocks": 400, "max_model_len": 80, **options})
    outcome.check(expected)
    return outcome


def answers(
    device: Device,
    requests: list[Request],
    leaves_after: dict[str, int] | None = None,
    *,
    drafts: FutureDrafts | None = None,
    **options: Any,
) -> Answers:
    """Run requests on a device and return their answers. Check that nothing is left behind."""
    options = {"max_running": 8, "max_step_tokens": 48, "tokenize_workers": 0, **options}
    engine = make_engine(device, drafter=drafts, **options)
    with pytest.MonkeyPatch.context() as patch:
        # Masks take no time here. A server gives up on a grammar that takes too much of it, and Python may collect the
        # garbage of many tests while a mask is filled.
        patch.setattr(grammar, "thread_time_ns", lambda: 0)
        outcome = run_to_the_end(engine, requests, leaves_after, num_later=len(requests) // 2)
    assert engine.snapshot().num_out_of_memory <= device.num_copies_refused + sum(not fits for _, fits in device.tried)
    return outcome
