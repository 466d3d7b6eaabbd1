"""The reasoning at the beginning of answers: its dialect, from the chat template and the flag, and its parser."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oaiserve.routes.dialects.calls import MOST_HEAD, MOST_TRIED_AGAIN, CallParser
from oaiserve.routes.dialects.segments import CallBroken, CallEnd, Content, find_tag, opening_tags

_SLICE = 256  # characters that are read at once
THINK = ("<think>", "</think>")
# Variables of templates that turn reasoning off and on, with their values for both.
SWITCHES: Mapping[str, tuple[object, object]] = {
    "thinking_mode": ("disabled", "enabled"),
    "enable_thinking": (False, True),
    "thinking": (False, True),
}
EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")  # variables of templates
_NEAREST = {"none": "low", "minimal": "low", "xhigh": "high"}  # efforts of models without a switch
# Templates' other names for efforts, nearest first.
_ALIKE = {
    "none": ("none", "no_think"),
    "minimal": ("minimal", "low"),
    "medium": ("medium", "high"),
    "xhigh": ("xhigh", "max", "high"),
}
_BUDGETS = {"minimal": 256, "low": 1024}  # token limits by effort, for a template without efforts; others: no limit


@dataclass(frozen=True, slots=True)
class ReasoningMode:
    """The reasoning of the answers to one request."""

    tags: tuple[str, str]
    is_open: bool  # The answer begins within the reasoning, without the opening tag.
    prompt_opening: str = ""  # appended to the prompt, to make the model reason


class ReasoningDialect:
    """The tags of a model's reasoning, and whether it is always on, always off, or switched by a template variable."""

    def __init__(
        self,
        name: str,
        template: str,
        generation_prompt: Callable[[Mapping[str, Any]], str],
        tags: tuple[str, str],
        *,
        is_always: bool = False,
    ) -> None:
        """`name` is the value of `--reasoning-parser`. `generation_prompt` returns the template's text after the
        messages, for values of its variables. With `is_always`, the model always reasons."""
        self.tags = tags
        self._is_always = is_always
        self._name = name
        words = set(re.findall(r"\w+", template))
        self._effort = next((name for name in EFFORTS if name in words), None)
        self._switch = next((name for name, (off, _) in SWITCHES.items() if {name, off or name} <= words), None)
        self._endings: dict[tuple[bool | None, str | None], str] = {
            (on, None): generation_prompt(
                {} if on is None else {name: values[on] for name, values in SWITCHES.items()}
            ).rstrip()
            for on in (None, True, False)
        }
        named = re.findall(r"""['"](none|no_think|minimal|low|medium|high|xhigh|max)['"]""", template)
        for effort in set(named if self._effort else ()):
            if ending := generation_prompt({str(self._effort): effort}).rstrip():  # "" if the template refuses it
                self._endings[None, effort] = ending
        self._nearest = {
            effort: next((one for one in alike if (None, one) in self._endings), effort)
            for effort, alike in _ALIKE.items()
        }

    def switched(self, *, on: bool) -> Mapping[str, Any]:
        if self._switch is None:
            return {}
        return {self._switch: SWITCHES[self._switch][on]}

    def by_effort(self, effort: str | None) -> tuple[Mapping[str, Any], int | None]:
        """Return the template's variables for an effort, and the token budget that replaces them if there are none."""
        if effort is None:
            return {}, None
        name = self._effort or EFFORTS[0]
        if self._is_always:
            return {name: _NEAREST.get(effort, effort)}, 0 if effort == "none" else None
        nearest = self._nearest.get(effort, effort)
        if effort == "none" and self._switch and (None, nearest) not in self._endings:
            return self.switched(on=False), None
        if effort == "none" and not self._effort:
            return {}, 0
        return {name: nearest}, None if self._effort else _BUDGETS.get(effort)

    def of_request(
        self, template_kwargs: Mapping[str, Any], *, has_generation_prompt: bool = True, must_end: bool = False
    ) -> ReasoningMode:
        """Return the reasoning of a request with these variables of the template.

        `has_generation_prompt` is False if the last message is continued, for example. A grammar and stop strings apply
        only after the reasoning, so with these it `must_end`: if the model could skip it, the end of the prompt makes
        it reason.
        """
        if not has_generation_prompt:
            return ReasoningMode(self.tags, is_open=False)
        opening, closing = self.tags
        values = ((name, template_kwargs[name]) for name in SWITCHES if template_kwargs.get(name) is not None)
        switch = next((value == SWITCHES[name][1] or value is True for name, value in values), None)
        effort = template_kwargs.get(self._effort or "")
        ending = self._endings.get((switch, effort if isinstance(effort, str) else None)) or self._endings[switch, None]
        if ending.endswith(opening):
            return ReasoningMode(self.tags, is_open=True)
        is_off = ending.endswith(closing) or switch is False
        if must_end and self._is_always:
            return ReasoningMode(self.tags, is_open=True, prompt_opening=opening)
        if must_end and self._switch is not None and not is_off:
            return ReasoningMode(self.tags, is_open=True, prompt_opening=opening + "\n")
        is_open = self._name == "deepseek_r1" or (self._name == "qwen3" and not is_off)
        return ReasoningMode(self.tags, is_open=is_open)


