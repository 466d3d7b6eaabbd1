"""The reasoning at the beginning of answers, by the chat template and the flag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oaiserve.routes.dialects.thinking import ThinkingParser

THINK = ("<think>", "</think>")
_SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn reasoning on and off


@dataclass(frozen=True, slots=True)
class ReasoningMode:
    """The reasoning of the answers to one request."""

    tags: tuple[str, str]
    is_open: bool  # the answer begins within it, without the opening tag
    prompt_opening: str = ""  # put behind the prompt, to make the model reason

    def parser(self) -> ThinkingParser:
        return ThinkingParser(*self.tags, is_open=self.is_open)

    @property
    def ends_with(self) -> str:
        """Return the text with which the reasoning ends, or "" if there may be none."""
        return self.tags[1] if self.is_open else ""


class ReasoningDialect:
    """The tags of a model's reasoning, and the template's switch: it reasons always, never, or by a variable."""

    def __init__(
        self,
        name: str,
        template: str,
        generation_prompt: Callable[[Mapping[str, Any]], str],
        tags: tuple[str, str] = THINK,
    ) -> None:
        """`name` is the value of `--reasoning-parser`, and `generation_prompt` returns the template's text behind the
        messages, by the values of its variables."""
        self.tags = tags
        self._name = name
        self._switch = next((switch for switch in _SWITCHES if switch in template), None)
        self._endings = {
            value: generation_prompt({} if value is None else dict.fromkeys(_SWITCHES, value)).rstrip()
            for value in (None, True, False)
        }

    def of_request(
        self, template_kwargs: Mapping[str, Any], *, has_generation_prompt: bool = True, must_end: bool = False
    ) -> ReasoningMode:
        """Return the reasoning of a request with these variables of the template.

        Without a generation prompt, as when the last message is continued, `has_generation_prompt` is False. A grammar
        and stop strings wait for the end of the reasoning, so it `must_end`: a model with the choice is made to reason
        by the end of its prompt.
        """
        if not has_generation_prompt:
            return ReasoningMode(self.tags, is_open=False)
        opening, closing = self.tags
        switch = next((bool(value) for name in _SWITCHES if (value := template_kwargs.get(name)) is not None), None)
        ending = self._endings[switch]
        if ending.endswith(opening):
            return ReasoningMode(self.tags, is_open=True)
        is_off = ending.endswith(closing) or switch is False
        if must_end and self._switch is not None and not is_off:
            return ReasoningMode(self.tags, is_open=True, prompt_opening=opening + "\n")
        is_open = self._name == "deepseek_r1" or (self._name == "qwen3" and not is_off)
        return ReasoningMode(self.tags, is_open=is_open)


def reasoning_dialect(
    name: str,
    template: str,
    generation_prompt: Callable[[Mapping[str, Any]], str],
    declared: tuple[str, str] | None = None,
) -> ReasoningDialect | None:
    """Return the reasoning by `--reasoning-parser`. With "auto", it has the `declared` tags, or else the usual ones if
    they are in the chat template."""
    if name == "auto" and declared is not None:
        return ReasoningDialect(name, template, generation_prompt, declared)
    if name == "none" or (name == "auto" and THINK[1] not in template):
        return None
    return ReasoningDialect(name, template, generation_prompt)
