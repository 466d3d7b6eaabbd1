"""A program in a terminal of its own."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from tests.waiting import LIMIT_SECONDS

_UNSEEN = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])|\r| +(?=\r?\n)")
END = "\x04"  # Ctrl-D


class Terminal:
    """The keyboard and the screen of a program."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.master = master
        self._new = ""

    def types(self, text: str) -> None:
        self._new = ""
        os.write(self.master, text.encode())

    def interrupts(self, pattern: str) -> None:
        """Type Ctrl-C until the pattern is shown: one that comes while readline looks for signals waits for a key."""
        self.types(interrupt := "\x03")
        for _ in range(int(LIMIT_SECONDS)):
            if select.select([self.master], [], [], 1.0)[0]:
                break
            os.write(self.master, interrupt.encode())
        self.shows(pattern)

    def shows(self, pattern: str) -> re.Match[str]:
        """Read until the pattern matches what was shown since something was typed. Return the match."""
        while (match := re.search(pattern, _UNSEEN.sub("", self._new))) is None:
            has_more, _, _ = select.select([self.master], [], [], LIMIT_SECONDS)
            try:
                piece = os.read(self.master, 65536) if has_more else b""
            except OSError:  # the program has ended
                piece = b""
            assert piece, f"{pattern!r} is not shown: {self._new[-800:]!r}"
            self._new += piece.decode(errors="replace")
        return match


@contextmanager
def terminal(*arguments: str, **env: str) -> Iterator[Terminal]:
    """Run `oaiserve` with the arguments, and kill it where it outlasts the `with` block."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    # The first program makes the terminal the one that Ctrl-C comes from. It is not ignored, as it is by what a shell
    # has begun in the background.
    take = (
        "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "-c", take, sys.executable, "-m", "oaiserve", *arguments]
    environment = {**os.environ, "TERM": "xterm", **env}
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=environment
    ) as process:
        os.close(slave)
        try:
            yield Terminal(master, process)
            process.wait(LIMIT_SECONDS)
        finally:
            process.kill()
            os.close(master)
