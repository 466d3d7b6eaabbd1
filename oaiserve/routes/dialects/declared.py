"""`TemplateCalls`: reads answers by the `response_template` that a checkpoint declares, with transformers' parser.

It recognises a call only at its end, so a stream gets each call as a whole. There is no grammar for these calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar

from oaiserve.engine.text.response_template import CALLS, ResponseForm
from oaiserve.engine.text.transformers_parser import forget_read, unread
from oaiserve.routes.dialects.calls import MOST_HEAD, CallParser
from oaiserve.routes.dialects.family import CallFamily
from oaiserve.routes.dialects.hermes import HERMES
from oaiserve.routes.dialects.segments import Arguments, CallBegin, CallEnd, Content, Reasoning, Segment

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_SLICE = 1024  # characters that are tried at once


class TemplateCalls(CallParser):
    """Around tags, the parser is fed one character at a time, so that the text of a call is known if transformers
    refuses it. Then a new parser continues."""

    opening_tags = ()
    template_form: ClassVar[ResponseForm]

    def __init__(self, tools: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
        super().__init__(tools, **options)
        self._parser = self.template_form.parser(tools)
        self._field = ""  # the open field that has tags
        self._unsettled: list[str] = []  # text that the parser has read and that is in no segment yet
        self._length = 0  # length of this text in characters
        self._blanks = ""  # white space that belongs to the calls around it, if another one follows

    def push(self, text: str) -> list[Segment]:
        segments: list[Segment] = []
        for start in range(0, len(text), _SLICE):
            self._read(text[start : start + _SLICE], segments)
        return segments

    def finish(self, *, is_cut: bool) -> list[Segment]:
        segments: list[Segment] = []
        if self._is_over():
            return segments
        if is_cut:
            self._give_text("".join(self._unsettled), segments, is_reasoning=self._field in REASONING_FIELDS)
        else:
            self._take_events(self._feed(None), "", segments)
        if self._blanks and not self.num_called:
            segments.append(Content(self._blanks))
        return segments

    def _is_over(self) -> bool:
        return self._only_one and self.num_called > 0

    def _read(self, piece: str, segments: list[Segment]) -> None:
        if self._is_over():
            return
        before = copy(self._parser)
        events = self._feed(piece)
        if len(piece) > 1 and (events is None or any(map(self._is_boundary, events))):
            self._parser = before
            for character in piece:
                self._read(character, segments)
            return
        self._unsettled.append(piece)
        self._length += len(piece)
        self._take_events(events, unread(self._parser), segments)

    def _feed(self, text: str | None) -> list[dict[str, Any]] | None:
        """Return the parser's events for a text, or for the end if it is None. Return None if the parser refuses it."""
        try:
            return self._parser.finalize()[1] if text is None else self._parser.feed(text)
        except Exception:  # A checkpoint's template runs on the model's text, and can raise anything.
            return None

    def _is_tagged(self, field: str) -> bool:
        return bool(field != self.template_form.template.implicit)

    def _is_boundary(self, event: Mapping[str, Any]) -> bool:
        return event["type"] != "region_chunk" and self._is_tagged(event["field"])

    def _is_text(self, field: str) -> bool:
        return not field or field in self.template_form.texts

    def _take_events(self, events: list[dict[str, Any]] | None, held: str, segments: list[Segment]) -> None:
        """Turn the events of a text into segments. The parser has `held` back the end of the text."""
        if events is None:
            self._refuse(segments)
            return
        for number, event in enumerate(events):
            field = event["field"]
            if event["type"] == "region_chunk" and self._is_text(field):
                self._settle(len(event["text"]))
                self._give_text(event["text"], segments, is_reasoning=field in REASONING_FIELDS)
            elif event["type"] == "region_open" and self._is_tagged(field):
                self._field = field
            elif event["type"] == "region_close" and self._is_tagged(field):
                later = [each["text"] for each in events[number + 1 :] if each["type"] == "region_chunk"]
                text = self._settle(self._length - len(held) - sum(map(len, later)))
                self._field = ""
                if not self._is_text(field) and not self._give_calls(field, event["value"], segments):
                    self._give_broken(text, segments)
        is_endless = len(held) >= MOST_HEAD
        if not self._is_text(self._field):
            if is_endless or self._length > self.template_form.most_of_call:
                self._refuse(segments)
        elif is_endless:  # A tag that doesn't end is text.
            self._give_text(held, segments, is_reasoning=self._field in REASONING_FIELDS)
            self._start_again()
        else:
            self._settle(self._length - len(held))
            forget_read(self._parser)

    def _settle(self, length: int) -> str:
        """Mark the beginning of the unsettled text as settled, and return it."""
        text = "".join(self._unsettled)
        self._unsettled = [text[length:]]
        self._length = len(text) - length
        return text[:length]

    def _give_calls(self, field: str, value: Any, segments: list[Segment]) -> bool:
        """Add the calls in the value of a field to the segments. Return False if they aren't calls of the request's
        tools."""
        calls = value if isinstance(value, list) else [value]
        texts = []
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if field != CALLS or not isinstance(function, dict):
                return False
            name = function.get("name")
            arguments = function.get("arguments")
            if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
                return False
            try:
                text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
                text.encode()  # fails for lone surrogates
            except (ValueError, RecursionError):
                return False
            texts.append((name, text))
        for name, text in texts[:1] if self._only_one else texts:
            segments += [CallBegin(name), Arguments(text), CallEnd()]
            self.num_called += 1
        self._is_blank = True
        self._blanks = ""
        return bool(texts)

    def _refuse(self, segments: list[Segment]) -> None:
        self._give_broken("".join(self._unsettled), segments)
        self._start_again()

    def _give_broken(self, text: str, segments: list[Segment]) -> None:
        self.num_unparsed += 1
        self._give_text(text, segments)

    def _give_text(self, text: str, segments: list[Segment], *, is_reasoning: bool = False) -> None:
        if is_reasoning:
            segments.append(Reasoning(text))
        elif self._is_blank and (not text or text.isspace()):
            self._blanks += text
        else:
            segments.append(Content(self._blanks + text))
            self._blanks = ""
            self._is_blank = False

    def _start_again(self) -> None:
        self._parser = self.template_form.parser(self._tools)
        self._field = ""
        self._unsettled = []
        self._length = 0

    def _head(self, segments: list[Segment]) -> bool:
        raise NotImplementedError


def family_of_template(form: ResponseForm) -> CallFamily:
    class Calls(TemplateCalls):
        template_form = form
        tags = form.tags

    # If a template has no place for calls, they are written in Hermes's form in prompts.
    return replace(HERMES, name="response_template", parser=Calls, signs=(), is_forcible=False)
