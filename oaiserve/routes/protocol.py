"""Decodes clients' JSON bodies, and finds refused, ignored and unknown names in them.

This file knows nothing of HTTP. Every refusal is an `InvalidRequest` that names the parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from functools import cache, lru_cache
from itertools import islice
from typing import Any, TypeVar

import msgspec

from oaiserve.errors import InvalidRequest
from oaiserve.routes.invalid import invalid_type, show

logger = logging.getLogger(__name__)

# Parameters that would change the answer and that this server, or the route, does not support, with the values that
# change nothing. Of several in a request the first one here is refused: tools before the choice among them.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none",),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"), ()
    ),
    "logits_processors": ([],),
    "modalities": (["text"], []),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

# The newer names of older parameters.
_NEWER = {"functions": "tools", "function_call": "tool_choice"} | {
    f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")
}

# Parameters of OpenAI, Anthropic or vLLM that have no meaning for this server: ignoring them changes no answer.
IGNORED = frozenset(
    {
        "cache_control", "container", "context_management", "diagnostics", "inference_geo", "mcp_servers", "speed",
        "ec_transfer_params", "guided_decoding_backend", "include_reasoning", "kv_transfer_params", "length_penalty",
        "metadata", "mm_processor_kwargs", "moderation", "parallel_tool_calls", "prediction",
        "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "request_id", "safety_identifier",
        "service_tier", "session_id", "store", "thinking_token_budget", "user", "verbosity", "vllm_xargs",
    }
)  # fmt: skip


MOST_TOLD = 10  # unknown parameters of a body


@lru_cache(256)
def _tell_of(name: str) -> None:
    """Log an unknown parameter, each once while there are few: clients choose their names."""
    logger.warning("Clients sent an unknown parameter, which is ignored: %s", show(name))


Body = TypeVar("Body", bound=msgspec.Struct)
_names_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


@cache
def decoder_of(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def parse(
    kind: type[Body],
    body: bytes | bytearray,
    check_given: Callable[[Mapping[str, msgspec.Raw]], None] | None = None,
) -> Generator[None, None, Body]:
    """Decode a JSON body of this kind and check its types, and yield after each long part. The route checks the ranges.

    `check_given` may refuse a body by its names and the JSON of their values, before these are decoded. Raises
    InvalidRequest, RecursionError, and the errors of `check_given`.
    """
    decoder = decoder_of(kind)
    try:
        try:
            given = _names_decoder.decode(body)
        except msgspec.DecodeError:
            decoder.decode(body)  # its message is better
            raise
        if check_given is not None:
            check_given(given)
        yield
        parsed: Body = decoder.decode(body)
        yield
        names = (given.keys() & UNSUPPORTED.keys()) - set(parsed.__struct_fields__)
        unsupported = {name: msgspec.json.decode(given[name]) for name in UNSUPPORTED if name in names}
    except msgspec.ValidationError as error:
        raise invalid_type(kind, str(error)) from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid JSON: it is not UTF-8.") from None
    except msgspec.DecodeError as error:
        if not body.strip():
            raise InvalidRequest("The body is empty, and must be a JSON object.") from None
        reason = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest(f"The body is not valid JSON: {reason[:1].lower()}{reason[1:]}.") from None
    for name, value in unsupported.items():
        if value is not None and value not in UNSUPPORTED[name]:
            instead = f"Use '{_NEWER[name]}' instead." if name in _NEWER else "Please leave it out."
            raise InvalidRequest(
                f"'{name}' is not supported by this server. {instead}",
                param=name,
                code="unsupported_parameter",
            )
    unknown = given.keys() - set(parsed.__struct_fields__) - UNSUPPORTED.keys() - IGNORED
    for name in islice(unknown, MOST_TOLD):
        _tell_of(name[:61])  # of which 60 characters are shown
    return parsed


def num_ids(value: msgspec.Raw | None) -> int:
    """Return the length of a list of ids, which it counts in the JSON; 0 if there are texts, lists or objects in it.

    A million ids take a few milliseconds so. As objects they take forty, in which no other thread goes on. An empty
    list counts as one id.
    """
    text = memoryview(value or b"").tobytes()
    is_flat = text[:1] == b"[" and text.find(b"[", 1) == text.find(b'"') == text.find(b"{") == -1
    return text.count(b",") + 1 if is_flat else 0
