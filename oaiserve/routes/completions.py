"""/v1/completions: its kinds of prompts, its own parameters, and the shape of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import (
    GapPrompt,
    Prompt,
    PromptDone,
    SamplingParams,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
    Usage,
)
from oaiserve.engine.types.logprobs import TokenLogprobs
from oaiserve.errors import ContextLengthExceeded
from oaiserve.routes.answer import sse
from oaiserve.routes.answer.common_shape import HOLE, ChoicesShape, StreamChunk, Whole, encode, filled
from oaiserve.routes.answer.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    completion_logprobs_in_parts,
    prompt_logprobs_in_parts,
)
from oaiserve.routes.answer.respond import Answer, answer_to
from oaiserve.routes.chat import constraints
from oaiserve.routes.exchange import AnswerFacts
from oaiserve.routes.intake import parameters
from oaiserve.routes.intake.body_types import MAX_CHOICES_PER_REQUEST, CompletionBody
from oaiserve.routes.intake.decode import num_ids
from oaiserve.routes.intake.invalid import invalid
from oaiserve.routes.intake.parameters import Wanted, inputs_of, integer, prompt_ids
from oaiserve.routes.intake.read import Head, Intake, read
from oaiserve.routes.operation import Operation
from oaiserve.routes.serving import serving_of


class CompletionChoice(msgspec.Struct):
    """A choice of a whole answer or of a chunk. A field that is UNSET is left out."""

    index: int
    text: str
    logprobs: CompletionLogprobs | msgspec.Raw | None = None
    finish_reason: Annotated[
        str | None, msgspec.Meta(extra_json_schema={"enum": ["stop", "length", "repetition", None]})
    ] = None
    stop_reason: str | int | UnsetType | None = UNSET  # see TokenChunk
    prompt_logprobs: PromptLogprobs | msgspec.Raw | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Whole[CompletionChoice]):
    """The answer to a completion."""


class CompletionChunk(StreamChunk[CompletionChoice]):
    """An event of a streamed answer to a completion."""


@Operation(
    summary="Continue texts or token ids, whole or streamed.",
    group="Generation",
    body=CompletionBody,
    answer=Completion,
    event=CompletionChunk,
    example={"prompt": "The capital of France is", "max_tokens": 8},
)
async def completions(http: HTTPRequest) -> Answer:
    max_model_len = serving_of(http).engine.max_model_len

    def check_number(given: Mapping[str, msgspec.Raw]) -> None:
        if (number := num_ids(given.get("prompt"))) > max_model_len:
            raise ContextLengthExceeded(max_model_len, number, param="prompt")

    return await read(http, CompletionBody, _answer, id_prefix="cmpl-", check_given=check_number)


def _answer(intake: Intake[CompletionBody]) -> Answer:
    body = intake.body
    if not isinstance(body.logprobs, bool):
        num_logprobs = integer(body, "logprobs")
    elif body.logprobs:
        num_logprobs = 1
    else:
        num_logprobs = None
    own = SamplingParams(
        n=_best_of(body) or 1,
        max_tokens=parameters.max_tokens(body, default=16),
        logprobs=num_logprobs,
        # With echo, the logprobs of the prompt are part of the same lists as those of the answer.
        prompt_logprobs=num_logprobs if body.echo else None,
        text_lengths=num_logprobs is not None,
        grammar=constraints.grammar(body, intake.exchange.adaptations.note),
    )
    params, wanted = intake.checked(own)
    read_prompts = build_prompts(body)
    prompts: tuple[Prompt, ...] = read_prompts
    tokenizer = intake.serving.engine.tokenizer
    if body.suffix:
        if tokenizer.fill is None:
            raise invalid("suffix", "the model has no tokens for filling in the middle, such as <|fim_prefix|>")
        prompts = tuple(_with_gap(prompt, body.suffix) for prompt in read_prompts)
        # After the middle, a model may continue with another gap.
        ends = () if params.ignore_eos else tokenizer.fill.ids
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *ends))
    if body.echo and (num_logprobs is not None or isinstance(read_prompts[0], TokenPrompt)):
        params = replace(params, prompt_texts=True)
    facts = intake.exchange.answer_facts
    echoed = prompts if body.echo else ()
    shape = CompletionShape(intake.head, wanted, tokenizer.special_ids, len(prompts), echoed, facts)
    return answer_to(intake, params, prompts, shape)


def _best_of(body: CompletionBody) -> int | None:
    n = integer(body, "n") or 1
    best_of = integer(body, "best_of")
    if best_of in (None, 1):  # OpenAI's default is 1, for any n
        return None
    if best_of < n:
        raise invalid("best_of", f"must be >= n ({n}), got {best_of}")
    if best_of > n and body.stream:
        raise invalid("best_of", f"must be equal to n ({n}) with 'stream': true, got {best_of}")
    return best_of


def _with_gap(prompt: TextPrompt | TokenPrompt, suffix: str) -> GapPrompt:
    if isinstance(prompt, TextPrompt):
        return GapPrompt(prompt.text, suffix, prompt.add_special_tokens)
    return GapPrompt(prompt.token_ids, suffix)


def build_prompts(body: CompletionBody) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Return the prompts of the body: a string, a list of strings, one list of token ids, or a list of such lists."""
    entries, are_ids = inputs_of("prompt", body.prompt)
    if len(entries) > MAX_CHOICES_PER_REQUEST:  # checked before a million of them are made
        raise invalid("prompt", f"prompts times n must be <= {MAX_CHOICES_PER_REQUEST}, got {len(entries)} prompts")
    if are_ids:
        return tuple(TokenPrompt(prompt_ids("prompt", ids)) for ids in entries)
    return tuple(TextPrompt(text, body.add_special_tokens is not False) for text in entries)


