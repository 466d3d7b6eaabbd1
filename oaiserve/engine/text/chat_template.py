"""The model's chat template, and the preparation of messages for it. No token ids, no HTTP, no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from jinja2 import TemplateSyntaxError

from oaiserve.engine.request import ChatPrompt
from oaiserve.engine.text.jinja_template import JinjaTemplate, Message, TemplateLimit
from oaiserve.engine.text.plain_tools import plain_tool
from oaiserve.engine.text.special_tokens import SpecialTexts, copied
from oaiserve.engine.text.template_abilities import abilities_of, in_turns, one_call_each
from oaiserve.engine.text.template_text import by_template, joined
from oaiserve.errors import InvalidRequest, StartupError, invalid

NO_SPECIAL_TEXTS = SpecialTexts(())
# Names passed along with a template's variables, here or in transformers: no client may set them.
RESERVED = {
    *("self", "messages", "conversation", "conversations", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message"),
}


class ChatTemplate:
    """The model's chat template. Its abilities are tested once, with a few small samples."""

    def __init__(
        self, source: str | Mapping[str, str], special_tokens: Mapping[str, str], response_template: object = None
    ) -> None:
        """Compile a template, or several by name, and test it. The special tokens are variables of it.

        `response_template` is the tokenizer's declaration of the segments of an answer, as transformers defines it.
        Raises StartupError if the template does not compile.
        """
        if isinstance(source, str):
            self._sources = {"default": source}
        else:
            self._sources = dict(source)
        self._special_tokens = {name: by_template(text) for name, text in special_tokens.items()}
        self._compiled = cache(JinjaTemplate)
        self.source = "\n".join(self._sources.values())
        self.response_template: Mapping[str, Any] = response_template if isinstance(response_template, Mapping) else {}
        self._needs_tools = False
        takes_systems = self._try_contents()
        self.sample = self._sample([self._hello])  # a short conversation, or "" if the template rejects it
        self.abilities = replace(abilities_of(self._sample, self._content, self.source), late_systems=takes_systems)

    def _try_contents(self) -> bool:
        """Test which forms of content the template takes. Return whether it takes several system messages."""
        text = "A sample text."
        more = "One more of them."
        # Templates that use tools without checking for them render nothing unless they get a list.
        asks = [{"role": "user", "content": text}]
        self._needs_tools = not self._sample(asks) and text in self._sample(asks, tools=[])
        as_string = self._sample(asks)
        as_parts = self._sample([{"role": "user", "content": [{"type": "text", "text": text}]}])
        takes_strings = text in as_string
        self._needs_parts = not takes_strings and text in as_parts
        # A template that rejects both forms may expect parts with fields of its own, such as languages.
        is_unknown = not as_string and not as_parts
        self._takes_parts = self._needs_parts or is_unknown or (takes_strings and as_parts == as_string)
        systems: list[Message] = [{"role": "system", "content": self._content(content)} for content in (text, more)]
        self._hello: Message = {"role": "user", "content": self._content("Hello.")}
        two_systems = self._sample([*systems, self._hello])
        developer = {**systems[0], "role": "developer"}
        named = re.search(r"""['"]developer['"]""", self.source) is not None
        self._knows_developer = named and text in self._sample([developer, self._hello])
        return text in two_systems and more in two_systems

    def generation_prompt(self, template_kwargs: Mapping[str, Any]) -> str:
        """Return the template's text after the last message, which requests an answer; "" if it is unknown."""
        try:
            bare, asking = (
                self._apply([self._hello], {**template_kwargs, "add_generation_prompt": adds}) for adds in (False, True)
            )
        except InvalidRequest:
            return ""
        if asking.startswith(bare):
            return asking.removeprefix(bare)
        return ""

    def _sample(self, messages: list[Message], **variables: object) -> str:
        try:
            return self._apply(messages, {"add_generation_prompt": True, **variables})
        except InvalidRequest as error:
            if isinstance(cause := error.__cause__, TemplateSyntaxError):
                raise StartupError(
                    f"The chat template is not valid Jinja: {cause.message} (line {cause.lineno})."
                ) from cause
            if isinstance(error.__cause__, TemplateLimit):
                raise StartupError(f"The chat template takes too much for a short text: {error.__cause__}.") from error
            return ""  # The template rejects this sample.

    def render(self, prompt: ChatPrompt, special: SpecialTexts = NO_SPECIAL_TEXTS) -> str:
        """Return the text of the messages of a prompt, with the origins of its characters.

        `special` contains the texts of the tokenizer's control tokens. Raises InvalidRequest if the template rejects
        them.
        """
        if reserved := sorted(RESERVED & prompt.template_kwargs.keys()):
            raise invalid("chat_template_kwargs", f"'{reserved[0]}' cannot be set there")
        for name in ("documents",) if prompt.tools else ("documents", "tools"):
            value = prompt.template_kwargs.get(name)
            if value is not None and not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
                raise invalid("chat_template_kwargs", "must be a list of objects", f"chat_template_kwargs.{name}")
        arguments: dict[str, Any] = {
            "add_generation_prompt": prompt.add_generation_prompt,
            "continue_final_message": prompt.continue_final_message,
            **prompt.template_kwargs,
        }
        messages = self._prepare(prompt.messages)
        if prompt.tools and self.abilities.tools_in_message:
            _put_tools(messages, prompt.tools)
        elif prompt.tools:
            plain = plain_tool if self.abilities.needs_plain_tools else dict
            arguments["tools"] = [self._described(plain(tool)) for tool in prompt.tools]
        try:
            text = special.unmarked(self._apply(messages, arguments, special))
        except InvalidRequest as error:
            if error.param == "messages":
                error.param = prompt.param
            raise
        return joined((text, by_template(prompt.opening)))

    def _apply(
        self, messages: list[Message], arguments: Mapping[str, Any], special: SpecialTexts = NO_SPECIAL_TEXTS
    ) -> str:
        try:
            variables = {**self._special_tokens, **copied(arguments)}
            has_calls = any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)
            if variables.get("tools") is None and (self._needs_tools or (has_calls and "tool_use" in self._sources)):
                variables["tools"] = []
            adds, continues = (variables.pop(one, False) for one in ("add_generation_prompt", "continue_final_message"))
            return self._template(variables.get("tools")).render(
                special.prepared(messages),
                variables,
                add_generation_prompt=adds,
                continue_final_message=continues,
            )
        except Exception as error:  # A template is a program that runs on the client's data, and can raise anything.
            raise InvalidRequest(
                f"The model's chat template rejects these messages: {str(error)[:300]}", param="messages"
            ) from error

    def _template(self, tools: object) -> JinjaTemplate:
        """Return the template for requests with or without tools. Raises ValueError if there is none."""
        if tools is not None and "tool_use" in self._sources:
            name = "tool_use"
        else:
            name = "default"
        if name not in self._sources:
            raise ValueError(f"the model has several ({', '.join(sorted(self._sources))}), but none by default")
        return self._compiled(self._sources[name])

    def _prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        prepared = [self._prepare_message(message) for message in messages]
        if not self.abilities.late_systems and any(message.get("role") == "system" for message in prepared[1:]):
            systems = [message for message in prepared if message.get("role") == "system"]
            text = "\n\n".join(_text(message.get("content") or "") for message in systems)
            others = [message for message in prepared if message.get("role") != "system"]
            prepared = [{"role": "system", "content": self._content(text)}, *others]
        if not self.abilities.system and prepared and prepared[0].get("role") == "system":
            prepared = self._without_system(prepared)
        if self.abilities.needs_user and all(message.get("role") != "user" for message in prepared):
            is_system = bool(prepared) and prepared[0].get("role") == "system"
            prepared.insert(int(is_system), {"role": "user", "content": self._content("")})
        if self.abilities.wants_turns:
            prepared = in_turns(prepared)
        if self.abilities.takes_one_call:
            prepared = one_call_each(prepared)
        if self.abilities.embeds_results:
            return _with_embedded_results(prepared)
        return prepared

    def _without_system(self, messages: list[Message]) -> list[Message]:
        """Return messages with the system message's text, if the first one is such, at the beginning of the user's
        text."""
        system, *others = messages
        text = _text(system.get("content") or "")
        if not others or others[0].get("role") != "user":
            return [{"role": "user", "content": self._content(text)}, *others]
        content = others[0].get("content") or ""
        if isinstance(content, str):
            joined: str | list[Message] = f"{text}\n\n{content}"
        else:
            joined = [{"type": "text", "text": f"{text}\n\n"}, *content]
        return [{**others[0], "content": joined}, *others[1:]]

    def _described(self, tool: Mapping[str, Any]) -> Message:
        """Return the tool. If the template needs descriptions, add empty ones where they are missing."""
        function = tool.get("function")
        if not isinstance(function, Mapping):
            return dict(tool)
        described = dict(function)
        if self.abilities.needs_descriptions and "description" not in function:
            described = {"name": function.get("name"), "description": "", **function}
        if self.abilities.needs_described_parameters and isinstance(schema := function.get("parameters"), Mapping):
            properties = {
                key: {"description": "", **value} if isinstance(value, Mapping) else value
                for key, value in (schema.get("properties") or {}).items()
            }
            described["parameters"] = {**schema, "properties": properties}
        return {**tool, "function": described}

    def _prepare_message(self, message: Mapping[str, Any]) -> Message:
        prepared = dict(message)
        if prepared.get("role") == "developer" and not self._knows_developer:
            prepared["role"] = "system"
        content = prepared.pop("content", None)
        if content is not None:  # A template prints None as "None", but prints nothing for a missing key.
            prepared["content"] = self._content(content)
        if prepared.get("tool_calls") and not self.abilities.joins_arguments:
            prepared["tool_calls"] = [_with_parsed_arguments(call) for call in prepared["tool_calls"]]
        return prepared

    def _content(self, content: str | Sequence[Mapping[str, Any]]) -> str | list[Message]:
        """Return the content as parts if the template expects parts, else as a string, because other templates would
        print a list."""
        if isinstance(content, str):
            if self._needs_parts:
                return [{"type": "text", "text": content}]
            return content
        if any(part.get("type") in ("image", "audio") for part in content):
            return [dict(part) for part in content]  # A template for strings has no way to show them.
        text = _text(content)
        if self._takes_parts:
            return [dict(part) for part in content]
        return text


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            reason = f"a content part of type '{part.get('type')}'. This model takes parts of type 'text' only"
            raise invalid("messages", reason)
    return "\n".join(part["text"] for part in content)


