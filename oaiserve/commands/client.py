"""Sends requests to a server. It uses only the standard library, which is fast to import."""

from __future__ import annotations

import json
import os
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from oaiserve.commands import servers
from oaiserve.errors import StartupError
from oaiserve.hosts import is_loopback

SHORT_SECONDS = 2.0  # time limit for answers that need no computation
KEY_VARIABLE = "OPENAI_API_KEY"
CONTEXT = 32_768  # tokens, if a server does not report it


class NoAnswer(StartupError):
    """The server cannot be reached, or refuses. The message says why, in a sentence."""


class ListedModel(NamedTuple):
    name: str
    context: int  # tokens
    task: str  # generate, or a task that writes no text
    names: tuple[str, ...]  # the served name, and the model's folder or hub id
    device: str  # cpu or cuda; "" if the server doesn't report it


class Client:
    """A client of one server, with the key in OPENAI_API_KEY if there is one."""

    def __init__(self, url: str) -> None:
        """Raises StartupError if `url` is not a valid address."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key = os.environ.get(KEY_VARIABLE) or "none"
        try:
            host = urlsplit(self.url).hostname
        except ValueError as error:
            raise StartupError(f"'{url}' is no address of a server: {error}.") from error
        # Requests to this machine use no proxy, whatever the environment says.
        is_here = is_loopback(host or "")
        self._opener = build_opener(*[ProxyHandler({})] if is_here else [])

    def open(
        self,
        path: str,
        body: object = None,
        *,
        accept: str = "application/json",
        content_type: str = "application/json",
        seconds: float | None = None,
    ) -> HTTPResponse:
        """Send a request, with POST if there is a body, and return the unread answer. Raises NoAnswer."""
        headers = {"authorization": f"Bearer {self.key}", "accept": accept, "content-type": content_type}
        if body is None or isinstance(body, bytes):
            data = body
        else:
            data = json.dumps(body).encode()
        try:
            answer: HTTPResponse = self._opener.open(Request(self.url + path, data, headers), timeout=seconds)
        except HTTPError as error:
            reason = _message(self.read(error))
            if error.code == 401 and os.environ.get(KEY_VARIABLE):
                reason += f" This command sends the key in {KEY_VARIABLE}."
            elif error.code == 401:
                reason += f" {KEY_VARIABLE} is not set: set it to your key."
            raise NoAnswer(f"{self.url} answers {error.code}: {reason}") from error
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswer(f"{self.url} does not answer: {getattr(error, 'reason', error)}.") from error
        return answer

    def read(self, answer: HTTPResponse | HTTPError) -> bytes:
        """Return the rest of an answer. Raises NoAnswer."""
        try:
            return answer.read()
        except (OSError, HTTPException) as error:
            raise NoAnswer(f"{self.url} has not answered to the end: {error}.") from error

    def ask(self, path: str, body: object = None, content_type: str = "application/json") -> Any:
        """Return the decoded JSON of the answer to a GET, or with a body to a POST. Raises NoAnswer."""
        with self.open(path, body, content_type=content_type) as answer:
            content = self.read(answer)
        try:
            return json.loads(content)
        except ValueError as error:
            raise NoAnswer(f"{self.url} answers {path} with what is no JSON: {error}.") from error

    def text(self, path: str, accept: str = "text/plain", *, seconds: float = SHORT_SECONDS) -> str:
        """Return the text at a path that the server answers quickly. Raises NoAnswer."""
        with self.open(path, accept=accept, seconds=seconds) as answer:
            return self.read(answer).decode(errors="replace")

    def models(self) -> list[ListedModel]:
        """Return the models of the server. Raises NoAnswer."""
        try:
            listed = json.loads(self.text("/v1/models", "application/json"))["data"]
            return [
                ListedModel(
                    each["id"],
                    each.get("max_model_len") or CONTEXT,
                    each.get("task", "generate"),
                    (each["id"], str(each.get("root"))),
                    str(each.get("device", "")),
                )
                for each in listed
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise NoAnswer(f"{self.url} is no server of OpenAI's API: it has no list of models.") from error

    def model(self, name: str | None) -> ListedModel:
        """Return the model with this name, or else the first that writes text. Raises NoAnswer, and StartupError if
        there is none."""
        listed = self.models()
        for each in listed:
            if name in each.names or (name is None and each.task == "generate"):
                return each
        wanted = "that writes text" if name is None else f"'{name}'"
        names = ", ".join(each.name for each in listed)
        raise StartupError(f"{self.url} has no model {wanted}: it has {names or 'none'}.")


def client_for(url: str | None) -> Client:
    """Return a client for the server at this address; without one, for the server that started last on this machine."""
    return Client(servers.newest().url if url is None else url)


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace").strip() or "nothing more."
