"""The tokenize stage: worker threads turn the prompts of a request into token ids, once, and check lengths and ids.

It knows the tokenizer, its chat template and the length of the context. It must not know HTTP, torch or the scheduler.
The engine submits and aborts requests, and passes a callable for the results.
"""

from __future__ import annotations

import inspect
import json
import logging
import queue
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jinja2 import TemplateSyntaxError

from oaiserve.engine.detokenize import TokenTable
from oaiserve.engine.request import ChatPrompt, Prompt, Request, TextPrompt, TokenPrompt
from oaiserve.errors import APIError, ContextLengthExceeded, InternalError, InvalidRequest, StartupError, Unavailable
from oaiserve.model_files import reported, within
from oaiserve.times import monotonic_ns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

Message = dict[str, Any]

LOAD_SECONDS = 30.0  # for the tables of a tokenizer and a few samples of its chat template, which may loop forever


class Tokenizer:
    """The tokenizer turns text and messages into token ids. It never changes, so any number of threads may share it."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None) -> None:
        """Wrap a tokenizer of transformers. `chat_template` is Jinja source that replaces the model's own.

        Raises StartupError if the tokenizer has no Rust form, or if the template is not valid.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise StartupError(
                f"The tokenizer {type(tokenizer).__name__} has no Rust form (tokenizer.json), which this server needs."
            )
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        self.backend = tokenizer.backend_tokenizer
        # `tokenizer(text)` would set these on each call, which fails while another thread encodes.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = tokenizer.split_special_tokens
        self.vocab_size = len(tokenizer)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self._table = TokenTable(self.backend)
        self.special_ids = self._table.special_ids
        self.chat_template = ChatTemplate(tokenizer) if tokenizer.chat_template else None

    @classmethod
    def from_pretrained(cls, path: Path | str, chat_template: str | None = None, *, offline: bool = False) -> Tokenizer:
        """Load a tokenizer from a folder, a GGUF file or a hub id; if `offline`, from the hub's cache only.

        Raises StartupError if there is none, or if it cannot be used.
        """
        from transformers import AutoTokenizer  # takes seconds to import

        source, gguf_file = str(path), None
        if source.startswith(("/", ".", "~")) and not Path(path).exists():
            raise StartupError(f"There is no model at '{path}': it must be a folder, a GGUF file or a hub id.")
        if source.endswith(".gguf"):
            source, gguf_file = str(Path(path).parent), Path(path).name
        failure = f"Could not load a tokenizer from '{path}'"
        with reported(failure):
            try:
                tokenizer: Any = AutoTokenizer.from_pretrained(
                    source, gguf_file=gguf_file, local_files_only=offline, trust_remote_code=False
                )
            except OSError as error:
                if offline:
                    raise StartupError(
                        f"The Hugging Face hub does not answer, and '{path}' is not in its cache."
                    ) from error
                raise
            return within(LOAD_SECONDS, partial(cls, tokenizer, chat_template), failure)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raises InvalidRequest if it cannot be encoded, or has no tokens."""
        match prompt:
            case TokenPrompt():
                param, token_ids = "prompt", list(prompt.token_ids)
            case TextPrompt():
                param, token_ids = "prompt", self._encode(prompt.text, prompt.add_special_tokens, "prompt")
            case ChatPrompt():
                if self.chat_template is None:
                    raise InvalidRequest(
                        "This model has no chat template. Use /v1/completions, or start the server with a template.",
                        param="messages",
                    )
                text = self.chat_template.render(prompt)
                param, token_ids = "messages", self._encode(text, prompt.add_special_tokens, "messages")
        if not token_ids:
            raise InvalidRequest(f"Invalid '{param}': it has no tokens, so there is nothing to continue.", param=param)
        return token_ids

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word, both at the start of a text and after another word.

        Raises InvalidRequest for a word that cannot be encoded, or that has no tokens.
        """
        encoded: list[list[int]] = []
        for word in words:
            bare = word.lstrip(" ")
            alone = self._encode(bare, False, "bad_words")
            if not alone:
                raise InvalidRequest(
                    f"Invalid 'bad_words': {word[:40]!r} has no tokens of its own, so it cannot be kept out.",
                    param="bad_words",
                )
            encoded += [alone, self._encode(f" {bare}", False, "bad_words")]
        return encoded

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        try:
            text.encode()
            # Only the backend's methods for batches release the GIL. This one also skips offsets.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"Invalid '{param}': it has half of a surrogate pair (U+{ord(text[error.start]):04X}), "
                "which is no character. Send valid Unicode text.",
                param=param,
            ) from error
        except Exception as error:  # the Rust encoder raises Exception itself for all its errors
            raise InvalidRequest(
                f"Invalid '{param}': the model's tokenizer cannot encode it: {error}", param=param
            ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of a token on its own: with its leading space, and U+FFFD for part of a character."""
        return self._table.token_text(token_id)[0]


class ChatTemplate:
    """The chat template of the model. What it accepts is found out once, by rendering a few small samples."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        """Try the template of a tokenizer. Raises StartupError if it does not compile."""
        self._tokenizer = tokenizer
        # Arguments of apply_chat_template that are not template variables, which no client may set.
        # The first three are names of arguments further down.
        arguments = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {"self", "messages", "conversations", *arguments} - {"tools", "documents"}

        text, more = "A sample text.", "One more of them."
        as_string = self._sample([{"role": "user", "content": text}])
        as_parts = self._sample([{"role": "user", "content": [{"type": "text", "text": text}]}])
        takes_strings = text in as_string
        self._needs_parts = not takes_strings and text in as_parts
        self._takes_parts = self._needs_parts or (takes_strings and as_parts == as_string)
        systems = [{"role": "system", "content": self._content(content)} for content in (text, more)]
        two_systems = self._sample([*systems, {"role": "user", "content": self._content("Hello.")}])
        self._takes_systems = text in two_systems and more in two_systems
        source = tokenizer.chat_template
        sources = source.values() if isinstance(source, dict) else [source]
        self._knows_developer = any(re.search(r"""['"]developer['"]""", source) for source in sources)

    def _sample(self, messages: list[Message]) -> str:
        try:
            return self._apply(messages, {"add_generation_prompt": True})
        except InvalidRequest as error:
            if isinstance(cause := error.__cause__, TemplateSyntaxError):
                raise StartupError(
                    f"The chat template is not valid Jinja: {cause.message} (line {cause.lineno})."
                ) from cause
            return ""  # the template rejects this sample

    def render(self, prompt: ChatPrompt) -> str:
        """Return the text of the messages of a prompt. Raises InvalidRequest if the template rejects them."""
        if reserved := sorted(self._reserved & prompt.template_kwargs.keys()):
            raise InvalidRequest(
                f"Invalid 'chat_template_kwargs': '{reserved[0]}' cannot be set there.", param="chat_template_kwargs"
            )
        return self._apply(
            self._prepare(prompt.messages),
            {
                "add_generation_prompt": prompt.add_generation_prompt,
                "continue_final_message": prompt.continue_final_message,
                **prompt.template_kwargs,
            },
        )

    def _apply(self, messages: list[Message], arguments: Mapping[str, Any]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
        except Exception as error:  # a template is a program that runs on the client's data, and can raise anything
            raise InvalidRequest(
                f"The model's chat template rejects these messages: {str(error)[:300]}", param="messages"
            ) from error

    def _prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        prepared = [self._prepare_message(message) for message in messages]
        if not self._takes_systems and any(message.get("role") == "system" for message in prepared[1:]):
            systems = [message for message in prepared if message.get("role") == "system"]
            text = "\n\n".join(_text(message.get("content") or "") for message in systems)
            others = [message for message in prepared if message.get("role") != "system"]
            prepared = [{"role": "system", "content": self._content(text)}, *others]
        return prepared

    def _prepare_message(self, message: Mapping[str, Any]) -> Message:
        prepared = dict(message)
        if prepared.get("role") == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        content = prepared.pop("content", None)
        if content is not None:  # a template prints None as "None", but prints nothing for a missing key
            prepared["content"] = self._content(content)
        if prepared.get("tool_calls"):
            prepared["tool_calls"] = [_with_parsed_arguments(call) for call in prepared["tool_calls"]]
        return prepared

    def _content(self, content: str | Sequence[Mapping[str, Any]]) -> str | list[Message]:
        """Return the content as parts for a template that iterates over parts, else as a string: other templates would
        print a list as Python does."""
        text = _text(content)
        if isinstance(content, str):
            return [{"type": "text", "text": text}] if self._needs_parts else text
        return [dict(part) for part in content] if self._takes_parts else text


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"Invalid 'messages': a content part of type '{part.get('type')}'. This model takes parts of type "
                "'text' only.",
                param="messages",
            )
    return "\n".join(part["text"] for part in content)


