"""Servers are found while they run, and asked for what they do."""

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from oaiserve import cli
from oaiserve.commands.client import Client, NoAnswer, client_for
from oaiserve.commands.servers import announced, running
from oaiserve.errors import StartupError
from oaiserve.storage import private
from tests.agents.scripted import ScriptedServer
from tests.plain_http import Handler, running_http

URL = "http://127.0.0.1:1"


def ps(capsys: pytest.CaptureFixture[str], problem: str = "") -> str:
    assert cli.main(["ps"]) == 0
    shown, errors = capsys.readouterr()
    assert problem in errors
    assert errors.count("\n") == bool(problem)
    return shown


def test_a_server_is_found_while_it_runs(cache: Path) -> None:
    assert running() == []
    with announced(URL, "first"), announced(URL, "second"):
        assert [server.model for server in running()] == ["second", "first"]
        assert client_for(None).url == URL
    assert running() == []
    assert list((cache / "servers").iterdir()) == []
    with pytest.raises(StartupError, match="No server is running here"):
        client_for(None)


def test_a_server_that_was_killed_is_forgotten(cache: Path) -> None:
    code = f"""
import os
from oaiserve.commands.servers import announced
with announced("{URL}", "b"):
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert len(list((cache / "servers").iterdir())) == 1
    assert running() == []
    assert list((cache / "servers").iterdir()) == []


def test_servers_of_other_machines_are_not_listed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with announced(URL, "a"):
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        assert running() == []
    assert list((cache / "servers").iterdir()) == []


def test_a_list_that_others_could_have_written_is_not_believed(cache: Path) -> None:
    with announced(URL, "a"):
        (cache / "servers").chmod(0o777)
        with pytest.raises(StartupError, match="cannot be trusted: other users can write to"):
            running()


def test_a_server_runs_where_no_file_can_be_written(cache: Path) -> None:
    cache.touch()
    with announced(URL, "a"):
        pass


def test_ps_shows_what_servers_do(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No server is running here" in ps(capsys)
    with announced(server.url, "demo"), announced(URL, "gone"):
        shown = ps(capsys, f"oaiserve ps: {URL} does not answer: ")
    assert re.search(rf"^{server.url} +demo +\d+-.* 2 +1 +1\.36 GB +\d+$", shown, re.MULTILINE)
    assert re.search(rf"^{URL} +gone .* no answer ", shown, re.MULTILINE)


def test_output_that_nobody_reads_ends_a_command_without_a_traceback(cache: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-u", "-m", "oaiserve", "ps"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_file_without_permission_is_named_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def verified(folder: Path) -> Path:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))  # The tests may run as root.

    monkeypatch.setattr(private, "verified", verified)
    assert cli.main(["ps"]) == 2
    assert re.fullmatch(r"oaiserve ps: '.*/servers' cannot be used: Permission denied.\n", capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["doctor"], ["pull"], ["serve"], ["serve", "demo", "--lora"]])
def test_name_that_is_too_long_for_a_file_is_refused_in_a_sentence(
    arguments: list[str], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a" * 300
    assert cli.main([*arguments, f"one={name}" if "--lora" in arguments else name]) == 2
    assert re.fullmatch(rf"oaiserve[ a-z]*: '{name}' cannot be used: File name too long.\n", capsys.readouterr().err)


def test_local_servers_are_asked_without_a_proxy(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", URL)
    assert Client(f"{server.url}/v1/").models()[0].name == "demo"


def test_why_there_is_no_answer_is_one_sentence(server: ScriptedServer) -> None:
    with pytest.raises(NoAnswer, match=r"^http://127.0.0.1:1 does not answer: .*Connection refused\.$"):
        Client(URL).models()
    with pytest.raises(StartupError, match=r"^'http://\[::1' is no address of a server: Invalid IPv6 URL\.$"):
        Client("http://[::1")
    with pytest.raises(NoAnswer, match=r"answers 404: .*'nothing'"):
        Client(server.url).text("/debug/requests/nothing")


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, b'{"data": [', r"has not answered to the end: IncompleteRead\(10 bytes read, 89 more expected\)"),
        (500, b'{"error": ', r"has not answered to the end: IncompleteRead\(10 bytes read, 89 more expected\)"),
        (200, b"<html>".ljust(99), "answers /v1/batches with what is no JSON: Expecting value"),
    ],
)
def test_an_answer_that_is_cut_off_or_no_json_is_one_sentence(status: int, body: bytes, reason: str) -> None:
    class Cut(Handler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", "99")
            self.end_headers()
            self.wfile.write(body)

    with running_http(Cut) as url, pytest.raises(NoAnswer, match=reason):
        Client(url).ask("/v1/batches")


def test_spoiled_files_in_the_list_are_left_out(cache: Path) -> None:
    with announced(URL, "a"):
        folder = cache / "servers"
        (folder / "folder.json").mkdir()
        (folder / "lost.json").symlink_to("nothing")
        with ExitStack() as stack:
            for number, content in enumerate(("[" * 100_000, "[]", '{"url": 7}')):
                file = stack.enter_context((folder / f"{number}.json").open("w"))
                file.write(content)
                file.flush()
                fcntl.flock(file, fcntl.LOCK_EX)  # as that of a server that runs
            assert [server.model for server in running()] == ["a"]
