"""A conversation with a model over HTTP, and the account of its last answer's time, without a terminal."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any

from oaiserve.commands.client import Client, NoAnswer
from oaiserve.facts.times import duration

BAR = 30  # columns
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model must not move the cursor, or set the clipboard


class Chat:
    def __init__(self, client: Client, model: str, system: str, temperature: float | None) -> None:
        self.model = model
        self.url = client.url
        self.system = system
        self._temperature = temperature
        self._client = client
        self._messages: list[dict[str, str]] = []
        self._last_id: str | None = None  # the last request's

    def forget(self) -> None:
        self._messages.clear()

    def answer(self, question: str) -> Iterator[tuple[str, str]]:
        """Yield the pieces of the answer, each as `reasoning` or as `content`. The conversation includes the pieces
        that were yielded.

        Raises NoAnswer, and then the conversation does not include the question.
        """
        turns = [*self._messages, {"role": "user", "content": question}]
        if self.system:
            instructions = [{"role": "system", "content": self.system}]
        else:
            instructions = []
        body: dict[str, Any] = {"model": self.model, "messages": [*instructions, *turns], "stream": True}
        if self._temperature is not None:  # otherwise the server's default applies
            body["temperature"] = self._temperature
        said = ""
        with self._client.open("/v1/chat/completions", body, accept="text/event-stream") as stream:
            self._last_id = stream.headers.get("x-request-id")
            try:
                for delta in self._deltas(stream):
                    for kind, field in (("reasoning", "reasoning_content"), ("content", "content")):
                        if text := _CONTROL.sub("", delta.get(field) or ""):
                            said += text if kind == "content" else ""
                            yield kind, text
            finally:  # even if the reader stops the answer
                if said:
                    self._messages = [*turns, {"role": "assistant", "content": said}]

    def _deltas(self, stream: HTTPResponse) -> Iterator[dict[str, Any]]:
        try:
            for line in stream:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise NoAnswer(str(event["error"].get("message", event["error"])))
                yield from (choice.get("delta", {}) for choice in event.get("choices", ()))
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswer(f"{self.url} has ended the answer: {error}.") from error

    def times(self) -> str:
        """Return the phases of the last answer's time and their causes. Raises NoAnswer."""
        if self._last_id is None:
            return "Nothing has been answered yet."
        account = json.loads(self._account())
        duration_ns = max(1, account["duration_ns"])
        tokens = f"{account['prompt_tokens']} tokens read ({account['cached_tokens']} of them cached)"
        lines = [f"{duration(duration_ns)}, {tokens}, {account['completion_tokens']} written", ""]
        for phase in account["phases"]:
            begin = min(phase["start_ns"] * BAR // duration_ns, BAR - 1)
            end = -(-(phase["start_ns"] + phase["duration_ns"]) * BAR // duration_ns)
            bar = " " * begin + "█" * max(1, end - begin)
            lines.append(f"{_words(phase['name']):<14}{duration(phase['duration_ns']):>12}  {bar}")
            lines += [
                f"  {_words(name):<20}{duration(spent):>12}" for name, spent in phase["causes_ns"].items() if spent
            ]
        return "\n".join([*lines, *([""] if account["explanation"] else []), *account["explanation"]])

    def _account(self) -> str:
        """Return the account of the last request. A server needs a moment to notice that an answer was stopped."""
        path = f"/debug/requests/{self._last_id}"
        for pause_seconds in (0.1, 0.3, 1.0):
            try:
                return self._client.text(path, "application/json")
            except NoAnswer:
                time.sleep(pause_seconds)
        return self._client.text(path, "application/json")


def _words(name: str) -> str:
    return name.replace("_", " ")