def _with_parsed_arguments(call: Mapping[str, Any]) -> Message:
    """Return a tool call whose arguments, a string, are parsed for the template, if they are a JSON object.

    Raises InvalidRequest if they are nested too deeply.
    """
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return dict(call)
    except RecursionError:
        raise InvalidRequest(
            "Invalid 'messages': the arguments of a tool call are nested too deeply.", param="messages"
        ) from None
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class TokenizeStarted:
    """A worker has begun to encode the prompts of a request."""

    request: Request
    at_ns: int


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The token ids of each prompt, in order. There are no lists if the request was aborted before a worker took it."""

    request: Request
    token_ids: list[list[int]]
    bad_words: list[list[int]] = field(default_factory=list)
    at_ns: int | None = None  # None: it was not encoded

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True, slots=True)
class TokenizeFailed:
    """The prompts of a request cannot be encoded, or the request asks for something that the model cannot do."""

    request: Request
    error: APIError


class Encoder(Protocol):
    """The methods of a tokenizer that the stage calls."""

    def encode(self, prompt: Prompt) -> list[int]: ...

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]: ...


Post = Callable[[TokenizeStarted | Tokenized | TokenizeFailed], None]


class TokenizeStage:
    """The worker threads that encode prompts, over one queue.

    For each request that is submitted, the stage posts exactly one `Tokenized` or `TokenizeFailed`, also when it is
    aborted or the stage stops, and `TokenizeStarted` before that if a worker has begun with it.
    """

    def __init__(
        self,
        tokenizer: Encoder,
        post: Post,
        *,
        max_model_len: int,
        vocab_size: int,
        num_workers: int = 2,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        """Start the workers, which call `post`. `max_model_len` is in tokens, `vocab_size` is the model's, and `clock`
        returns nanoseconds. Without workers, `submit` encodes on the caller's thread, for comparisons."""
        self._tokenizer = tokenizer
        self._post = post
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._clock = clock
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        # The requests in the queue that are not aborted. What pops one decides on it: a worker, `abort` or `stop`.
        self._waiting: dict[str, Request] = {}
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"tokenize-{i}", daemon=True) for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """The number of requests that no worker has taken yet."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Add a request to the queue, without blocking. Its id must be unique among the requests in the stage."""
        if not self._threads:
            self._post(self._tokenize(request))
            return
        self._waiting[request.request_id] = request
        self._queue.put(request)
        if self._stopped:
            self._fail_waiting()

    def abort(self, request_id: str) -> None:
        """Abort a request, so that it is not encoded if no worker has taken it. It is posted in its turn anyway."""
        self._waiting.pop(request_id, None)

    def stop(self) -> None:
        """Fail the requests that wait, finish those that are being encoded, and join the threads."""
        self._fail_waiting()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        # The order matters: a submit that is too late for the call below sees the flag, and fails what waits by itself.
        self._stopped = True
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        while True:
            try:
                request = self._queue.get_nowait()
            except queue.Empty:
                return
            if request is not None:
                self._waiting.pop(request.request_id, None)
                self._post(TokenizeFailed(request, Unavailable("The server is shutting down.")))

    def _work(self) -> None:
        while (request := self._queue.get()) is not None:
            if self._waiting.pop(request.request_id, None) is None:
                self._post(Tokenized(request, []))
            else:
                self._post(self._tokenize(request))
        self._queue.put(None)  # for the next worker

    def _tokenize(self, request: Request) -> Tokenized | TokenizeFailed:
        self._post(TokenizeStarted(request, self._clock()))
        try:
            self._check_ids(request.params.logit_bias, "logit_bias")
            self._check_ids(request.params.stop_token_ids, "stop_token_ids")
            self._check_ids(request.params.allowed_token_ids or (), "allowed_token_ids")
            bad_words = self._encode_bad_words(request.params.bad_words)
            token_ids = [self._encode(prompt, request.params.max_tokens) for prompt in request.prompts]
        except APIError as error:
            return TokenizeFailed(request, error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the Rust encoder is no Exception, and must not end the worker
            logger.exception("Request %s could not be tokenized.", request.request_id)
            return TokenizeFailed(request, InternalError("The server failed while it tokenized this request."))
        return Tokenized(request, token_ids, bad_words, self._clock())

    def _encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_bad_words(words) if words else []
        # A tokenizer may know more ids than its model, which cannot generate those anyway.
        return [token_ids for token_ids in encoded if max(token_ids) < self._vocab_size]

    def _encode(self, prompt: Prompt, max_tokens: int | None) -> list[int]:
        is_chat = isinstance(prompt, ChatPrompt)
        token_ids = self._tokenizer.encode(prompt)
        self._check_ids(token_ids, "messages" if is_chat else "prompt")
        room_for = 1 if max_tokens is None else max_tokens
        if len(token_ids) + room_for > self._max_model_len:
            raise ContextLengthExceeded(self._max_model_len, len(token_ids), max_tokens, chat=is_chat)
        return token_ids

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= self._vocab_size:
            raise InvalidRequest(
                f"Invalid '{param}': token id {lowest if lowest < 0 else highest} is outside the model's vocabulary. "
                f"Ids are from 0 to {self._vocab_size - 1}.",
                param=param,
            )
