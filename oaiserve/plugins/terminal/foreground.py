"""Runs another program in the foreground of the terminal, and passes on the signals that end this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

GRACE_SECONDS = 10.0  # time from a signal until the program is killed
POLL_SECONDS = 0.5  # between checks of the program: another thread may have received its SIGCHLD
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Leave the alternate screen, show the cursor, and turn off reports of the mouse, of pastes and of keys.
_PLAIN = "\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[<u\x1b[0m"


def run(words: Sequence[str], environment: Mapping[str, str], *, reads_input: bool = True) -> int:
    """Run a program to its end, and return its exit code: 128 plus the signal's number if a signal ended it.

    It gets SIGTERM, SIGHUP and SIGINT that other processes send to this one. The terminal sends it Ctrl-C directly.
    Without `reads_input`, its standard input is empty.
    """
    awaited = {signal.SIGCHLD, *_PASSED_ON}
    # Signals are blocked and awaited, because a handler cannot distinguish Ctrl-C from another process's SIGINT.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        with (
            _terminal_restored(),
            subprocess.Popen(
                words,
                stdin=None if reads_input else subprocess.DEVNULL,
                env=environment,
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
            ) as process,
        ):
            kill_at = float("inf")
            while process.poll() is None:
                info = signal.sigtimedwait(awaited, POLL_SECONDS)
                if info is not None and info.si_signo in _PASSED_ON and not _is_ctrl_c(info):
                    process.send_signal(info.si_signo)
                    kill_at = min(kill_at, time.monotonic() + GRACE_SECONDS)
                if time.monotonic() >= kill_at:
                    process.kill()
            code = process.returncode
            if code < 0 and sys.stdout.isatty():
                print(_PLAIN, end="", flush=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if code >= 0:
        return code
    return 128 - code


def _is_ctrl_c(info: signal.struct_siginfo) -> bool:
    return info.si_signo == signal.SIGINT and info.si_code > 0  # sent by the kernel, not by another process


@contextmanager
def _terminal_restored() -> Iterator[None]:
    is_terminal = sys.stdin.isatty()
    before = termios.tcgetattr(0) if is_terminal else None
    try:
        yield
    finally:
        if before is not None and os.tcgetpgrp(0) == os.getpgrp():
            termios.tcsetattr(0, termios.TCSADRAIN, before)
