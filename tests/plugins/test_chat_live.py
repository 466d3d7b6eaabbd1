"""`oaiserve chat` as a process, with a server of its own."""

import os
import select
from pathlib import Path

import pytest

from oaiserve.commands.servers import running
from tests.commands.terminal import END, terminal
from tests.waiting import LIMIT_SECONDS


@pytest.mark.plugin("terminal")
def test_a_chat_has_a_server_while_it_runs_and_shows_where_time_went(small_model: Path) -> None:
    with terminal("chat", str(small_model)) as screen:
        url = screen.shows(r"(?s)at\s+(http://127\.0\.0\.1:\d+)\.\s+Ctrl-C .*\n\n> $")[1]
        (server,) = (each for each in running() if each.url == url)
        server_process = os.pidfd_open(server.pid)
        screen.types("Hello\r")
        screen.shows(r"(?s)Hello\n.*\n\n> $")
        screen.types("/time\r")
        screen.shows(r"(?s)[\d.]+ m?s, \d+ tokens read .*prefill +[\d.]+ [µm]?s .*decode .*> $")
        screen.types(END)
    assert screen.process.returncode == 0
    has_ended, _, _ = select.select([server_process], [], [], LIMIT_SECONDS)
    assert has_ended
    os.close(server_process)
