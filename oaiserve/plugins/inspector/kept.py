"""`KeptRequests` stores the prompts and answers of the last requests, within limits, in memory only.

The event loop writes and reads everything here, so nothing needs a lock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan
from typing import TYPE_CHECKING

from oaiserve.engine.request import TERMINAL, ChatPrompt, Event, Prompt, PromptDone, Request, TokenChunk
from oaiserve.engine.types.logprobs import TokenLogprobs

if TYPE_CHECKING:
    Integers = array[int]
    Floats = array[float]
else:
    Integers = Floats = array

MAX_TOKENS = 2**20  # limit for all prompts and answers; the oldest requests are dropped first
FIRST_CHARACTERS = 80  # enough to recognise a conversation
BYTES_PER_TOKEN = 4  # to estimate a request's tokens from the size of its body without media


@dataclass(slots=True)
class KeptChoice:
    """The answer of one choice so far."""

    token_ids: Integers = field(default_factory=lambda: array("i"))
    logprobs: Floats = field(default_factory=lambda: array("f"))  # NaN: this server didn't sample the token
    finish_reason: str | None = None


@dataclass(slots=True)
class KeptMedium:
    """An image or a sound of a prompt, without its content."""

    kind: str
    num_bytes: int  # size of the file, or of its base64 encoding


@dataclass(slots=True)
class KeptPrompt:
    prompt: Prompt  # without media
    media: list[KeptMedium] = field(default_factory=list)
    token_ids: Integers | None = None  # None: not known yet, or never reported, as for embeddings
    logprobs: Floats | None = None  # present if the client requested them; NaN for the first token
    cached_tokens: int = 0


@dataclass(slots=True)
class KeptRequest:
    """The prompts and answers of one request."""

    request_id: str  # value of the header x-request-id
    prompts: list[KeptPrompt]
    num_choices: int  # choices per prompt
    num_text_tokens: int  # estimate from the size of the body
    first_words: str = ""  # beginning of the conversation's first user message
    num_read: int = 0  # tokens of the prompts that are known so far
    num_written: int = 0  # tokens of the answers
    choices: dict[int, KeptChoice] = field(default_factory=dict)  # keyed by index
    # Times between consecutive tokens in the engine. None: unknown, because the request is open or has several choices.
    gaps_ns: Integers | None = None
    is_open: bool = True

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that count towards the limit."""
        return max(self.num_read, self.num_text_tokens) + self.num_written

    def take(self, event: Event) -> None:
        """Add an event's data to the prompt or answer that it belongs to."""
        if isinstance(event, TokenChunk):
            choice = self.choices.setdefault(event.index, KeptChoice())
            choice.token_ids.extend(event.token_ids)
            self.num_written += len(event.token_ids)
            if event.logprobs is None or event.was_sent:  # Another server sampled tokens with `was_sent`.
                choice.logprobs.extend([nan] * len(event.token_ids))
            else:
                choice.logprobs.extend(_values(event.logprobs))
            choice.finish_reason = event.finish_reason
        elif isinstance(event, PromptDone):
            prompt = self.prompts[event.prompt_index]
            prompt.token_ids = array("i", event.token_ids)
            self.num_read += len(prompt.token_ids)
            prompt.cached_tokens = event.cached_tokens
            if event.logprobs is not None:
                prompt.logprobs = array("f", _values(event.logprobs))
        elif isinstance(event, TERMINAL):
            self.is_open = False
            if len(self.prompts) * self.num_choices == 1:
                self.gaps_ns = event.account.inter_token_ns


class KeptRequests:
    """The last `number` requests, open ones included."""

    def __init__(self, number: int, max_tokens: int = MAX_TOKENS) -> None:
        self.number = number
        self.max_tokens = max_tokens
        self._requests: list[KeptRequest] = []  # oldest first

    def add(self, request: Request) -> KeptRequest:
        prompts = [_without_media(prompt) for prompt in request.prompts]
        media_bytes = sum(medium.num_bytes for prompt in prompts for medium in prompt.media)
        num_text_tokens = max(0, request.num_bytes - media_bytes) // BYTES_PER_TOKEN
        words = first_words(request.prompts[0])
        kept = KeptRequest(request.origin.request_id, prompts, request.params.n, num_text_tokens, words)
        self._requests.append(kept)
        self.trim()
        return kept

    def trim(self) -> None:
        """Drop the oldest requests that exceed the limits. The newest one stays, however long it is."""
        del self._requests[: -self.number]
        rest = self.max_tokens
        for place in reversed(range(len(self._requests))):
            rest -= self._requests[place].num_tokens
            if rest < 0:
                del self._requests[: min(place + 1, len(self._requests) - 1)]
                return

    def find(self, request_id: str) -> KeptRequest | None:
        """Return the newest request with this id. Clients may choose ids, so several requests can have the same."""
        return next((kept for kept in reversed(self._requests) if kept.request_id == request_id), None)

    def first_words(self) -> dict[str, str]:
        """Return the first words of each conversation, keyed by request id."""
        return {kept.request_id: kept.first_words for kept in self._requests if kept.first_words}


def first_words(prompt: Prompt) -> str:
    """Return the beginning of a conversation's first user message on one line, or "" if it has no text."""
    if not isinstance(prompt, ChatPrompt):
        return ""
    contents = (message.get("content") for message in prompt.messages if message.get("role") == "user")
    content = next(contents, None)
    if not isinstance(content, str):
        texts = (part["text"] for part in content or () if part.get("type") == "text")
        content = next(texts, "")
    words = " ".join(content[: 4 * FIRST_CHARACTERS].split())
    if len(words) <= FIRST_CHARACTERS:
        return words
    return f"{words[: FIRST_CHARACTERS - 1]}…"


def _values(logprobs: TokenLogprobs) -> Sequence[float]:
    return [logprob for _, _, logprob in logprobs.tokens()]


def _without_media(prompt: Prompt) -> KeptPrompt:
    if not isinstance(prompt, ChatPrompt) or not prompt.media:
        return KeptPrompt(prompt)
    media = [KeptMedium(file.kind, len(file.content)) for file in prompt.media]
    return KeptPrompt(replace(prompt, media=()), media)