class CompletionShape(ChoicesShape):
    """Renders the answers of /v1/completions. Choice `i` belongs to prompt `i // n`, and begins with its text if the
    prompt is `echoed`."""

    empty_choice = CompletionChoice(0, "")

    def __init__(
        self,
        head: Head,
        wanted: Wanted,
        special_ids: frozenset[int],
        num_prompts: int,
        echoed: Sequence[Prompt],
        facts: AnswerFacts,
    ) -> None:
        super().__init__("text_completion", head, wanted, num_prompts)
        self._facts = facts
        self._special_ids = special_ids
        self._echoed = echoed
        self._lengths: Counter[int] = Counter()  # characters of the text that was sent, by choice

    def _text_of(self, event: PromptDone) -> str:
        """Return the text of a prompt that is echoed, without its control tokens; "" for any other prompt."""
        if not self._echoed:
            return ""
        match self._echoed[event.prompt_index]:
            case TextPrompt(text) | GapPrompt(str(text)):
                return text
            case _:
                return "".join(event.texts or ())

    def prompt(self, event: PromptDone) -> Iterator[bytes]:
        yield from self._computed(event)
        if not (self._echoed or self._wanted.with_token_ids):
            return
        text = self._text_of(event)
        for index in range(event.prompt_index * self._wanted.n, (event.prompt_index + 1) * self._wanted.n):
            choice = CompletionChoice(index, text)
            self._lengths[index] += len(text)
            logprobs: list[Iterable[bytes]] = []
            if self._echoed and event.logprobs is not None and self._wanted.num_logprobs is not None:
                choice.logprobs = HOLE
                logprobs.append(self._logprobs(event.logprobs, event.texts or ()))
            if self._wanted.with_token_ids:
                choice.prompt_token_ids = list(event.token_ids)
            yield from map(sse.one_line, filled(self._event(choice), *logprobs))

    def delta(self, chunk: TokenChunk) -> bytes:
        self._usage.completion_tokens += len(chunk.token_ids)
        events = b""
        if chunk.text or chunk.logprobs or (self._wanted.with_token_ids and chunk.token_ids):
            events = self._event(self._text_choice(chunk))
        if chunk.finish_reason is not None:
            # The end is a separate chunk, because clients drop the text of a chunk that has a finish reason.
            events += self._event(CompletionChoice(chunk.index, "", None, chunk.finish_reason, chunk.stop_reason))
        return events

    def whole(self, prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage) -> Iterator[bytes]:
        """Render the whole answer. With best_of, `choices` has more candidates than the client gets."""
        best_of = len(choices) // len(prompts)
        n = self._wanted.n
        if best_of > n:
            choices = best_choices(choices, best_of, n)
            self._facts.finish_reasons = {c.index: c.finish_reason for c in choices if c.finish_reason is not None}
        return self._whole((self._whole_choice(prompts[chunk.index // n], chunk) for chunk in choices), usage)

    def _whole_choice(self, prompt: PromptDone, chunk: TokenChunk) -> Iterator[bytes]:
        wanted = self._wanted
        echoed = self._text_of(prompt)
        choice = CompletionChoice(chunk.index, echoed + chunk.text, None, chunk.finish_reason, chunk.stop_reason)
        parts: list[Iterable[bytes]] = []
        if wanted.num_logprobs is not None:
            choice.logprobs = HOLE
            shown = chunk.logprobs or TokenLogprobs()
            texts = _parts_of_chunk(chunk)
            if self._echoed and prompt.logprobs is not None:
                of_answer = shown
                shown = TokenLogprobs()
                shown.extend(prompt.logprobs)
                shown.extend(of_answer)
                texts = chain(prompt.texts or (), texts)
            parts.append(self._logprobs(shown, texts))
        if wanted.num_prompt_logprobs is not None:
            choice.prompt_logprobs = HOLE
            parts.append(prompt_logprobs_in_parts(prompt.logprobs or TokenLogprobs(), wanted.num_prompt_logprobs))
        if wanted.with_token_ids:
            choice.prompt_token_ids = list(prompt.token_ids)
            choice.token_ids = chunk.token_ids
        return filled(encode(choice), *parts)

    def _text_choice(self, chunk: TokenChunk) -> CompletionChoice:
        choice = CompletionChoice(chunk.index, chunk.text)
        if chunk.logprobs is not None and self._wanted.num_logprobs is not None:
            logprobs = self._logprobs(chunk.logprobs, _parts_of_chunk(chunk), self._lengths[chunk.index])
            choice.logprobs = msgspec.Raw(b"".join(logprobs))
        self._lengths[chunk.index] += len(chunk.text)
        if self._wanted.with_token_ids:
            choice.token_ids = chunk.token_ids
        return choice

    def _logprobs(self, tokens: TokenLogprobs, texts: Iterable[str], offset: int = 0) -> Iterator[bytes]:
        num_top = self._wanted.num_logprobs or 0
        return completion_logprobs_in_parts(tokens, texts, num_top, self._special_ids, offset)


def _parts_of_chunk(chunk: TokenChunk) -> Iterator[str]:
    at = 0
    for length in chunk.text_lengths or ():
        yield chunk.text[at : at + length]
        at += length


def best_choices(candidates: Sequence[TokenChunk], best_of: int, n: int) -> list[TokenChunk]:
    """Return the n best of each prompt's candidates, best first, with their indices in the answer.

    They are ranked by mean log-probability per generated token, as in OpenAI's API. The first of equal ones wins.
    """

    def mean_logprob(chunk: TokenChunk) -> float:
        logprobs = [logprob for _, _, logprob in (chunk.logprobs or TokenLogprobs()).tokens()]
        return sum(logprobs) / len(logprobs) if logprobs else 0.0  # There are none with max_tokens 0.

    best: list[TokenChunk] = []
    for start in range(0, len(candidates), best_of):
        best += sorted(candidates[start : start + best_of], key=mean_logprob, reverse=True)[:n]
    return [msgspec.structs.replace(chunk, index=index) for index, chunk in enumerate(best)]
