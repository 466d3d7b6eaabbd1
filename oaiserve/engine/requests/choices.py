"""The choices of a request: a sequence for each, with its constraint and its output. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from random import getrandbits

from oaiserve.engine.encoder import Encoding
from oaiserve.engine.grammars.constraint import Constraint
from oaiserve.engine.grammars.grammar import Matcher
from oaiserve.engine.grammars.json_spelling import respelled
from oaiserve.engine.grammars.parts import Leads, PartsConstraint
from oaiserve.engine.grammars.thinking import Thinking
from oaiserve.engine.request import Request
from oaiserve.engine.requests.open_request import Bounds, OpenPrompt, OpenRequest
from oaiserve.engine.requests.output import ChoiceOutput, prompt_logprobs
from oaiserve.engine.sequences.fixed_edits import FixedEdits
from oaiserve.engine.sequences.noise import draw_key
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.text.detokenize import StopStrings, TokenTable
from oaiserve.engine.tokenize import Tokenized


class Choices:
    """Makes the sequences for the choices of requests."""

    def __init__(self, model: ServedModel, bounds: Bounds, table: TokenTable) -> None:
        self._bounds = bounds
        self._table = table
        self._eos_token_ids = model.eos_token_ids
        self._rules = model.rules
        self._counts_tokens = model.counts_tokens
        self._pools = model.pooling is not None  # each prompt is computed in one step, and the result is a vector

    def make(self, opened: OpenRequest, tokenized: Tokenized, encoding: Encoding | None) -> Iterator[Sequence]:
        """Add a request's next prompts and their choices to its state, and yield each new sequence.

        Prompts whose media are not encoded yet are left for the next call.
        """
        request = tokenized.request
        params = request.params
        stop_ids = (frozenset() if params.ignore_eos else self._eos_token_ids) | set(params.stop_token_ids)
        edits = FixedEdits(params, stop_ids)
        stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        second_starts = tokenized.second_starts or [None] * len(tokenized.token_ids)
        all_media = tokenized.media or [None] * len(tokenized.token_ids)
        all_texts = tokenized.texts or [None] * len(tokenized.token_ids)
        begun = _begun_matcher(tokenized)  # once, because a long text takes some time
        end = len(tokenized.token_ids) if encoding is None else encoding.num_ready
        for prompt_index in range(len(opened.prompts), end):
            token_ids = tokenized.token_ids[prompt_index]
            seed = _seed(request, prompt_index)
            if params.prompt_logprobs is None:
                logprobs = None
            else:
                logprobs = prompt_logprobs(self._table, token_ids[0])
            opened.prompts.append(OpenPrompt(token_ids, logprobs, all_texts[prompt_index]))
            vectors = () if encoding is None else encoding.take(prompt_index)
            for choice in range(params.n):
                sequence = Sequence(
                    request.request_id,
                    prompt_index * params.n + choice,
                    token_ids,
                    params,
                    max_len=self._bounds.length(len(token_ids), params.max_tokens),
                    stop_ids=stop_ids,
                    draw_key=draw_key(seed, choice),
                    priority=request.priority,
                    cache_salt=f"{request.adapter} {request.cache_salt}",
                    adapter=request.adapter,
                    client_name=request.client,
                    share=request.share,
                    is_background=request.is_background,
                    background_wait_ns=request.background_wait_ns,
                    bad_words=tokenized.bad_words,
                    shared_edits=edits,
                    device_counts=self._counts_tokens,
                    constraint=self._constraint(tokenized, stop_ids, begun),
                    rules=self._rules,
                    is_whole=self._pools,
                    second_start=second_starts[prompt_index],
                    media=all_media[prompt_index],
                    encoded=vectors,
                )
                sequence.wants_prompt_logprobs = logprobs is not None and choice == 0
                sequence.causes = opened.causes
                opened.needs_ids = sequence.needs_ids
                opened.outputs[sequence] = ChoiceOutput(
                    sequence,
                    self._table,
                    stops,
                    eos_token_ids=self._eos_token_ids,
                    stream_interval=request.stream_interval,
                )
                yield sequence

    def _constraint(self, tokenized: Tokenized, stop_ids: frozenset[int], begun: Matcher | None) -> Constraint | None:
        """Return the constraint of one choice: its grammar, its reasoning before that, and the end of the reasoning's
        budget. Without reasoning, the grammar continues from `begun`."""
        params = tokenized.request.params
        grammar = tokenized.grammar
        reasoning = params.reasoning
        thinking = None
        # If reasoning is only optional, the answer obeys a grammar from its first token on.
        leads = () if params.grammar is None else params.grammar.leads
        is_free = grammar is None or bool(leads)
        if reasoning is not None and (reasoning.budget is not None if is_free else not reasoning.opening):
            thinking = Thinking(reasoning, self._table, tokenized.closing_ids)
        if grammar is None and thinking is None:
            return None
        if grammar is not None and leads:
            if params.skip_special_tokens:
                hidden = self._table.special_ids - params.visible_special_ids
            else:
                hidden = frozenset()
            return PartsConstraint(
                Leads(leads, self._table, hidden),
                grammar.matcher,
                params,
                thinking=thinking,
                eos_token_ids=self._eos_token_ids,
                stop_ids=stop_ids,
            )
        matcher: Matcher | None = None
        if begun is not None and thinking is None:
            matcher = begun.copy()
        elif grammar is not None:
            matcher = grammar.matcher()
        return Constraint(matcher, params, thinking=thinking, eos_token_ids=self._eos_token_ids, stop_ids=stop_ids)


def _seed(request: Request, prompt_index: int) -> int:
    if request.params.seed is not None:
        return request.params.seed
    if request.draw_seed is not None:
        return (request.draw_seed + prompt_index) % 2**64
    return getrandbits(64)


def _begun_matcher(tokenized: Tokenized) -> Matcher | None:
    """Return a matcher that has read the text before the answer, or None if no allowed text begins with it. JSON may be
    spelled differently there: a client may write it without blanks."""
    compiled = tokenized.grammar
    asked = tokenized.request.params.grammar
    if compiled is None or asked is None or asked.leads:
        return None
    spellings = [asked.continued]
    if asked.kind in ("json_object", "json_schema"):
        spellings.append(respelled(asked.continued) or "")
    for text in filter(None, dict.fromkeys(spellings)):
        begun = compiled.matcher()
        if begun.begins(text.encode()) and not begun.is_complete:
            return begun
    return None
