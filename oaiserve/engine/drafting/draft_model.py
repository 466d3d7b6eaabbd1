"""The draft model: a smaller model with the same vocabulary, which guesses tokens of sequences. Engine thread only, no
torch.

Its KV cache has as many blocks as the model's, under the same numbers, so a sequence has one list of blocks for both.
Each sequence with guesses has a *follower* here: another sequence, with the same tokens and parameters and then the
guessed tokens, which counts the tokens computed by the draft model. A prompt from the prefix cache, or without a
request for a guess, is computed later, if at all.

A guess is drawn as the model draws: behind the same edits and masks, with the noise of the same position. So it comes
true at any temperature where both models give the same id the highest score.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from oaiserve.engine.blocks import BlockHash
from oaiserve.engine.drafting.lookup import COMMON_WEIGHT, moved_share
from oaiserve.engine.drafting.step_times import StepTimes
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Draw, Masks, Runner, Step
from oaiserve.facts.times import monotonic_ns

UNKNOWN = -1  # in place of each token of a draft that the draft model has yet to guess
MOST_BEHIND = 16  # tokens that are computed together with a guess; more of them are computed before
CATCH_UP_TOKENS = 64  # at once: others wait for them
FIRST_SHARE = 0.7  # of the tokens that come true, before anything is known


class _Follower:
    """A sequence as the draft model has it: `own`, whose ids are the known ones, and behind these the last guess."""

    __slots__ = ("blocks", "followed", "num_known", "num_noted", "num_preemptions", "own", "share")

    def __init__(self, followed: Sequence, share: float) -> None:
        params = replace(followed.params, logprobs=None, prompt_logprobs=None)
        self.own = Sequence(
            followed.request_id,
            followed.index,
            followed.token_ids[: followed.prompt_len],
            params,
            max_len=followed.max_len,
            stop_ids=followed.stop_ids,
            draw_key=followed.draw_key,
            bad_words=followed.bad_words,
            constraint=followed.constraint,
        )
        self.followed = followed
        self.num_preemptions = followed.num_preemptions
        self.blocks = followed.blocks.copy()  # those that it is computed in
        self.num_noted = 0  # of these, the first ones, whose content is noted
        self.share = share  # of its guessed tokens that come true
        self.add(followed.generated_ids)
        self.num_known = len(self.own.token_ids)  # the others are guesses

    @property
    def guess(self) -> list[int]:
        return self.own.token_ids[self.num_known :]

    def add(self, token_ids: list[int]) -> None:
        self.own.token_ids += token_ids
        self.own.num_tokens = len(self.own.token_ids)

    def take_ids(self) -> None:
        """Take over the sequence's present ids. Right guesses stay computed."""
        own, known, same = self.own, self.followed.token_ids, self.num_known
        if len(own.token_ids) == len(known) == same:
            return
        while same < min(len(own.token_ids), len(known)) and own.token_ids[same] == known[same]:
            same += 1
        del own.token_ids[same:]
        self.add(known[same:])
        self.num_known = len(known)
        # The last known token is computed again, also where it was guessed: the next one is drawn behind it.
        own.num_computed = min(own.num_computed, same, len(known) - 1)
        own.token_counts = None if self.followed.token_counts is None else self.followed.token_counts.copy()

    def take_blocks(self, block_size: int) -> None:
        """Take over the sequence's present blocks. The content of others is lost."""
        blocks = self.followed.blocks
        if self.blocks != blocks:
            pairs = enumerate(zip(self.blocks, blocks, strict=False))
            num_same = next((index for index, (before, now) in pairs if before != now), len(self.blocks))
            self.own.num_computed = min(self.own.num_computed, num_same * block_size)
            self.num_noted = min(self.num_noted, num_same)
            self.blocks = blocks.copy()
        self.own.blocks = self.blocks