def _put_tools(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    """Add the tools to the system message as JSON text."""
    if not messages or messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": ""})
    text = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    messages[0] = {**messages[0], "tools": text}


def _with_embedded_results(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the results of calls moved into the messages that contain the calls."""
    result: list[Message] = []
    names: dict[object, str] = {}
    embedding: Message = {}  # the last message, once it has results
    for message in messages:
        calls = message.get("tool_calls") or ()
        names |= {call.get("id"): call["function"]["name"] for call in calls}
        last = result[-1] if result else {}
        if message.get("role") != "tool" or not last.get("tool_calls"):
            result.append(message)
            continue
        text = _text(message.get("content") or "")
        response = {"name": names.get(message.get("tool_call_id"), "unknown"), "response": text}
        if result[-1] is not embedding:
            embedding = {**last, "tool_responses": [*last.get("tool_responses", ())]}
            result[-1] = embedding
        embedding["tool_responses"].append(response)
    return result


def _with_parsed_arguments(call: Mapping[str, Any]) -> Message:
    """Return a tool call with its arguments parsed for the template, if their text is a JSON object. The empty string
    stands for no arguments. Raises InvalidRequest if they are nested too deeply."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)
    except RecursionError:
        raise InvalidRequest("The arguments of a tool call are nested too deeply.", param="messages") from None
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
