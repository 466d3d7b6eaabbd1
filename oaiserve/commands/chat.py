"""The command `oaiserve chat`."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from oaiserve.commands import servers
from oaiserve.commands.client import Client, NoAnswer
from oaiserve.commands.conversation import Chat
from oaiserve.commands.own_server import own_server


def command(model: str | None = None, /, *, url: str | None = None, system: str = "", temperature: float = 0.7) -> int:
    """Chat with a model in the terminal. What comes from a pipe is one question, and its answer is plain text.

    Your server that has the model answers. If none has, one is started, and stopped when you leave.

    Parameters
    ----------
    model
        The model. Default: that of your server that started last on this machine, or else demo.
    url
        The server's address.
    system
        What the model is told before all else.
    temperature
        How freely the model chooses its words: 0 takes the likeliest always.
    """
    with ExitStack() as stack:
        client, name = _server(stack, model, url)
        chat = Chat(client, name, system, temperature)
        if not sys.stdin.isatty():
            for _, text in chat.answer(sys.stdin.read()):
                print(text, end="", flush=True)
            print()
            return 0
        from oaiserve.commands.terminal import talk

        talk(chat)
    return 0


def _server(stack: ExitStack, model: str | None, url: str | None) -> tuple[Client, str]:
    """Return a client of a server that has the model, and the model's name there. If need be, one is started."""
    if url is None:
        for server in servers.running():
            client = Client(server.url)
            try:
                found = client.models()
            except NoAnswer:
                continue
            for each in found:
                if (model is None and each.task == "generate") or (model is not None and model in each.names):
                    return client, each.name
        return (client := stack.enter_context(own_server(model or "demo"))), client.model(None).name
    client = Client(url)
    return client, client.model(model).name
