"""Starts a server for a command that needs one, and stops it when the command ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread

from rich.console import Console
from rich.text import Text

from oaiserve.commands import servers
from oaiserve.commands.client import Client, NoAnswer
from oaiserve.errors import StartupError

POLL_SECONDS = 0.05
_PREFIX = re.compile(r"\S+ \S+ [A-Z]+ +\S+  ")  # start of a log line


def server_with(stack: ExitStack, model: str | None, url: str | None) -> tuple[Client, str]:
    """Return a client of a server that has the model, and the model's name there. A server is started if there is
    none."""
    if url is None:
        for server in servers.running():
            client = Client(server.url)
            try:
                models = client.models()
            except NoAnswer:
                continue
            for each in models:
                if (model is None and each.task == "generate") or (model is not None and model in each.names):
                    return client, each.name
        return (client := stack.enter_context(own_server(model or "demo"))), client.model(None).name
    client = Client(url)
    return client, client.model(model).name


@contextmanager
def own_server(model: str) -> Iterator[Client]:
    """Run `oaiserve serve MODEL` on a free port during the `with` block. Raises StartupError if it fails."""
    # A signal that ends this process must also stop the server.
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    words = [sys.executable, "-m", "oaiserve", "serve", model, "--host", "127.0.0.1", "--port", "0"]
    words += ["--log-format", "console"]
    # The server gets its own session, since Ctrl-C stops the answer and not the server.
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        said: deque[str] = deque([f"Starting oaiserve serve {model} ..."], maxlen=1)
        listener = Thread(target=_listen, args=(process, said), daemon=True)
        listener.start()
        try:
            with Console(stderr=True).status("") as status:
                while (client := _ready(process)) is None:
                    if process.poll() is not None:
                        listener.join()
                        raise StartupError(said[-1].removeprefix("oaiserve: "))
                    status.update(Text(_PREFIX.sub("", said[-1]), overflow="ellipsis", no_wrap=True))
                    time.sleep(POLL_SECONDS)
            yield client
        finally:
            process.terminate()
            listener.join()  # Read the server's output to its end.
            for number, handler in before.items():
                signal.signal(number, handler)


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _ready(process: subprocess.Popen[bytes]) -> Client | None:
    for server in servers.running():
        if server.pid == process.pid:
            client = Client(server.url)
            try:
                client.text("/health")
            except NoAnswer:  # The server does not listen yet.
                return None
            return client
    return None


def _listen(process: subprocess.Popen[bytes], said: deque[str]) -> None:
    """Keep the last line of the server's output, so that the server never waits for a reader."""
    assert process.stderr is not None
    for line in process.stderr:
        said.extend(filter(None, [line.decode(errors="replace").strip()]))
