"""Checks the bodies that clients send, one struct per route over a shared base, and makes `SamplingParams` of them.

JSON null means the same as a parameter that is left out, and 2.0 is accepted as an integer. Every refusal is an
`InvalidRequest` that names the parameter. This file knows nothing of HTTP, and only the request types of the engine.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Annotated, Any, Literal, TypeVar, cast, get_type_hints

import msgspec
from msgspec import inspect

from oaiserve.engine.request import ChatPrompt, Grammar, PairPrompt, Prompt, SamplingParams, TextPrompt
from oaiserve.errors import InvalidRequest
from oaiserve.routes.objects import (
    NAME,
    Function,
    FunctionName,
    InputItem,
    Integer,
    Message,
    NonEmpty,
    Prompts,
    ReasoningOptions,
    ResponseFormat,
    ResponseTool,
    ResponseToolChoice,
    StructuredOutputs,
    TextOptions,
    TokenId,
    Tool,
    ToolChoice,
    described,
)
from oaiserve.times import monotonic_ns

logger = logging.getLogger(__name__)

MAX_CHOICES = 128  # OpenAI's limit for n
MAX_BEST_OF = 20  # OpenAI's limit
MAX_CHOICES_PER_REQUEST = 2048  # prompts times n, or times best_of
MAX_LOGPROBS = 20
MAX_STRINGS = 128  # in stop, and in bad_words
MAX_CHARACTERS = 4096  # of all these strings together, because the engine thread searches the text for them
MAX_SALT_CHARACTERS = 128
MAX_INT32 = 2**31 - 1
SLICE_VALUES = 2**15  # looked at within about a millisecond
MAX_INT64 = 2**63 - 1
MAX_TOOLS = 128  # this one and the next three are OpenAI's limits
MAX_METADATA = 16
MAX_KEY_CHARACTERS = 64
MAX_VALUE_CHARACTERS = 512
# What else a client may ask /v1/responses to include. Reasoning is never encrypted here: its items have its text. The
# others are of tools that run on OpenAI's servers, so no answer has them.
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
]
ReasoningFormat = Literal["none", "auto", "deepseek", "deepseek-legacy"]  # llama.cpp's; all but "none" mean the same


class SamplingBody(msgspec.Struct, kw_only=True):
    """The parameters that all generation routes accept. None means that the client did not set it."""

    model: Annotated[str | None, described("Name of the model; the one that is served, if left out.")] = None
    n: Annotated[Integer | None, described("Choices for each prompt. Default: 1.", 1, MAX_CHOICES)] = None
    max_tokens: Annotated[Integer | None, described("Most tokens of a choice.", 1, MAX_INT32)] = None
    max_completion_tokens: Annotated[
        Integer | None, described("Newer name of max_tokens, over which it wins.", 1, MAX_INT32)
    ] = None
    min_tokens: Annotated[
        Integer | None, described("Tokens before which a choice cannot end by itself.", 0, MAX_INT32)
    ] = None
    temperature: Annotated[
        float | None, described("0 takes the likeliest token each time. Default: the model's own, or 1.", 0, 2)
    ] = None
    top_p: Annotated[
        float | None, described("Draw among the likeliest tokens that have this probability together.", 0, 1)
    ] = None
    top_k: Annotated[
        Integer | None, described("Draw among this many of the likeliest tokens. 0 and -1: all.", -1, MAX_INT32)
    ] = None
    min_p: Annotated[
        float | None, described("Drop tokens with less than this share of the likeliest one's probability.", 0, 1)
    ] = None
    presence_penalty: Annotated[
        float | None, described("Lowers the logits of tokens that are in the answer already.", -2, 2)
    ] = None
    frequency_penalty: Annotated[
        float | None, described("The same, for each time that a token is in the answer.", -2, 2)
    ] = None
    # The bounds keep logits finite in 32 bits. Beyond them the output is noise.
    repetition_penalty: Annotated[
        float | None,
        described("Divides the logits of tokens that are in the prompt or the answer. 1: off.", 0.01, 100),
    ] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, described("Added to the logit.", -100, 100)]] | None,
        described("What to add to logits, by token id."),
    ] = None
    allowed_token_ids: Annotated[list[TokenId] | None, described("The only tokens that may be drawn.", minItems=1)] = (
        None
    )
    bad_words: Annotated[
        list[NonEmpty] | None, described("Texts whose tokens must not come in a row.", maxItems=MAX_STRINGS)
    ] = None
    seed: Annotated[
        Integer | None,
        described("Equal requests with equal seeds get equal draws. -1: none.", -MAX_INT64 - 1, MAX_INT64),
    ] = None
    stop: Annotated[
        NonEmpty | list[NonEmpty] | None, described("Texts before which the answer ends.", maxItems=MAX_STRINGS)
    ] = None
    stop_token_ids: Annotated[list[TokenId] | None, described("Tokens at which the answer ends.")] = None
    include_stop_str_in_output: Annotated[bool | None, described("Keep the stop in the text.")] = None
    ignore_eos: Annotated[bool | None, described("Go on at the end of the sequence, up to max_tokens.")] = None
    skip_special_tokens: Annotated[bool | None, described("Leave special tokens out of the text. Default: true.")] = (
        None
    )
    add_special_tokens: Annotated[
        bool | None, described("Add the tokenizer's own tokens to the prompt. Default: true, but false for messages.")
    ] = None
    prompt_logprobs: Annotated[
        Integer | None,
        described("Log-probabilities of the prompt, with this many alternatives for each token.", 0, MAX_LOGPROBS),
    ] = None
    response_format: Annotated[ResponseFormat | None, described("OpenAI's constraint.")] = None
    structured_outputs: Annotated[StructuredOutputs | None, described("vLLM's constraint.")] = None
    guided_json: Annotated[dict[str, Any] | str | None, described("Older name of structured_outputs.json.")] = None
    guided_regex: Annotated[str | None, described("Older name of structured_outputs.regex.")] = None
    guided_choice: Annotated[list[str] | None, described("Older name of structured_outputs.choice.", minItems=1)] = None
    guided_grammar: Annotated[str | None, described("Older name of structured_outputs.grammar.")] = None
    grammar: Annotated[str | None, described("llama.cpp's constraint: a grammar in GBNF, or in Lark's form.")] = None
    json_schema: Annotated[dict[str, Any] | None, described("llama.cpp's constraint: a JSON Schema.")] = None
    stream: Annotated[bool | None, described("Send the answer as server-sent events while it is generated.")] = None
    stream_options: Annotated[
        dict[str, bool | None] | None,
        described("With stream: include_usage, include_timings, continuous_usage_stats."),
    ] = None
    stream_interval: Annotated[Integer | None, described("Tokens of a choice in an event.", 1, MAX_INT32)] = None
    priority: Annotated[
        Integer | None, described("Lower is earlier, under --policy priority.", -MAX_INT64 - 1, MAX_INT64)
    ] = None
    cache_salt: Annotated[
        str | None,
        described(
            "Only requests with the same salt share cached prefixes.", minLength=1, maxLength=MAX_SALT_CHARACTERS
        ),
    ] = None
    return_token_ids: Annotated[bool | None, described("Send the ids of the prompt and of the answer, too.")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, described("In log-probabilities, write token_id:123 for the text of a token.")
    ] = None


class CompletionBody(SamplingBody, kw_only=True):
    """What to continue, and how."""

    prompt: Annotated[Prompts, described("A text, a list of texts, a list of token ids, or a list of such lists.")]
    max_tokens: Annotated[Integer | None, described("Most tokens of a choice. Default: 16.", 0, MAX_INT32)] = None
    max_completion_tokens: Annotated[
        Integer | None, described("Newer name of max_tokens, over which it wins.", 0, MAX_INT32)
    ] = None
    echo: Annotated[bool | None, described("Begin the text, and its log-probabilities, with the prompt.")] = None
    logprobs: Annotated[
        bool | Integer | None,
        described("Log-probabilities, with this many alternatives for each token.", 0, MAX_LOGPROBS),
    ] = None
    best_of: Annotated[
        Integer | None, described("Candidates for each prompt, of which the n likeliest are sent.", 1, MAX_BEST_OF)
    ] = None


class ChatBody(SamplingBody, kw_only=True):
    """The conversation to answer, and how."""

    messages: Annotated[list[Message], described("The conversation so far.", minItems=1)]
    logprobs: Annotated[bool | None, described("Send the log-probability of each token of the content.")] = None
    top_logprobs: Annotated[
        Integer | None, described("With logprobs: alternatives for each token.", 0, MAX_LOGPROBS)
    ] = None
    add_generation_prompt: Annotated[
        bool | None, described("Ask for an answer behind the messages. Default: true.")
    ] = None
    continue_final_message: Annotated[bool | None, described("Go on with the last message instead.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, described("Variables of the chat template.")] = None
    tools: Annotated[list[Tool] | None, described("Functions that the model may call.", maxItems=MAX_TOOLS)] = None
    tool_choice: Annotated[ToolChoice | None, described("Whether to call tools, and which. Default: auto.")] = None
    parallel_tool_calls: Annotated[bool | None, described("Whether there may be several calls. Default: true.")] = None
    functions: Annotated[list[Function] | None, described("The older form of tools.", maxItems=MAX_TOOLS)] = None
    function_call: Annotated[
        Literal["none", "auto"] | FunctionName | None, described("The older form of tool_choice.")
    ] = None
    reasoning_effort: Annotated[str | None, described("Passed on to the chat template.")] = None
    reasoning_format: Annotated[ReasoningFormat | None, described("none leaves reasoning in the content.")] = None
    include_reasoning: Annotated[bool | None, described("false leaves reasoning out of the answer.")] = None


class ResponsesBody(SamplingBody, kw_only=True):
    """What to respond to, and how."""

    input: Annotated[str | list[InputItem], described("A text, or the items of a talk.", minItems=1)]
    instructions: Annotated[str | None, described("The system's message, before all others.")] = None
    max_output_tokens: Annotated[
        Integer | None, described("Most tokens of the answer, those of its reasoning included.", 1, MAX_INT32)
    ] = None
    top_logprobs: Annotated[
        Integer | None, described("Alternatives for each token, if log-probabilities are included.", 0, MAX_LOGPROBS)
    ] = None
    include: Annotated[list[Includable] | None, described("What else to send.")] = None
    text: Annotated[TextOptions | None, described("The form of the text.")] = None
    tools: Annotated[list[ResponseTool] | None, described("Functions that the model may call.", maxItems=MAX_TOOLS)] = (
        None
    )
    tool_choice: Annotated[ResponseToolChoice | None, described("Whether to call tools, and which. Default: auto.")] = (
        None
    )
    parallel_tool_calls: Annotated[bool | None, described("Whether there may be several calls. Default: true.")] = None
    max_tool_calls: Annotated[
        Integer | None,
        described("Of tools that run on the server. It has none, so this changes nothing.", 1, MAX_INT32),
    ] = None
    reasoning: Annotated[ReasoningOptions | None, described("How the model reasons.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, described("Variables of the chat template.")] = None
    previous_response_id: Annotated[str | None, described("The stored response that this one goes on from.")] = None
    store: Annotated[bool | None, described("Keep the response. Default: true.")] = None
    truncation: Annotated[Literal["auto", "disabled"] | None, described("Nothing is ever cut off a talk.")] = None
    metadata: Annotated[
        dict[str, Annotated[str, described("At most 512 characters.", maxLength=MAX_VALUE_CHARACTERS)]] | None,
        described(
            "Is sent back with the response.",
            maxProperties=MAX_METADATA,
            propertyNames={"maxLength": MAX_KEY_CHARACTERS},
        ),
    ] = None
    user: Annotated[str | None, described("Is sent back with the response.")] = None
    background: Annotated[
        bool | None, described("Must be false: the server answers while the client waits.", enum=[False, None])
    ] = None
    conversation: Annotated[str | dict[str, Any] | None, described("Is refused: there are no conversations.")] = None
    prompt: Annotated[str | dict[str, Any] | None, described("Is refused: there are no stored prompts.")] = None


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """Which adapter to load. `lora_path` is its folder: a path in the server's folder of adapters."""

    lora_name: str
    lora_path: str


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """Which adapter to unload."""

    lora_name: str


