"""The results of a step: turns them into tokens of answers, commits them to the scheduler, and emits events. No torch.

Chunks are processed in the order of the step. Drawn tokens are pushed to the output of their choice, up to its end,
followed by tokens that a grammar forces. All of them are committed to the scheduler, and the output returns a chunk of
the answer once it has enough for one. Engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain, repeat

from oaiserve.engine.grammars.constraint import Constraint
from oaiserve.engine.grammars.grammar import GrammarGivenUp, GrammarViolation
from oaiserve.engine.request import FinishReason, Pooled
from oaiserve.engine.requests.open_request import OpenRequest
from oaiserve.engine.requests.open_requests import OpenRequests
from oaiserve.engine.requests.output import ChoiceOutput, add_logprobs
from oaiserve.engine.requests.prompt_progress import report_progress
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.sequences.forbidden_ids import leaves_no_token
from oaiserve.engine.sequences.step import Chunk, ChunkResult, Draw, Logprobs, Step
from oaiserve.errors import InternalError, InvalidRequest
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.wire.prefix_keys import prefix_keys_of

log = logging.getLogger(__name__)

# Forced tokens are taken at once while a step has fewer tokens than this in total. So few cost little more than one,
# since the weights are read only once: on two CPU cores, the demo model takes 8.2 ms for one token and 10.0 ms for 8,
# but 45 ms for 64. In larger steps, where each token delays the others, forced tokens are drawn like others.
FEW_TOKENS = 8
# Enum members are properties in Python 3.11, and slow to read for each token.
_AT_LAUNCH = Draw.AT_LAUNCH
_VOID = Draw.VOID


class Results:
    """Takes the results of steps. It counts in the engine's `numbers`."""

    def __init__(self, requests: OpenRequests, scheduler: Scheduler, numbers: EngineNumbers, vocab_size: int) -> None:
        self._requests = requests
        self._scheduler = scheduler
        self._numbers = numbers
        self._table = requests.table
        self._vocab_size = vocab_size
        self._drafts_by_accepted: list[int] = []
        self._num_forceable = 0  # how many tokens grammars may still force in the current step

    def take(self, step: Step, results: list[ChunkResult], now_ns: int) -> None:
        batch = len(step.chunks)
        self._num_forceable = FEW_TOKENS - batch
        of_choice = self._requests.of_choice
        commit_next = self._scheduler.commit_next
        emit_chunk = self._requests.outbox.emit_chunk
        for chunk, result in zip(step.chunks, results, strict=True):
            sequence, start, num_tokens, max_draws, _, draw = chunk
            opened = of_choice(sequence)
            if opened is None or draw is _VOID:
                continue  # The choice has ended since the step was scheduled, or it is scheduled again.
            try:
                output = opened.outputs[sequence]
                token_ids = result.token_ids
                if (
                    num_tokens == 1 == max_draws
                    and draw is _AT_LAUNCH
                    and len(token_ids) == 1
                    and sequence.last_token_ns is not None
                    and result.error is None
                    and result.prompt_logprobs is None
                    and output.is_plain(token_ids[0])
                ):
                    # Same as `_take_chunk`, for a token that only adds its text and isn't the choice's first.
                    opened.notes.drew_next(sequence, now_ns)
                    opened.usage.completion_tokens += 1
                    token_chunk = output.push_plain(token_ids[0])
                    commit_next(sequence, start, token_ids[0])
                    if token_chunk is not None:
                        emit_chunk(opened, token_chunk)
                else:
                    self._take_chunk(opened, chunk, result, now_ns, batch=batch)
            except (GrammarGivenUp, GrammarViolation) as error:
                self._requests.grammar_failed(chunk.sequence, error)
            except BaseException:  # a bug triggered by the request; a panic in the Rust detokenizer is not an Exception
                request_id = chunk.sequence.request_id
                log.exception("Request %s failed", request_id)
                self._requests.fail(request_id, InternalError("The server failed on this request's output."))

    def _take_chunk(self, opened: OpenRequest, chunk: Chunk, result: ChunkResult, now_ns: int, *, batch: int) -> None:
        sequence = chunk.sequence
        notes = opened.notes
        if result.prompt_logprobs is not None:
            self._take_prompt_logprobs(opened, chunk, result.prompt_logprobs)
        if (chunk.start < sequence.prompt_len or sequence.num_preemptions) and chunk.num_known > 1:
            notes.computed(chunk, now_ns, batch)
        if chunk.draw is Draw.SUPERSEDED:
            self._scheduler.commit(chunk, [])
            return
        if result.error is not None:
            chunk = chunk.without_draft()
            is_exhausted = leaves_no_token(chunk, self._vocab_size)
            failure = _no_token_left(chunk) if is_exhausted else InternalError(result.error)
            self._requests.fail(sequence.request_id, failure)
            return
        if result.vector is not None:
            self._requests.outbox.emit(opened, Pooled(opened.request.request_id, sequence.index, result.vector))
            del opened.outputs[sequence]
            if not opened.outputs:  # The last prompt ends the phase `prefill` and the request.
                opened.times.first_token = now_ns
            self._requests.finish_if_complete(opened, now_ns)
            return
        output = opened.outputs[sequence]
        if chunk.max_draws:
            token_ids = self._push(opened, output, chunk, result, now_ns, batch)
        else:
            token_ids = []
        if chunk.draft:
            num_accepted = chunk.num_accepted(token_ids)
            self._numbers.num_drafts += 1
            self._drafts_by_accepted += [0] * (1 + num_accepted - len(self._drafts_by_accepted))
            self._drafts_by_accepted[num_accepted] += 1
            self._numbers.drafts_by_accepted = tuple(self._drafts_by_accepted)
            for counted in (self._numbers, opened.account):
                counted.num_draft_tokens += len(chunk.draft)
                counted.num_accepted_tokens += num_accepted
        if self._scheduler.commit(chunk, token_ids):
            notes.preempted(sequence, now_ns)
        if (token_chunk := output.take()) is not None:
            self._requests.outbox.emit_chunk(opened, token_chunk)
        elif opened.usage.completion_tokens == 0:
            report_progress(self._requests.outbox, opened, now_ns)
        if output.finish_reason is not None:
            notes.finished(sequence, output.finish_reason, now_ns, batch)
            self._scheduler.remove(sequence)
            opened.held_ns += sequence.held_ns
            del opened.outputs[sequence]
            opened.note_choice(sequence, output)
            self._requests.finish_if_complete(opened, now_ns)

    def _take_prompt_logprobs(self, opened: OpenRequest, chunk: Chunk, rows: list[Logprobs]) -> None:
        prompt = opened.prompts[chunk.sequence.index // opened.request.params.n]
        if prompt.logprobs is not None:
            # A prompt that was preempted half-way is computed again from the beginning.
            prompt.logprobs.truncate(chunk.start + 1)
            for row in rows:
                add_logprobs(prompt.logprobs, self._table, row)

    def _push(
        self, opened: OpenRequest, output: ChoiceOutput, chunk: Chunk, result: ChunkResult, now_ns: int, batch: int
    ) -> list[int]:
        """Push a result's tokens to the output of its choice, up to the choice's end, and return the tokens that were
        pushed."""
        sequence = chunk.sequence
        notes = opened.notes
        sequence.wants_prompt_logprobs = False
        is_empty = sequence.max_len == sequence.prompt_len  # max_tokens is 0: only the prompt is computed
        is_first = sequence.last_token_ns is None and sequence.index % opened.request.params.n == 0
        if is_first and opened.request.routing is not None and (result.token_ids or is_empty):
            # Note the block that each prefix with a key ends in.
            size = self._scheduler.pool.block_size
            hashes = sequence.hashes
            length = sequence.prompt_len
            keys = prefix_keys_of(opened.request.routing)
            ends = [(key, min(int(share * length) // size, len(hashes))) for key, share in keys]
            self._requests.computed_prompts.append([(key, hashes[end - 1]) for key, end in ends if end])
        if is_empty:
            notes.drew(sequence, now_ns, batch)
            output.finish(FinishReason.LENGTH)
            return []
        taken: list[int] = []
        tokens: Iterable[tuple[int, Logprobs | None]] = zip(
            result.token_ids, result.logprobs or repeat(None), strict=False
        )
        if sequence.constraint is not None and result.token_ids:
            tokens = chain(tokens, self._forced_tokens(opened, sequence.constraint))
        for token_id, logprobs in tokens:
            notes.drew(sequence, now_ns, batch)
            opened.usage.completion_tokens += 1
            output.push(token_id, logprobs)
            taken.append(token_id)
            if output.finish_reason is not None:
                break
        return taken

    def _forced_tokens(self, opened: OpenRequest, constraint: Constraint) -> Iterator[tuple[int, None]]:
        """Yield the tokens that a grammar forces next. The caller must push each one before it requests another."""
        while self._num_forceable > 0 and (forced_ids := constraint.forced_ids()):
            for token_id in forced_ids[: self._num_forceable]:
                self._num_forceable -= 1
                self._numbers.num_forced_tokens += 1
                opened.account.num_forced_tokens += 1
                yield token_id, None


def _no_token_left(chunk: Chunk) -> InvalidRequest:
    """Return the error of a request whose own parameters exclude every token."""
    params = chunk.sequence.params
    num_tokens = chunk.end - chunk.sequence.prompt_len
    names = [] if params.grammar is None else [params.grammar.param]
    names += [name for name in ("allowed_token_ids", "bad_words", "min_tokens") if getattr(params, name)]
    shown = ", ".join(f"'{name}'" for name in names)
    message = f"After {num_tokens} tokens of an answer, no token is left that {shown} allow."
    return InvalidRequest(message, param=names[0])
