"""Turns a body with checked types into `SamplingParams` and the other values for routes.

The ranges are checked here, and each refusal is an `InvalidRequest` that names the parameter. This file knows nothing
of HTTP, and of the engine only the types of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import msgspec

from oaiserve.engine.request import SamplingParams
from oaiserve.engine.types.loop_rule import USUAL, LoopRule
from oaiserve.routes.adaptations import Note
from oaiserve.routes.intake.body_types import (
    MAX_CHARACTERS,
    MAX_KEY_CHARACTERS,
    MAX_METADATA,
    MAX_SALT_CHARACTERS,
    MAX_STRINGS,
    MAX_VALUE_CHARACTERS,
    ChatBody,
    SamplingBody,
    TokenizeBody,
)
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.object_types import (
    MAX_LOOP_LENGTH,
    MAX_PATTERN_COUNT,
    MAX_PATTERN_SIZE,
    Integer,
    Prompts,
    RepetitionDetection,
)

_TEMPLATE_PARAMETERS = ("add_generation_prompt", "continue_final_message")
TemplateBody = TypeVar("TemplateBody", ChatBody, TokenizeBody)
NO_LIMIT = -1
_LOOP_PARAM = "repetition_detection"  # It has vLLM's name and fields, plus `min_length`.
SLICE_VALUES = 2**15  # values that are examined within about a millisecond
# Parameters that have the same name in bodies and in `SamplingParams`, with their defaults if the model has none.
_FRACTIONS = {each.name: cast("float", each.default) for each in fields(SamplingParams) if each.type == "float"}
# Parameters that a record holds: only numbers, no text from the client.
_RECORDED = [
    each.name
    for each in fields(SamplingParams)
    if each.type in ("int", "int | None", "float") or each.name == "ignore_eos"
]


def integer(body: msgspec.Struct, name: str, low: int | None = None, high: int | None = None) -> int | None:
    """Return the field as an int, or None without it. Raises InvalidRequest outside its range, as declared or as
    passed."""
    value = getattr(body, name)
    if value is None:
        return None
    if isinstance(value, float):
        if not value.is_integer():
            raise invalid(name, f"must be an integer, got {show(value)}")
        value = int(value)
    if low is None or high is None:
        limits = ranges(type(body))[name]
    else:
        limits = (low, high)
    return int(_within(name, value, *limits))


@cache
def ranges(body: type[msgspec.Struct]) -> Mapping[str, tuple[float, float]]:
    limits = {}
    for name, hint in get_type_hints(body, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if {"minimum", "maximum"} <= (schema := meta.extra_json_schema or {}).keys():
                limits[name] = (schema["minimum"], schema["maximum"])
    return limits


def _within(name: str, value: float, low: float, high: float) -> float:
    if not value >= low:
        raise invalid(name, f"must be >= {low}, got {show(value)}")
    if not value <= high:
        raise invalid(name, f"must be <= {high}, got {show(value)}")
    return value


def refuse(body: SamplingBody, route: str, hints: Mapping[str, str]) -> None:
    """Raise InvalidRequest, with the field's hint, for a field that a route with a single answer lacks, or for several
    choices."""
    for name, hint in hints.items():
        value = getattr(body, name)
        if value is not None and value is not False:
            raise invalid(name, f"is not available on {route}: {hint}")
    if body.n is not None and body.n != 1:
        raise invalid("n", f"must be 1, because {route} gives one answer, got {show(body.n)}")


def check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"at most {MAX_METADATA} pairs are allowed, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARACTERS:
            raise invalid("metadata", f"a key may have {MAX_KEY_CHARACTERS} characters, got {show(key)}")
        if len(value) > MAX_VALUE_CHARACTERS:
            raise invalid("metadata", f"a value may have {MAX_VALUE_CHARACTERS} characters, got {len(value)}")


def max_tokens(body: SamplingBody, default: int | None = None) -> int | None:
    """Return the client's limit, or None for no limit. OpenAI's newer name takes precedence over the older one."""
    older = token_limit(body, "max_tokens", default)
    return token_limit(body, "max_completion_tokens", older)


def token_limit(body: msgspec.Struct, name: str, default: int | None = None) -> int | None:
    """Return a token limit, or None for no limit, which clients of llama.cpp send as -1."""
    if getattr(body, name) == NO_LIMIT:
        return None
    value = integer(body, name)
    if value is None:
        return default
    return value


def top_logprobs(body: SamplingBody, is_asked: bool, switch: str) -> int | None:
    """Return the number of alternatives for each token, or None if the `switch` doesn't request log-probabilities."""
    num_top = integer(body, "top_logprobs")
    if num_top and not is_asked:
        raise invalid("top_logprobs", f"is only allowed with {switch}")
    if is_asked:
        return num_top or 0
    return None


