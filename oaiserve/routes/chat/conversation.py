"""`Conversation`: the tools and the reasoning of a request with messages, for its parameters, prompt and answer.

Chat and responses share it. It knows neither the body of a route nor the shape of its answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from oaiserve.engine.request import ChatPrompt, Grammar, Reasoning, SamplingParams
from oaiserve.routes.chat.answer_grammar import answer_grammar
from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.chat.template_gaps import text_of
from oaiserve.routes.chat.tools import Tools
from oaiserve.routes.dialects.calls import CallParser
from oaiserve.routes.dialects.channels import ChannelParser
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.dialects.raw_call import RawCall
from oaiserve.routes.dialects.reasoning import ThinkingParser
from oaiserve.routes.intake.invalid import invalid

_NO_TOOLS = Tools((), {}, "none", only_one=False)


class Conversation:
    def __init__(
        self,
        dialect: Dialect,
        tools: Tools | None,
        template_kwargs: Mapping[str, Any],
        *,
        effort: str | None = None,
        thinking_budget: int | None = None,
        is_constrained: bool,
        asks_for_answer: bool = True,
        shows_tags: bool = False,
    ) -> None:
        """`thinking_budget` is in tokens. Without it, the `effort` may set a budget. `is_constrained` says that the
        answer after the reasoning has a constraint or stop strings, which apply only from there. Without
        `asks_for_answer`, the last message is continued. `shows_tags` keeps the tags of reasoning in the text. Raises
        InvalidRequest if calls are forced that this server cannot read."""
        if tools is not None and tools.is_forced and dialect.calls is None:
            raise invalid(
                "tool_choice", "this server does not read calls (--tool-call-parser none), so none can be forced"
            )
        if tools is not None and dialect.calls is not None and not dialect.calls.is_forcible:
            reason = "the response template of this model has no grammar for calls (--tool-call-parser chooses another)"
            if tools.is_forced:
                raise invalid("tool_choice", f"{reason}, so none can be forced")
            if tools.strict and tools.choice != "none":
                raise invalid("tools", f"{reason}, so none can be strict")
        # The prompt of a turn without calls begins like the others in its conversation, so the prefix cache has it.
        self.shown_tools: Sequence[Mapping[str, Any]] = () if tools is None else tools.shown
        if tools is not None and tools.choice == "none":
            tools = None
        self.tools = tools
        self._dialect = dialect
        by_effort: Mapping[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        self._budget = thinking_budget
        if dialect.reasoning is not None:
            by_effort, budget = dialect.reasoning.by_effort(effort)
            if thinking_budget is None:
                self._budget = budget
        self._template_kwargs = template_kwargs = {**by_effort, **template_kwargs}
        self._mode = None
        if dialect.reasoning is not None:
            must_end = is_constrained or self.is_forced
            self._mode = dialect.reasoning.of_request(
                template_kwargs, has_generation_prompt=asks_for_answer, must_end=must_end
            )
        self.reads_reasoning = self._mode is not None and not shows_tags
        self._shows_tags = shows_tags
        self.reads_calls = tools is not None and dialect.calls is not None

    @property
    def is_forced(self) -> bool:
        """Whether the model can write nothing but calls after its reasoning, so that any text is part of a cut call."""
        return self.tools is not None and self.tools.is_forced

    def own_params(
        self, max_tokens: int | None, num_logprobs: int | None, grammar: Grammar | None, *, text_lengths: bool = False
    ) -> SamplingParams:
        """Return the parameters of the route, with those of tools and reasoning. Raises InvalidRequest for a client's
        `grammar` that cannot be combined with tools."""
        grammar, self.tools = answer_grammar(self._dialect, self.tools, grammar)
        reasoning = None
        if (mode := self._mode) is not None:
            reasoning = Reasoning(mode.tags[1], "" if mode.is_open else mode.tags[0].lstrip(), self._budget)
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=num_logprobs,
            grammar=grammar,
            reasoning=reasoning,
            visible_special_ids=self._dialect.visible_ids(calls=self.tools is not None, reasoning=self.reads_reasoning),
            text_lengths=self.reads_reasoning or text_lengths,
        )

    def completed(self, prompt: ChatPrompt) -> ChatPrompt:
        """Return a prompt with the variables of its template, and with the text that begins the reasoning."""
        opening = "" if self._mode is None else self._mode.prompt_opening
        return replace(prompt, template_kwargs=self._template_kwargs, opening=opening)

    def continuing(self, params: SamplingParams, prompt: ChatPrompt) -> SamplingParams:
        """Return the parameters for a prompt whose last message may be continued. Forced calls never continue it."""
        grammar = params.grammar
        if grammar is None or self.is_forced or not prompt.continue_final_message:
            return params
        return replace(params, grammar=replace(grammar, continued=text_of(prompt.messages[-1]["content"])))

    def reader(self) -> AnswerReader:
        tools = self.tools or _NO_TOOLS
        family = self._dialect.calls
        is_raw = tools.raw is not None
        calls: CallParser | None = None
        thinking = None
        if family is not None and issubclass(family.parser, ChannelParser):
            if self.reads_reasoning or self.reads_calls:
                in_reasoning = self._mode is not None and self._mode.is_open
                calls = family.parser(
                    tools.schemas,
                    only_one=tools.only_one,
                    in_reasoning=in_reasoning,
                    is_raw=is_raw,
                    strict=tools.strict,
                )
        else:
            if family is not None and (self.reads_calls or (family.parser.hidden_tags and not self._shows_tags)):
                parser = RawCall if is_raw else family.parser
                calls = parser(tools.schemas, only_one=tools.only_one, strict=tools.strict)
            if self.reads_reasoning and self._mode is not None:
                in_thoughts = None
                if family is not None and family.is_forcible and self.reads_calls:
                    in_thoughts = partial(family.parser, tools.schemas, strict=tools.strict)
                thinking = ThinkingParser(self._mode, in_thoughts)
        return AnswerReader(thinking, calls, client_names=tools.client_names)
