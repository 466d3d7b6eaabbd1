"""The command `oaiserve chat`."""

from __future__ import annotations

import sys
from contextlib import ExitStack

from oaiserve.plugins.shared.own_server import server_with
from oaiserve.plugins.terminal.conversation import Chat


def command(
    model: str | None = None, /, *, url: str | None = None, system: str = "", temperature: float | None = None
) -> int:
    """Chat with a model in the terminal. Text from a pipe is one question, and its answer is plain text.

    If one of your servers has the model, it answers. Otherwise a server is started, and stopped when you leave.

    Parameters
    ----------
    model
        The model. Default: that of your server that started last on this machine, or else demo.
    url
        The server's address.
    system
        Text that the model gets before everything else.
    temperature
        How freely the model chooses its words: 0 always takes the likeliest. Default: the server's.
    """
    with ExitStack() as stack:
        client, name = server_with(stack, model, url)
        chat = Chat(client, name, system, temperature)
        if not sys.stdin.isatty():
            for _, text in chat.answer(sys.stdin.read()):
                print(text, end="", flush=True)
            print()
            return 0
        from oaiserve.plugins.terminal.talk import talk

        talk(chat)
    return 0