class ThinkingParser:
    """Parses the text of one answer in pieces. White space next to the tags belongs to them, except before the last.

    The opening tag may be missing if the prompt ends with it: then `is_open` is set in the mode. Otherwise, an answer
    without it has no reasoning. Models also make calls within reasoning that they never close. From the first call on,
    the text is held until the closing tag arrives. Without one, it is not reasoning.
    """

    def __init__(self, mode: ReasoningMode, calls: Callable[[], CallParser] | None = None) -> None:
        """`calls` returns a parser for the calls that may come before the reasoning is closed."""
        self.is_over = False
        self.end = 0  # characters up to the end of the reasoning so far, with its tags
        self._opening = mode.tags[0].lstrip()
        self._closing = mode.tags[1]
        self._is_open = mode.is_open
        self._has_begun = False
        self._held = ""
        self._skips_space = True
        self._calls = calls
        self._call_tags = () if calls is None else calls().opening_tags
        self._trial: CallParser | None = None  # parser of a text that may begin with a call
        self._tag = ""  # tag at the start of the trial's text
        self._tried: list[str] = []  # the text of the trial
        self._last = ""  # end of the text, where the closing tag may have begun
        self._has_call = False  # The trial text begins with a complete call.

    def push(self, text: str) -> tuple[str, str]:
        """Receive the next piece of the text. Return the reasoning in it, and the text after the reasoning."""
        reasoning = []
        for start in range(0, len(text), _SLICE):
            end = start + _SLICE
            before, behind = self._push(text[start:end])
            reasoning.append(before)
            if self.is_over:
                return "".join(reasoning), behind + text[end:]
        return "".join(reasoning), ""

    def _push(self, text: str) -> tuple[str, str]:
        num_reasoning = 0  # characters of reasoning at the beginning of the held text
        if self._trial is not None:
            num_reasoning = self._try(self._trial, text)
            if not num_reasoning:
                return "", ""
        else:
            self._held += text
        if self._skips_space and not self._begin():
            return "", self._take(len(self._held)) if self.is_over else ""
        reasoning = ""
        while True:
            reasoning += self._take(num_reasoning)
            at, tag = find_tag(self._held, (self._closing, *self._call_tags))
            reasoning += self._take(at)
            if self._calls is None or tag in ("", self._closing):
                self.end += len(reasoning) + len(tag)
                self.is_over = tag != ""
                return reasoning, self._take(len(self._held))[len(tag) :] if tag else ""
            self._trial = self._calls()
            self._tag = tag
            num_reasoning = self._try(self._trial, self._take(len(self._held)))
            if not num_reasoning:
                self.end += len(reasoning)
                return reasoning, ""

    def _begin(self) -> bool:
        """Drop the opening tags and the white space before the reasoning. Return whether the reasoning follows.

        It doesn't if there is none, and `is_over` is then true, or if more text must be read first.
        """
        end, is_certain = opening_tags(self._held, self._opening, is_open=self._is_open or self._has_begun)
        if end:
            self._has_begun = True
        elif not self._has_begun and (is_certain or len(self._held) >= MOST_HEAD):
            self._has_begun = self._is_open
            self.is_over = not self._is_open
        if self._has_begun:
            rest = self._held[end:].lstrip()
            self.end += len(self._held) - len(rest)
            self._held = rest
            self._skips_space = not is_certain and len(rest) < MOST_HEAD
        return self._has_begun and not self._skips_space

    def _try(self, trial: CallParser, text: str) -> int:
        """Receive the next piece of a text that may begin with a call. Return how much of the text was reasoning, if it
        is certain that all calls are inside it, or 0."""
        self._tried.append(text)
        last = self._last + text
        at = last.find(self._closing)
        if at != -1:
            return self._end_trial(at - len(last))
        self._last = last[max(0, len(last) - len(self._closing) + 1) :]
        if self._has_call:
            return 0
        segments = trial.push(text)
        decisive = next((one for one in segments if isinstance(one, Content | CallBroken | CallEnd)), None)
        self._has_call = isinstance(decisive, CallEnd)
        if decisive is None or isinstance(decisive, CallEnd):
            return 0
        # A long text that turned out to be no call is not searched for other calls.
        return self._end_trial(len(decisive.text) if len(decisive.text) > MOST_TRIED_AGAIN else len(self._tag))

    def _end_trial(self, at: int) -> int:
        """Move the trial's text to the held text, and return the position `at` in it. Up to 0, it counts from the
        end."""
        self._held = "".join(self._tried)
        self._tried = []
        self._last = ""
        self._trial = None
        self._has_call = False
        if at > 0:
            return at
        return len(self._held) + at

    def finish(self, *, is_cut: bool = False) -> tuple[str, str]:
        """Return the rest at the end of the text: reasoning, or content. Cut calls stay reasoning."""
        self._held += "".join(self._tried)
        text = self._take(len(self._held))
        self.is_over = True
        if self._has_call and not is_cut:
            return "", text
        if self._has_begun or self._is_open:
            self.end += len(text)
            return text, ""
        return "", text

    def _take(self, length: int) -> str:
        taken = self._held[:length]
        self._held = self._held[length:]
        return taken
