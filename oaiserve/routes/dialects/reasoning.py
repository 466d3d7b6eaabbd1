"""Decides, from the chat template and the flag, whether and how answers begin with reasoning."""

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
    prompt_opening: str = ""  # what is put behind the prompt so that the model reasons

    def parser(self) -> ThinkingParser:
        return ThinkingParser(*self.tags, is_open=self.is_open)

    @property
    def ends_with(self) -> str:
        """Return the text with which the reasoning ends, or "" if there may be none."""
        return self.tags[1] if self.is_open else ""


class ReasoningDialect:
    """The model of a server reasons in this form: always, never, or as its template is told to."""

    def __init__(
        self,
        name: str,
        template: str,
        generation_prompt: Callable[[Mapping[str, Any]], str],
        tags: tuple[str, str] = THINK,
    ) -> None:
        """`name` is the value of `--reasoning-parser`, and `generation_prompt` returns what the template puts behind
        the messages for some values of its variables."""
        self.tags = tags
        self._name = name
        self._switch = next((switch for switch in _SWITCHES if switch in template), None)
        self._endings = {
            value: generation_prompt({} if value is None else dict.fromkeys(_SWITCHES, value)).rstrip()
            for value in (None, True, False)
        }

    def of_request(
        self, template_kwargs: Mapping[str, Any], *, is_asked_for: bool = True, must_end: bool = False
    ) -> ReasoningMode:
        """Return how the model reasons with these variables of the template.

        Without a generation prompt, as when the last message is continued, `is_asked_for` is False. A grammar and stop
        strings wait for the end of the reasoning, so it `must_end`: a model that may choose is made to reason by the
        end of its prompt.
        """
        if not is_asked_for:
            return ReasoningMode(self.tags, is_open=False)
        opening, closing = self.tags
        asked = next((bool(value) for name in _SWITCHES if (value := template_kwargs.get(name)) is not None), None)
        ending = self._endings[asked]
        if ending.endswith(opening):
            return ReasoningMode(self.tags, is_open=True)
        is_off = ending.endswith(closing) or asked is False
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
    """Return the form that `--reasoning-parser` names. With "auto" it is the one with the `declared` tags, or else the
    usual one if the chat template knows that."""
    if name == "auto" and declared is not None:
        return ReasoningDialect(name, template, generation_prompt, declared)
    if name == "none" or (name == "auto" and THINK[1] not in template):
        return None
    return ReasoningDialect(name, template, generation_prompt)
