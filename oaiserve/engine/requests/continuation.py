"""Continues answers that another server has begun. Engine thread only, no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from oaiserve.engine.grammars.grammar import GrammarGivenUp, GrammarViolation
from oaiserve.engine.request import TokenChunk
from oaiserve.engine.requests.open_request import OpenRequest
from oaiserve.engine.requests.output import add_logprobs
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Logprobs
from oaiserve.engine.text.detokenize import TokenTable
from oaiserve.errors import InvalidRequest

MOST_TAKEN_UP = 64  # tokens of another server's answer that are read between two steps; each takes about 6 us


class Continuations:
    """A queue of requests that continue a long answer. Reading that answer is split up between steps."""

    def __init__(self) -> None:
        self._starts: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._starts)

    def begin(self, start: Iterator[None]) -> None:
        """Start a request, and put it into the queue if its start pauses."""
        if next(start, start) is None:
            self._starts.append(start)

    def go_on(self) -> None:
        """Continue the first start in the queue, up to its next pause."""
        if self._starts:
            start = self._starts[0]
            if next(start, start) is start:
                self._starts.popleft()


def take_up(
    opened: OpenRequest,
    sequence: Sequence,
    table: TokenTable,
    emit_chunk: Callable[[OpenRequest, TokenChunk], None],
) -> Iterator[None]:
    """Add the tokens that another server has sent to a choice, and emit them in the same chunks.

    It pauses after every MOST_TAKEN_UP tokens. Raises InvalidRequest if these tokens cannot begin the answer.
    """
    output = opened.outputs[sequence]
    prompt = opened.prompts[sequence.index // opened.request.params.n]
    pieces = [piece.token_ids for piece in opened.request.sent if piece.choice == sequence.index]
    # Clients see the prompt's length by the number of its log-probabilities, so add placeholders for them.
    if pieces and prompt.logprobs is not None and not prompt.sent:
        for token_id in prompt.token_ids[1:]:
            add_logprobs(prompt.logprobs, table, Logprobs(token_id, 0.0, [], []))
    sequence.wants_prompt_logprobs &= not pieces
    has_logprobs = sequence.params.logprobs is not None
    try:
        for token_ids in pieces:
            for token_id in token_ids:
                if output.num_tokens and output.num_tokens % MOST_TAKEN_UP == 0:
                    yield
                if output.finish_reason is not None:
                    raise GrammarViolation("it has tokens behind its end")
                output.push(token_id, Logprobs(token_id, 0.0, [], []) if has_logprobs else None)
            opened.usage.completion_tokens += len(token_ids)
            opened.account.num_continued_tokens += len(token_ids)
            sequence.token_ids += token_ids
            if (chunk := output.take(was_sent=True)) is not None:
                emit_chunk(opened, chunk)
    except (GrammarGivenUp, GrammarViolation) as error:
        raise InvalidRequest(f"What was sent of this answer cannot be its begin: {error}.") from error
    sequence.num_tokens = len(sequence.token_ids)