def with_template_parameters(body: TemplateBody, note: Note) -> TemplateBody:
    """Return a body without those variables of the template that repeat a parameter."""
    kwargs = body.chat_template_kwargs or {}
    moved = {
        name: kwargs[name] for name in _TEMPLATE_PARAMETERS if name in kwargs and isinstance(kwargs[name], bool | None)
    }
    for name, value in moved.items():
        if getattr(body, name) not in (None, value):
            raise invalid("chat_template_kwargs", f"'{name}' contradicts the parameter of the same name")
    if body.tools and "tools" in kwargs:
        note("chat_template_kwargs", "tools are left out, as the request has the parameter of that name")
    rest = {name: value for name, value in kwargs.items() if name not in moved}
    if moved:
        return msgspec.structs.replace(body, chat_template_kwargs=rest, **moved)
    return body


class ChatLimits(NamedTuple):
    """Numbers of a chat that are not among the sampling parameters of all routes."""

    max_tokens: int | None
    num_logprobs: int | None
    thinking_budget: int | None  # limit in tokens


def chat_limits(body: ChatBody) -> ChatLimits:
    num_logprobs = top_logprobs(body, bool(body.logprobs), "'logprobs': true")
    return ChatLimits(max_tokens(body), num_logprobs, integer(body, "thinking_token_budget"))


