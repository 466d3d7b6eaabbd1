"""The progress of sequences: what launched steps compute, and the tokens that they draw. Engine thread only, no torch.

Steps run one after the other, so a later step finds what an earlier one wrote to its blocks. A commit may add tokens
that were not drawn, because a grammar forces them: the next steps compute these like a prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from oaiserve.engine.scheduling.lane import Lane
from oaiserve.engine.scheduling.memory import SequenceMemory
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.sequences.step import Chunk, Draw, Step


def planned_draw(sequence: Sequence, known_end: int) -> Draw:
    """Return when a chunk that contains the last token of its sequence is to draw, in a new step."""
    if sequence.needs_ids and (sequence.constraint is not None or known_end > len(sequence.token_ids)):
        return Draw.LATE
    return Draw.AT_LAUNCH


def advance(step: Step, lane_of: Callable[[Sequence], Lane], memory: SequenceMemory) -> None:
    """Count the tokens of a launched step as computed, and reserve places for its draws.

    A sequence whose last draw reaches its maximum length leaves at once. Its token is committed like all others.
    """
    size = memory.block_size
    for chunk in step.chunks:
        sequence, start, num_tokens, max_draws, draft, _ = chunk
        end = start + num_tokens - len(draft)
        sequence.num_computed = end
        if end % size < end - start and end <= len(sequence.token_ids):  # It has filled a block.
            lane_of(sequence).publish(sequence, start, end)
        if end in sequence.state_ends:
            memory.keep_state(sequence, end)
        if sequence.siblings and end >= memory.fork_end(sequence):
            lane_of(sequence).fork(sequence)
        if max_draws:
            if end < sequence.max_len:
                sequence.num_tokens = end + max_draws
            if end + 1 >= sequence.max_len and max_draws == 1:
                step.left.append(memory.leaving(sequence))
                lane_of(sequence).remove(sequence)


def settle(step: Step) -> None:
    """After the previous step has been committed, mark which draws of a launched step don't count: see `Draw`."""
    chunks = step.chunks
    for index, (sequence, start, num_tokens, max_draws, draft, _) in enumerate(chunks):
        num_missing = start + num_tokens - len(draft) - len(sequence.token_ids)
        if max_draws and num_missing:
            chunks[index] = chunks[index]._replace(draw=Draw.VOID if num_missing > 0 else Draw.SUPERSEDED)


def commit(lane: Lane, chunk: Chunk, token_ids: list[int]) -> bool:
    """Append the drawn tokens of a chunk to its sequence: at most its `max_draws`, none for `max_tokens=0`.

    After at least one of these, any number of forced ones may follow. A superseded chunk adds no tokens, and a void one
    is not committed. Tokens that match the chunk's draft have been computed already. The chunks of a sequence are
    committed in order, and none after the sequence was removed. If the number of tokens differs from the number that
    was reserved, the sequence continues from the known ones.

    Return True if the sequence was removed because it would reach its maximum length, but is shorter after all. Then it
    waits again, like a preempted sequence.
    """
    sequence, start, num_tokens, max_draws, draft, draw = chunk
    known = sequence.token_ids
    end = start + num_tokens - len(draft)
    known += token_ids
    # A token whose id wasn't known when the step was launched may have filled a block. If the sequence has been
    # preempted since, it has lost that block.
    if num_tokens == 1 and end % lane.memory.block_size == 0 and sequence.place is Place.RUNNING:
        lane.publish(sequence, start, end)
    if draw is Draw.SUPERSEDED:
        return False
    if draft and sequence.place is Place.RUNNING:
        # The last known token is computed again, even if it was in the draft: its logits draw the next one.
        sequence.num_computed = min(end + chunk.num_accepted(token_ids), len(known) - 1)
        lane.publish(sequence, end, sequence.num_computed)
    if len(token_ids) > 1:
        lane.waiting.charge_further(sequence, len(token_ids) - 1)
    if len(token_ids) == max_draws:
        if max_draws > 1 and len(known) >= sequence.max_len:
            lane.remove(sequence)
        return False
    sequence.num_tokens = len(known)
    # If the last known token was already computed, it is computed again: its logits draw the next one.
    sequence.num_computed = min(sequence.num_computed, len(known) - 1)
    if sequence.place is not Place.NOWHERE or len(known) >= sequence.max_len:
        return False
    lane.wait_again(sequence)
    return True