class DraftModel:
    """Writes the guesses requested by `ask` and `ask_to_catch_up` into the drafts of a step."""

    def __init__(
        self,
        runner: Runner,
        *,
        block_size: int,
        max_len: int,
        vocab_size: int,
        clock_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.max_len = max_len  # tokens of a sequence that it can compute
        self.times = StepTimes()
        self._runner = runner
        self._block_size = block_size
        self._mask_words = -(-vocab_size // 32)
        self._clock_ns = clock_ns
        self._followers: dict[Sequence, _Follower] = {}
        self._held: dict[int, BlockHash] = {}  # the draft model's content of a full block
        self._share = FIRST_SHARE
        self.catch_up_ns = 0.0  # of a token of its backlog
        self._asked: set[Sequence] = set()
        self._late: Sequence | None = None

    @property
    def is_asked(self) -> bool:
        return bool(self._asked) or self._late is not None

    def begin_step(self, running: list[Sequence]) -> None:
        """Forget the requested guesses, and all ended sequences."""
        self._asked.clear()
        self._late = None
        if len(self._followers) > len(running):
            self._followers = {one: self._followers[one] for one in running if one in self._followers}

    def num_behind(self, sequence: Sequence) -> int:
        """Return how many of a sequence's tokens have to be computed before the next one can be guessed."""
        return self._follow(sequence).own.num_uncomputed

    def share(self, sequence: Sequence) -> float:
        """Return the probability that the next guessed token of a sequence comes true."""
        return self._follow(sequence).share

    def ask(self, sequence: Sequence, length: int) -> None:
        """Ask for so many tokens, which are the sequence's draft in the next step."""
        self._asked.add(sequence)
        sequence.draft = [UNKNOWN] * length

    def ask_to_catch_up(self, sequence: Sequence) -> None:
        self._late = sequence

    def write(self, step: Step) -> None:
        """Write the requested drafts into the chunks of a step. They end with their sequence, and with its grammar."""
        if self._late is not None and self._late.blocks:
            self._catch_up(self._follow(self._late))
        asked = [chunk for chunk in step.chunks if chunk.draft and chunk.sequence in self._asked]
        if not asked:
            return
        lengths = {self._follow(chunk.sequence): len(chunk.draft) for chunk in asked}
        self._guess(lengths)
        guesses = {one.followed: one.guess for one in lengths}
        step.chunks[:] = [
            chunk.with_draft(guesses[chunk.sequence]) if chunk.sequence in guesses else chunk for chunk in step.chunks
        ]
        step.chunks.sort(key=lambda chunk: chunk.num_tokens > 1)

    def verified(self, sequence: Sequence, num_guessed: int, num_accepted: int) -> None:
        """Note how many tokens of the sequence's draft came true."""
        if (one := self._followers.get(sequence)) is not None:
            one.share = moved_share(one.share, num_guessed, num_accepted)
        self._share = moved_share(self._share, num_guessed, num_accepted, weight=COMMON_WEIGHT)

    def _follow(self, sequence: Sequence) -> _Follower:
        """Return the follower of a sequence, with the sequence's ids and blocks as they are now."""
        one = self._followers.get(sequence)
        if one is None or one.num_preemptions != sequence.num_preemptions:
            one = self._followers[sequence] = _Follower(sequence, self._share if one is None else one.share)
            held = 0  # first blocks that the draft model has computed for others, of the same content
            for block, block_hash in zip(sequence.blocks, sequence.hashes, strict=False):
                if self._held.get(block) != block_hash:
                    break
                held += 1
            one.own.num_computed = min(held * self._block_size, len(sequence.token_ids) - 1)
        one.take_ids()
        one.take_blocks(self._block_size)
        for index in range(one.num_noted, min(one.own.num_computed // self._block_size, len(sequence.hashes))):
            self._held[one.blocks[index]] = sequence.hashes[index]
            one.num_noted = index + 1
        return one

    def _catch_up(self, one: _Follower) -> None:
        num_tokens = min(one.own.num_uncomputed - 1, CATCH_UP_TOKENS)
        if num_tokens > 0:
            took_ns, _ = self._compute([Chunk(one.own, one.own.num_computed, num_tokens, 0)], None)
            before_ns = self.catch_up_ns or took_ns / num_tokens
            self.catch_up_ns = before_ns + StepTimes.WEIGHT * (took_ns / num_tokens - before_ns)

    def _guess(self, lengths: dict[_Follower, int]) -> None:
        """Guess tokens for each of these, one at a time."""
        going = list(lengths)
        while going:
            going.sort(key=lambda one: one.own.num_uncomputed > 1)
            masks, going = self._fill_masks(going)
            if not going:
                break
            chunks = [
                Chunk(o, o.num_computed, o.num_uncomputed, draw=Draw.AT_LAUNCH if o.constraint is None else Draw.LATE)
                for o in (one.own for one in going)
            ]
            num_tokens = sum(chunk.num_tokens for chunk in chunks)
            took_ns, drawn = self._compute(chunks, masks)
            self.times.observe(num_tokens, took_ns)
            for one, token_ids in zip(going, drawn, strict=True):
                one.add(token_ids)
            going = [
                one
                for one, token_ids in zip(going, drawn, strict=True)
                if token_ids and len(one.guess) < lengths[one] and token_ids[0] not in one.own.stop_ids
            ]
        for one in lengths:
            if one.own.constraint is not None:
                possible = one.own.constraint.possible(one.guess)
                del one.own.token_ids[one.num_known + len(possible) :]

    def _compute(self, chunks: list[Chunk], masks: Masks | None) -> tuple[int, list[list[int]]]:
        """Compute the chunks of followers. Return the time, and the draws behind each of them."""
        began_ns = self._clock_ns()
        for chunk in chunks:
            for block in chunk.sequence.blocks[chunk.start // self._block_size : -(-chunk.end // self._block_size)]:
                self._held.pop(block, None)
            chunk.sequence.num_computed = chunk.end
        launched = self._runner.launch(Step(chunks))
        self._runner.draw(launched, masks)
        drawn = [result.token_ids for result in self._runner.collect(launched).chunks]
        return self._clock_ns() - began_ns, drawn

    def _fill_masks(self, going: list[_Follower]) -> tuple[Masks | None, list[_Follower]]:
        """Return the masks of the next draws, and the followers with such a draw: none behind the end of a grammar."""
        rows: dict[Sequence, int] = {}
        words: list[np.ndarray] = []
        able: list[_Follower] = []
        for one in going:
            constraint, guess = one.own.constraint, one.guess
            if constraint is not None and not constraint.is_free:
                of_draws = np.zeros((1 + len(guess), self._mask_words), dtype=np.uint32)
                try:
                    constraint.fill_masks(of_draws, one.followed.num_generated, guess)
                except BaseException:  # a panic in Rust code is no Exception
                    continue
                if not of_draws[-1].any():
                    continue
                rows[one.own] = len(words)
                words.append(of_draws[-1])
            able.append(one)
        return Masks(rows, np.stack(words)) if words else None, able