def sampling_params(
    body: SamplingBody, own: SamplingParams, defaults: Mapping[str, float | int], note: Note
) -> SamplingParams:
    """Return the checked sampling parameters of the body, except those with a name or a limit of the route's `own`.

    A value that the client did not set comes from `defaults`, the model's, or else from OpenAI's.
    """
    of_prompt = (own.prompt_logprobs, prompt_logprobs(body))
    min_tokens = integer(body, "min_tokens") or 0
    if own.max_tokens is not None and min_tokens > own.max_tokens:
        raise invalid("min_tokens", f"must be <= max_tokens ({own.max_tokens}), got {min_tokens}")
    top_k = integer(body, "top_k")
    seed = integer(body, "seed")

    def number(name: str, default: float) -> float:
        value = getattr(body, name)
        if value is None:
            return defaults.get(name, default)
        return _within(name, value, *ranges(type(body))[name])

    if body.allowed_token_ids == []:
        raise invalid("allowed_token_ids", "must not be empty. Leave it out to allow every token")
    fractions: dict[str, Any] = {name: number(name, default) for name, default in _FRACTIONS.items()}
    return replace(
        own,
        **fractions,
        n=integer(body, "n") or 1,
        min_tokens=min_tokens,
        top_k=max(0, int(defaults.get("top_k", 0)) if top_k is None else top_k),  # -1 and 0 are both "off"
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=None
        if (allowed := body.allowed_token_ids) is None
        else distinct_ids("allowed_token_ids", allowed),
        bad_words=strings("bad_words", body.bad_words or []),
        seed=None if seed == -1 else seed,
        stop=own.stop or _stop_strings([] if body.stop is None else body.stop, note),
        stop_token_ids=distinct_ids("stop_token_ids", body.stop_token_ids or []),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        loop_rule=_loop_rule(body.repetition_detection),
        skip_special_tokens=body.skip_special_tokens is not False,
        prompt_logprobs=max((number for number in of_prompt if number is not None), default=None),
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


def _loop_rule(value: bool | RepetitionDetection | None) -> LoopRule | None:
    """Return the rule by which a choice ends in a loop, or None if nothing ends it. Raises InvalidRequest."""
    if isinstance(value, bool) or value is None:
        return USUAL if value else None
    longest = _of_loop("max_pattern_size", value.max_pattern_size, 0, MAX_PATTERN_SIZE)
    shortest = _of_loop("min_pattern_size", value.min_pattern_size, 0, MAX_PATTERN_SIZE)
    min_length = _of_loop("min_length", value.min_length, 0, MAX_LOOP_LENGTH)
    if shortest > longest:
        raise invalid(
            _LOOP_PARAM,
            f"must be <= max_pattern_size ({longest}), got {shortest}",
            where=f"{_LOOP_PARAM}.min_pattern_size",
        )
    if not longest:
        return None
    return LoopRule(
        max_pattern_size=longest,
        min_pattern_size=max(1, shortest),
        min_count=_of_loop("min_count", value.min_count, 2, MAX_PATTERN_COUNT),
        min_length=min_length,
    )


def _of_loop(name: str, value: Integer | None, low: int, high: int) -> int:
    number = 0 if value is None else value
    where = f"{_LOOP_PARAM}.{name}"
    if isinstance(number, float) and not number.is_integer():
        raise invalid(_LOOP_PARAM, f"must be an integer, got {show(number)}", where=where)
    if not low <= number <= high:
        raise invalid(_LOOP_PARAM, f"must be {low} to {high}, got {show(value)}", where=where)
    return int(number)


def strings(param: str, strings: list[str]) -> tuple[str, ...]:
    if "" in strings:
        raise invalid(param, "a string must not be empty")
    if len(strings) > MAX_STRINGS:
        raise invalid(param, f"at most {MAX_STRINGS} strings are allowed, got {len(strings)}")
    if (length := sum(map(len, strings))) > MAX_CHARACTERS:
        raise invalid(param, f"at most {MAX_CHARACTERS} characters are allowed in all, got {length}")
    return tuple(strings)


def _stop_strings(given: str | list[str], note: Note) -> tuple[str, ...]:
    """Return the stop strings. Clients send an empty one for none, so it is left out and noted."""
    texts = [given] if isinstance(given, str) else given
    if "" in texts:
        note("stop", "an empty string is left out")
    return strings("stop", [text for text in texts if text])


def slices(values: list[Any]) -> Iterator[list[Any]]:
    """Yield the values in slices. Checking a million of them at once would block all other threads."""
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


def distinct_ids(param: str, ids: Iterable[Integer]) -> tuple[int, ...]:
    """Return the ids as `token_ids` does, each once: a list of a million cannot have more than the vocabulary."""
    return tuple(dict.fromkeys(token_ids(param, ids)))


def prompt_ids(param: str, ids: list[Integer]) -> Sequence[int]:
    """Return the ids of a prompt. A long list that needs no change is not copied, since that would take long."""
    if not ids:
        raise invalid(param, "a list of token ids must not be empty")
    if types_of(ids) != {int}:
        return token_ids(param, ids)
    if (least := min(map(min, slices(ids)))) < 0:
        raise invalid(param, f"a token id must be >= 0, got {show(least)}")
    return cast("list[int]", ids)


def inputs_of(param: str, value: Prompts) -> tuple[list[Any], bool]:
    """Return the texts in a value, or the lists of token ids, and whether they are such lists."""
    if isinstance(value, str):
        return [value], False
    if not value:
        raise invalid(param, "must not be an empty list")
    kinds = types_of(value)
    if kinds <= {int, float}:
        return [value], True
    if kinds not in ({str}, {list}):
        reason = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
        raise invalid(param, reason)
    return value, kinds == {list}


def prompt_logprobs(body: SamplingBody) -> int | None:
    value = integer(body, "prompt_logprobs")
    if value is not None and body.stream:
        if value > 0:
            raise invalid("prompt_logprobs", "is not available with 'stream': true")
        return None  # 0 requests no alternatives, and a stream has no field for the prompt's log-probabilities.
    return value


@dataclass(frozen=True, slots=True)
class Wanted:
    """The optional parts of the answer that the client wants."""

    n: int  # choices per prompt
    num_logprobs: int | None  # alternatives per generated token; None: no logprobs
    num_prompt_logprobs: int | None
    with_token_ids: bool
    include_usage: bool
    include_timings: bool  # whether the last chunk of a stream has timings
    continuous_usage: bool  # usage so far in every chunk
    progress: bool  # whether chunks report the progress of a long prompt


def wanted(body: SamplingBody, params: SamplingParams) -> Wanted:
    options = body.stream_options or {}
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only allowed with 'stream': true")
    include_usage = bool(options.get("include_usage"))
    return Wanted(
        n=params.n,
        num_logprobs=params.logprobs,
        num_prompt_logprobs=prompt_logprobs(body),
        with_token_ids=bool(body.return_token_ids),
        include_usage=include_usage,
        include_timings=bool(options.get("include_timings")),
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        progress=bool(body.return_progress),
    )


def cache_salt(body: SamplingBody) -> str:
    salt = body.cache_salt
    if salt is None:
        return ""
    if not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        raise invalid("cache_salt", f"must have 1 to {MAX_SALT_CHARACTERS} characters, got {len(salt)}")
    return salt


def recorded_params(body: SamplingBody, params: SamplingParams) -> dict[str, str | int | float | bool]:
    names = {name for name in _RECORDED if getattr(body, name, None) is not None}  # No route has all of them.
    if body.max_completion_tokens is not None or getattr(body, "max_output_tokens", None) is not None:
        names.add("max_tokens")
    values = {name: getattr(params, name) for name in _RECORDED if name in names}
    return {name: value for name, value in values.items() if value is not None}
