"""The table of `options`: what each becomes in a request of OpenAI's API, or why it is left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from oaiserve.routes.adaptations import Note

_OF_SERVER = "is a setting of the server"


class Option(NamedTuple):
    """An option with the name of ours, or without one and with the reason why it is left out."""

    ours: str = ""
    reason: str = ""
    harmless: tuple[Any, ...] = ()  # values that change nothing


OPTIONS: Mapping[str, Option] = {
    "seed": Option("seed"),
    "temperature": Option("temperature"),
    "top_k": Option("top_k"),
    "top_p": Option("top_p"),
    "min_p": Option("min_p"),
    "presence_penalty": Option("presence_penalty"),
    "frequency_penalty": Option("frequency_penalty"),
    "repeat_penalty": Option("repetition_penalty"),
    "stop": Option("stop"),
    "num_predict": Option("max_tokens"),  # 0 and less: no limit
    "num_ctx": Option(reason="--max-model-len of the server decides"),
    "repeat_last_n": Option(reason="penalties count all tokens", harmless=(-1,)),
    "num_keep": Option(reason="no prompt is cut"),
    "typical_p": Option(reason="the sampler has no such rule", harmless=(1,)),
    "tfs_z": Option(reason="the sampler has no such rule", harmless=(1,)),
    "mirostat": Option(reason="the sampler has no such rule", harmless=(0,)),
    "mirostat_tau": Option(reason="the sampler has no such rule"),
    "mirostat_eta": Option(reason="the sampler has no such rule"),
    "penalize_newline": Option(reason="penalties count all tokens", harmless=(True,)),
    **{
        name: Option(reason=_OF_SERVER)
        for name in ("numa", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "f16_kv", "use_mmap")
    },
    **{name: Option(reason=_OF_SERVER) for name in ("use_mlock", "logits_all", "vocab_only", "embedding_only")},
}
# Names of parameters of OpenAI's routes, with those that Ollama's clients know.
_RENAMED = {each.ours: name for name, each in OPTIONS.items() if each.ours and each.ours != name} | {
    "response_format": "format",
    "reasoning_effort": "think",
    "truncate_prompt_tokens": "truncate",
}
_NAMES = re.compile(rf"(?<!\w)({'|'.join(_RENAMED)})(?!\w)")


def theirs(name: str) -> str:
    """Return the name of a parameter in Ollama's API."""
    return _RENAMED.get(name, name)


def in_their_names(text: str) -> str:
    """Replace the names of parameters in an error or a note by those in Ollama's API."""
    return _NAMES.sub(lambda match: theirs(match[0]), text)


def sampling_of(options: Mapping[str, Any] | None, note: Note) -> dict[str, Any]:
    """Return the parameters of OpenAI's API for these options. Those without one are noted."""
    parameters: dict[str, Any] = {}
    for name, value in (options or {}).items():
        option = OPTIONS.get(name)
        if option is None:
            note("options", "one that is unknown is left out")
        elif value is None or value in option.harmless:
            continue
        elif not option.ours:
            note(f"options.{name}", f"is left out: {option.reason}")
        elif name != "num_predict" or not isinstance(value, int | float) or value > 0:
            parameters[option.ours] = value
    return parameters