class TokenizeBody(msgspec.Struct, kw_only=True):
    """What to tokenize: either a prompt or messages."""

    model: Annotated[str | None, described("Name of the model; the one that is served, if left out.")] = None
    prompt: Annotated[str | None, described("A text.")] = None
    messages: Annotated[list[Message] | None, described("A conversation.", minItems=1)] = None
    add_special_tokens: Annotated[
        bool | None, described("Add the tokenizer's own tokens. Default: true, but false for messages.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, described("Ask for an answer behind the messages. Default: true.")
    ] = None
    continue_final_message: Annotated[bool | None, described("Go on with the last message instead.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, described("Variables of the chat template.")] = None
    return_token_strs: Annotated[bool | None, described("Send the text of each token, too.")] = None
    tools: Annotated[list[Tool] | None, described("Functions in the prompt.", maxItems=MAX_TOOLS)] = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The tokens of which to make a text."""

    model: Annotated[str | None, described("Name of the model; the one that is served, if left out.")] = None
    tokens: list[TokenId]


@cache
def ranges(body: type[msgspec.Struct]) -> Mapping[str, tuple[float, float]]:
    """Return the declared ranges of the fields that have one."""
    found = {}
    for name, hint in get_type_hints(body, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if {"minimum", "maximum"} <= (schema := meta.extra_json_schema or {}).keys():
                found[name] = (schema["minimum"], schema["maximum"])
    return found


for _body in (CompletionBody, ChatBody, ResponsesBody):
    ranges(_body)  # now, because the first time takes milliseconds

# Parameters that would change the answer and that this server, or the route, does not support, with the values that
# change nothing. Of several in a request the first one here is refused: tools before the choice among them.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "modalities": (["text"], []),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

# Parameters of OpenAI or vLLM that have no meaning for this server: ignoring them changes no answer.
IGNORED = frozenset(
    {
        "ec_transfer_params", "include_reasoning", "kv_transfer_params", "length_penalty",
        "metadata", "mm_processor_kwargs", "moderation", "parallel_tool_calls", "prediction",
        "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "request_id", "safety_identifier",
        "service_tier", "session_id", "store", "thinking_token_budget", "user", "verbosity", "vllm_xargs",
    }
)  # fmt: skip


class UnknownNames:
    """Logs the unknown parameter names that clients send: at most ten in a line, and at most one line in 15 seconds.

    Clients choose the names, so only the last `limit` that were logged are remembered, and not logged again. Names that
    come while no line may be written wait for the next line, up to `limit` of them.
    """

    _INTERVAL_NS = 15_000_000_000

    def __init__(self, limit: int = 256, clock_ns: Callable[[], int] = monotonic_ns) -> None:
        self._limit = limit
        self._clock_ns = clock_ns
        self._lock = Lock()  # bodies are checked on the event loop and in worker threads
        self._logged: dict[str, None] = {}  # in the order in which they were logged
        self._waiting: dict[str, None] = {}
        self._next_ns: int | None = None

    def ignore(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                if len(self._waiting) == self._limit:
                    break
                if (shown := name[:80]) not in self._logged:
                    self._waiting[shown] = None
            now_ns = self._clock_ns()
            if not self._waiting or (self._next_ns is not None and now_ns < self._next_ns):
                return
            self._next_ns = now_ns + self._INTERVAL_NS
            shown_now, num_more = list(self._waiting)[:10], max(0, len(self._waiting) - 10)
            self._waiting.clear()
            self._logged |= dict.fromkeys(shown_now)
            while len(self._logged) > self._limit:
                del self._logged[next(iter(self._logged))]
        listed = ", ".join(map(repr, shown_now)) + (f" and {num_more} more" if num_more else "")
        logger.warning("Clients sent unknown parameters, which are ignored: %s", listed)


Body = TypeVar("Body", bound=msgspec.Struct)
_name = re.compile(NAME.removeprefix("^").removesuffix("$"))

_names_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def parse(
    decoder: msgspec.json.Decoder[Body],
    body: bytes | bytearray,
    unknown: UnknownNames,
    check_given: Callable[[Mapping[str, msgspec.Raw]], None] | None = None,
) -> Generator[None, None, Body]:
    """Decode a JSON body and check its types, and stop after each part that takes long. The route checks the ranges.

    `check_given` may refuse a body by its names and the JSON of their values, before anything is made of these. Raises
    InvalidRequest, RecursionError, and what `check_given` raises.
    """
    try:
        try:
            given = _names_decoder.decode(body)
        except msgspec.DecodeError:
            decoder.decode(body)  # it says better what is wrong
            raise
        if check_given is not None:
            check_given(given)
        yield
        parsed = decoder.decode(body)
        yield
        names = (given.keys() & UNSUPPORTED.keys()) - set(parsed.__struct_fields__)
        unsupported = {name: msgspec.json.decode(given[name]) for name in UNSUPPORTED if name in names}
    except msgspec.ValidationError as error:
        raise _invalid_type(decoder.type, str(error)) from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid JSON: it is not UTF-8.") from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest(f"The body is not valid JSON: {reason[:1].lower()}{reason[1:]}.") from None
    for name, value in unsupported.items():
        if value is not None and value not in UNSUPPORTED[name]:
            raise InvalidRequest(
                f"'{name}' is not supported by this server. Please leave it out.",
                param=name,
                code="unsupported_parameter",
            )
    unknown.ignore(given.keys() - set(parsed.__struct_fields__) - UNSUPPORTED.keys() - IGNORED)
    return parsed


def num_ids(value: msgspec.Raw | None) -> int:
    """Return the length of a list of ids, which it counts in the JSON; 0 if there are texts, lists or objects in it.

    A million ids take a few milliseconds so. As objects they take forty, in which no other thread goes on. An empty
    list counts as one id.
    """
    text = memoryview(value or b"").tobytes()
    is_flat = text[:1] == b"[" and text.find(b"[", 1) == text.find(b'"') == text.find(b"{") == -1
    return text.count(b",") + 1 if is_flat else 0


_JSON_TYPES = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "null",
    "object": "an object",
    "str": "a string",
}
_EXPECTED = re.compile(r"Expected `(.+?)`(?:, got `(.+?)`)?")
_MISSING = re.compile(r"Object missing required field `(.+?)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+?)`", re.DOTALL)
_NOT_ALLOWED = re.compile(r"Invalid (?:enum )?value ('.*')", re.DOTALL)
_PATH = re.compile(r" - at `\$\.?(.*)`$")


def _invalid_type(body: type[msgspec.Struct], text: str) -> InvalidRequest:
    """Turn msgspec's message, such as ``Expected `float | null`, got `str` - at `$.temperature` ``, into an error."""
    path = match[1] if (match := _PATH.search(text)) else ""
    text = _PATH.sub("", text)
    if missing := _MISSING.search(text):
        place = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"Missing required parameter: '{place}'.", param=_top(place))
    if unknown := _UNKNOWN.search(text):
        path, reason = f"{path}.{unknown[1][:60]}", "is not supported"
    elif not_allowed := _NOT_ALLOWED.search(text):
        reason = f"must be {_listed(_allowed(body, path))}, got {_cut(not_allowed[1])}"
    elif text.startswith("Expected `null`"):
        reason = "is not supported"
    elif expected := _EXPECTED.search(text):
        wanted = [name for name in expected[1].split(" | ") if name != "null"]
        if "int" in wanted:
            wanted = [name for name in wanted if name != "float"]  # see Integer
        kinds = " or ".join(_JSON_TYPES.get(name, name) for name in wanted)
        got = "a boolean" if expected[2] == "bool" else _JSON_TYPES.get(expected[2], "another type")
        reason = f"must be {kinds}, got {got}"
    else:
        reason = text[:1].lower() + text[1:]
    if not path:
        return InvalidRequest(f"Invalid body: {reason}.")
    return InvalidRequest(f"Invalid '{path}': {reason}.", param=_top(path))


def _top(path: str) -> str | None:
    return re.split(r"[.\[]", path)[0] or None


def _allowed(body: type[msgspec.Struct], path: str) -> list[str]:
    """Return the words that may stand at a place such as messages[0].role, where a body has only certain words."""
    nodes = _members(inspect.type_info(body))
    for step in re.findall(r"[^.\[]+", path):
        is_entry = step.endswith("]")
        inner: list[inspect.Type] = []
        for node in nodes:
            if isinstance(node, inspect.StructType) and not is_entry:
                inner += [field.type for field in node.fields if field.encode_name == step]
                inner += [inspect.LiteralType((node.tag,))] if node.tag_field == step else []
            elif isinstance(node, inspect.ListType) and is_entry:
                inner.append(node.item_type)
        nodes = [member for each in inner for member in _members(each)]
    words = [value for node in nodes if isinstance(node, inspect.LiteralType) for value in node.values]
    return [word for word in dict.fromkeys(words) if isinstance(word, str)]


def _members(node: inspect.Type) -> list[inspect.Type]:
    """Return the types of which a value may be one."""
    if isinstance(node, inspect.Metadata):
        return _members(node.type)
    if isinstance(node, inspect.UnionType):
        return [member for each in node.types for member in _members(each)]
    return [node]


def _listed(words: list[str]) -> str:
    *most, last = map(repr, words)
    return f"{', '.join(most)} or {last}" if most else last


def show(value: object) -> str:
    """Return a client's value as an error message quotes it, cut to 60 characters."""
    return _cut(repr(value) if isinstance(value, str) else str(value))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "..."


def invalid(param: str, reason: str, where: str = "") -> InvalidRequest:
    """Return the error of a parameter. `where` is the place in it that is wrong, such as tools[0].function.name."""
    return InvalidRequest(f"Invalid '{where or param}': {reason}.", param=param)


def check_name(param: str, where: str, name: str) -> None:
    """Raise InvalidRequest unless it is the name that a tool or a schema may have."""
    if not _name.fullmatch(name):
        raise invalid(param, f"must have 1 to 64 letters, digits, '_' or '-', got {show(name)}", where)


def integer(body: msgspec.Struct, name: str, low: int | None = None, high: int | None = None) -> int | None:
    """Return the field as an int, or None if it was not given. Raises InvalidRequest outside of its declared range, or
    of the one that is given here because it depends on the model."""
    value = getattr(body, name)
    if value is None:
        return None
    if isinstance(value, float):
        if not value.is_integer():
            raise invalid(name, f"must be an integer, got {show(value)}")
        value = int(value)
    limits = ranges(type(body))[name] if low is None or high is None else (low, high)
    return int(_within(name, value, *limits))


def _within(name: str, value: float, low: float, high: float) -> float:
    if not value >= low:
        raise invalid(name, f"must be >= {low}, got {show(value)}")
    if not value <= high:
        raise invalid(name, f"must be <= {high}, got {show(value)}")
    return value


def max_tokens(body: SamplingBody) -> int | None:
    """Return the limit that the client set. OpenAI's newer name for it wins over the older one."""
    older, newer = integer(body, "max_tokens"), integer(body, "max_completion_tokens")
    return older if newer is None else newer


def sampling_params(
    body: SamplingBody,
    defaults: Mapping[str, float | int],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingParams:
    """Return the checked sampling parameters of the body. A value that the client did not set comes from `defaults`,
    which are the model's, or else from OpenAI."""
    min_tokens = integer(body, "min_tokens") or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid("min_tokens", f"must be <= max_tokens ({max_tokens}), got {min_tokens}")
    top_k = integer(body, "top_k")
    seed = integer(body, "seed")

    def number(name: str, default: float) -> float:
        value = getattr(body, name)
        return defaults.get(name, default) if value is None else _within(name, value, *ranges(type(body))[name])

    return SamplingParams(
        n=integer(body, "n") or 1,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        top_k=max(0, int(defaults.get("top_k", 0)) if top_k is None else top_k),  # -1 and 0 are both "off"
        min_p=number("min_p", 0.0),
        presence_penalty=number("presence_penalty", 0.0),
        frequency_penalty=number("frequency_penalty", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=_allowed_token_ids(body),
        bad_words=_strings("bad_words", body.bad_words or []),
        seed=None if seed == -1 else seed,
        stop=_strings("stop", [body.stop] if isinstance(body.stop, str) else body.stop or []),
        stop_token_ids=token_ids("stop_token_ids", body.stop_token_ids or []),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    converted = {}
    for key, value in bias.items():
        # No token id has more than 10 digits, and a long string of digits is slow to convert.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise invalid("logit_bias", f"a key must be a token id such as '50256', got {show(key)}")
        if not -100 <= value <= 100:
            raise invalid("logit_bias", f"a bias must be between -100 and 100, got {show(value)}")
        converted[int(key)] = value
    return converted


def _strings(param: str, strings: list[str]) -> tuple[str, ...]:
    if "" in strings:
        raise invalid(param, "a string must not be empty")
    if len(strings) > MAX_STRINGS:
        raise invalid(param, f"at most {MAX_STRINGS} strings are allowed, got {len(strings)}")
    if (length := sum(map(len, strings))) > MAX_CHARACTERS:
        raise invalid(param, f"at most {MAX_CHARACTERS} characters are allowed in all, got {length}")
    return tuple(strings)


def _allowed_token_ids(body: SamplingBody) -> tuple[int, ...] | None:
    if body.allowed_token_ids is None:
        return None
    if not body.allowed_token_ids:
        raise invalid("allowed_token_ids", "must not be empty. Leave it out to allow every token")
    return token_ids("allowed_token_ids", body.allowed_token_ids)


def slices(values: list[Any]) -> Iterator[list[Any]]:
    """Yield the values in slices. One look at a million of them would keep all other threads waiting."""
    for start in range(0, len(values), SLICE_VALUES):
        yield values[start : start + SLICE_VALUES]


def types_of(values: list[Any]) -> set[type]:
    return {kind for part in slices(values) for kind in set(map(type, part))}


def token_ids(param: str, ids: Iterable[Integer]) -> tuple[int, ...]:
    """Return the ids as integers >= 0. The engine checks that they are in the vocabulary."""
    converted = []
    for token_id in ids:
        if token_id < 0 or token_id != int(token_id):
            raise invalid(param, f"a token id must be an integer >= 0, got {show(token_id)}")
        converted.append(int(token_id))
    return tuple(converted)


def prompt_ids(param: str, ids: list[Integer]) -> Sequence[int]:
    """Return the ids of a prompt. A long list that needs no change is not copied, which would take long."""
    if not ids:
        raise invalid(param, "a list of token ids must not be empty")
    if types_of(ids) != {int}:
        return token_ids(param, ids)
    if (least := min(map(min, slices(ids)))) < 0:
        raise invalid(param, f"a token id must be >= 0, got {show(least)}")
    return cast("list[int]", ids)


def prompt_logprobs(body: SamplingBody) -> int | None:
    value = integer(body, "prompt_logprobs")
    if value is not None and body.stream:
        if value > 0:
            raise invalid("prompt_logprobs", "is not available with 'stream': true")
        return None  # 0 asks for no alternatives, and a stream has no field for the prompt's log-probabilities
    return value


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parts of the answer that the client wants to see."""

    n: int  # choices per prompt
    num_logprobs: int | None  # alternatives per generated token; None: no logprobs
    num_prompt_logprobs: int | None
    as_token_ids: bool  # "token_id:123" for the text of a token
    with_token_ids: bool
    include_usage: bool
    include_timings: bool  # in the last chunk of a stream
    continuous_usage: bool  # usage so far in every chunk


def wanted(body: SamplingBody, params: SamplingParams, num_logprobs: int | None, num_prompt: int | None) -> Wanted:
    options = body.stream_options or {}
    if options and not body.stream:
        raise invalid("stream_options", "is only allowed with 'stream': true")
    include_usage = bool(options.get("include_usage"))
    return Wanted(
        n=params.n,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt,
        as_token_ids=bool(body.return_tokens_as_token_ids),
        with_token_ids=bool(body.return_token_ids),
        include_usage=include_usage,
        include_timings=bool(options.get("include_timings")),
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
    )


def stream_interval(body: SamplingBody, default: int) -> int:
    """Return the tokens per event, as `Request.stream_interval` has it: 0 for an answer that is not streamed."""
    interval = integer(body, "stream_interval") or default
    return interval if body.stream else 0


def cache_salt(body: SamplingBody) -> str:
    salt = body.cache_salt
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        raise invalid("cache_salt", f"must have 1 to {MAX_SALT_CHARACTERS} characters, got {len(salt)}")
    return salt


def traced_prompts(prompts: Iterable[Prompt], most_characters: int) -> str | None:
    """Return the text of the prompts as traces show it: messages in the form of the GenAI conventions, as JSON.

    The text is cut to `most_characters`, which the operator sets. Returns None if there is no text, or none is allowed.
    """
    traced: list[dict[str, Any]] = []
    for role, text in _texts(prompts):
        if most_characters <= 0:
            break
        traced.append({"role": role, "parts": [{"type": "text", "content": text[:most_characters]}]})
        most_characters -= max(1, len(text))
    return msgspec.json.encode(traced).decode() if traced else None


def _texts(prompts: Iterable[Prompt]) -> Iterator[tuple[str, str]]:
    """Return the role and the text of each part of each message."""
    for prompt in prompts:
        if isinstance(prompt, TextPrompt):
            yield "user", prompt.text
        elif isinstance(prompt, PairPrompt):
            yield "user", prompt.first
            yield "user", prompt.second
        elif isinstance(prompt, ChatPrompt):
            for message in prompt.messages:
                content = message["content"]
                for text in [content] if isinstance(content, str) else [part["text"] for part in content]:
                    yield message["role"], text


# The parameters that a record holds: numbers only, no text of the client.
_RECORDED = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "ignore_eos", "logprobs", "prompt_logprobs",
)  # fmt: skip


def recorded_params(body: SamplingBody, params: SamplingParams) -> dict[str, str | int | float | bool]:
    """Return the checked values of the parameters that the client set itself."""
    given = {name for name in _RECORDED if getattr(body, name, None) is not None}  # no route has all of them
    if body.max_completion_tokens is not None or getattr(body, "max_output_tokens", None) is not None:
        given.add("max_tokens")
    values = {name: getattr(params, name) for name in _RECORDED if name in given}
    return {name: value for name, value in values.items() if value is not None}
