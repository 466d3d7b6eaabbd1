"""The output of a choice: turns ids into text and chunks, and checks whether the choice ends. Engine thread only, no
torch."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import nan

from oaiserve.engine.request import FinishReason, TokenChunk
from oaiserve.engine.sequences.loops import Loop, LoopWatch, loop_at_end
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Logprobs
from oaiserve.engine.text.detokenize import StopMatcher, StopStrings, TokenTable
from oaiserve.engine.types.logprobs import TokenLogprobs
from oaiserve.engine.types.loop_rule import USUAL

REPETITION_DETECTED = "repetition_detected"  # vLLM's stop reason for choices that a `LoopRule` ends


class ChoiceOutput:
    """Takes the tokens of one choice as they are sampled, and returns them in chunks."""

    def __init__(
        self,
        sequence: Sequence,
        table: TokenTable,
        stops: StopStrings,
        *,
        eos_token_ids: frozenset[int],
        stream_interval: int,
    ) -> None:
        params = sequence.params
        self._request_id = sequence.request_id
        self._index = sequence.index
        self._sequence = sequence  # Only its constants are used: its tokens may be ahead of this output.
        self._max_tokens = sequence.max_len - sequence.prompt_len
        self.num_tokens = 0
        self._table = table
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._stream_interval = stream_interval  # see Request
        self._detokenizer = table.detokenizer(
            sequence.token_ids,
            skip_special_tokens=params.skip_special_tokens,
            visible_ids=params.visible_special_ids,
        )
        self._stops = StopMatcher(stops)
        reasoning = params.reasoning
        # Stop strings only count after this text.
        if not stops.stops or reasoning is None or reasoning.opening:
            self._stop_after = ""
        else:
            self._stop_after = reasoning.closing
        self._end_of_text = ""  # end of the text, which may contain part of `_stop_after`
        self._text: list[str] = []  # pieces of text, none of them empty
        self._token_ids: list[int] = []
        self._text_lengths: list[int] | None = [] if params.text_lengths else None
        self._num_characters = 0  # characters of all tokens, even withheld or removed ones; `push_plain` doesn't count
        self._logprobs = TokenLogprobs() if params.logprobs is not None else None
        self._chunk_tokens = min(1, stream_interval)  # tokens of the next chunk; the first token is sent alone
        self._end_ids = self._eos_token_ids | sequence.stop_ids
        self._loop_watch = None if params.loop_rule is None else LoopWatch(params.loop_rule)
        self._num_constrained = 0  # number of first tokens, up to the last one under a grammar
        # Only a token id or the length can end it, and its chunks have no data about single tokens.
        self._is_plain = not (
            stops.stops
            or params.text_lengths
            or params.logprobs is not None
            or sequence.constraint is not None
            or params.loop_rule is not None
        )
        self._has_end_token = False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def push(self, token_id: int, logprobs: Logprobs | None) -> None:
        """Take the next token of the choice, which may end it. Nothing may be pushed after the end.

        Checks are made in this order: end of sequence, stop token, stop string, end of the grammar, length, loop. So a
        stop string that the last allowed token completes counts as a stop. Raises GrammarViolation if the grammar
        doesn't allow the token.
        """
        params = self._sequence.params
        constraint = self._sequence.constraint
        num_before = self._num_characters
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if self._logprobs is not None:
            # A forced token is not drawn, so it has no log-probability.
            add_logprobs(self._logprobs, self._table, logprobs or Logprobs(token_id, nan, [], []))
        if token_id in self._eos_token_ids or (constraint is not None and constraint.ends_with(token_id)):
            self._has_end_token = True
            self.finish(FinishReason.STOP)
        elif token_id in self._sequence.stop_ids:
            if params.include_stop_str_in_output:
                self._add(self._detokenizer.push(token_id))
            else:
                self._has_end_token = True
            self.finish(FinishReason.STOP, token_id)
        else:
            self._add(self._detokenizer.push(token_id))
            if constraint is not None:
                constraint.push(token_id)
                if self.finish_reason is None and constraint.is_complete:
                    self.finish(FinishReason.STOP)
                if constraint.is_in_grammar:
                    self._num_constrained = self.num_tokens
            if self.finish_reason is None and self.num_tokens >= self._max_tokens:
                self.finish(FinishReason.LENGTH)
            if self._loop_watch is not None:
                self._watch(self._loop_watch, token_id)
        if self._text_lengths is not None:
            self._text_lengths.append(self._num_characters - num_before)

    def _watch(self, watch: LoopWatch, token_id: int) -> None:
        """End the choice if it is looping now. Tokens that a grammar constrains never count as a loop."""
        if self._num_constrained == self.num_tokens:
            self._loop_watch = LoopWatch(watch.rule)
        elif (
            watch.push(token_id) and self.finish_reason is None and self.num_tokens >= self._sequence.params.min_tokens
        ):
            self.finish(FinishReason.REPETITION, REPETITION_DETECTED)

    def loop_in(self, token_ids: list[int]) -> Loop | None:
        """Return the loop that this choice ends in, or None. `token_ids` are all of its tokens."""
        end = len(token_ids) - self._has_end_token
        if end - self._num_constrained < USUAL.min_length:
            return None
        return loop_at_end(token_ids[self._num_constrained : end])

    def is_plain(self, token_id: int) -> bool:
        """Return whether the next token only adds text, so that `push_plain` can take it."""
        return self._is_plain and self.num_tokens + 1 < self._max_tokens and token_id not in self._end_ids

    def push_plain(self, token_id: int) -> TokenChunk | None:
        """Take the next token as `push` does, and return what `take` would return."""
        self.num_tokens += 1
        token_ids = self._token_ids
        token_ids.append(token_id)
        texts = self._text
        text = self._detokenizer.push(token_id)
        if text:
            texts.append(text)
        if self._chunk_tokens == 0 or len(token_ids) < self._chunk_tokens or not texts:
            return None
        chunk = TokenChunk(self._request_id, self._index, "".join(texts), token_ids, None)
        texts.clear()
        self._token_ids = []
        self._chunk_tokens = self._stream_interval
        return chunk

    def take(self, *, was_sent: bool = False) -> TokenChunk | None:
        """Return a chunk of the text and tokens since the last one, or None if they are too few to send.

        What another server has sent is a chunk, however little it is.
        """
        if self.finish_reason is None and not was_sent:
            if self._chunk_tokens == 0 or len(self._token_ids) < self._chunk_tokens:
                return None
            if not (self._text or (self._logprobs and self._sequence.params.shows_logprobs)):
                return None  # All of it is held back: part of a character, or possibly part of a stop string.
            if self._text_lengths is not None and self._stops.is_holding:
                return None  # A chunk's token lengths must add up to its text.
        text = "".join(self._text)
        if self._text_lengths is not None:  # a stop string may have cut off the end
            ends = [min(end, len(text)) for end in accumulate(self._text_lengths, initial=0)]
            self._text_lengths = [end - start for start, end in pairwise(ends)]
        chunk = TokenChunk(
            self._request_id,
            self._index,
            text,
            self._token_ids,
            self._logprobs,
            self.finish_reason,
            self.stop_reason,
            self._text_lengths,
            self._has_end_token,
            was_sent,
        )
        self._text = []
        self._token_ids = []
        if self._text_lengths is not None:
            self._text_lengths = []
        if self._logprobs is not None:
            self._logprobs = TokenLogprobs()
        self._chunk_tokens = self._stream_interval
        return chunk

    def _add(self, text: str) -> None:
        """Add whole characters to the text. Before `min_tokens` and within reasoning, stop strings do not count."""
        self._num_characters += len(text)
        if self._stop_after:
            num_before = len(self._end_of_text)
            so_far = self._end_of_text + text
            at = so_far.find(self._stop_after)
            if at == -1:
                num_free = len(text)
            else:
                num_free = at + len(self._stop_after) - num_before
            self._end_of_text = so_far[max(0, len(so_far) - len(self._stop_after) + 1) :]
            if at != -1:
                self._stop_after = ""
            self._send(self._stops.push(text[:num_free], enabled=False)[0])
            text = text[num_free:]
        if not text:
            return
        enabled = self.num_tokens >= self._sequence.params.min_tokens
        sendable, matched = self._stops.push(text, enabled=enabled)
        self._send(sendable)
        if matched is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = matched

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End the choice for this reason, unless the withheld text turns out to contain a stop string."""
        self._add(self._detokenizer.finish())
        if self.finish_reason is None:
            self._send(self._stops.finish())
            self.finish_reason = reason
            self.stop_reason = stop_reason

    def _send(self, text: str) -> None:
        if text:
            self._text.append(text)


def add_logprobs(rows: TokenLogprobs, table: TokenTable, logprobs: Logprobs) -> None:
    """Add the log-probabilities at one position, with the texts of the tokens."""
    ids = [logprobs.token_id, *logprobs.top_ids]
    values = [logprobs.logprob, *logprobs.top_logprobs]
    rows.add(ids, map(table.bytes_alone, ids), values, rank=logprobs.rank)


def prompt_logprobs(table: TokenTable, first_token_id: int) -> TokenLogprobs:
    """Return the first entry of a prompt's log-probabilities. Its first token has none, because nothing precedes it."""
    rows = TokenLogprobs()
    rows.add([first_token_id], [table.bytes_alone(first_token_id)], [float("nan")])
    return rows
