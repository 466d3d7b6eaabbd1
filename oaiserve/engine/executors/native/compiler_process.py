"""Runs a compiler that ends with the process that started it, however that process ends.

A compiler starts processes of its own, which would run on for minutes if only the compiler received a signal. So this
file is a program, too: it runs the compiler in a process group, and ends the group when its standard input ends. Only
the process that waits for the compiler holds the other end of that pipe. Signals to the server's group, such as Ctrl-C,
reach neither. Stdlib only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread


@contextmanager
def compiler_process(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a compiler. Its messages arrive in the pipe `stderr`. If it still runs at the end of the block, end it."""
    arguments = [sys.executable, "-I", "-S", __file__, *command]  # isolated from installed packages
    read_end, write_end = os.pipe()
    with (
        os.fdopen(read_end),
        os.fdopen(write_end, "w") as ours,
        subprocess.Popen(
            arguments,
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # A signal to our group would end it before it ends the compiler.
        ) as process,
    ):
        try:
            yield process
        finally:
            ours.close()


def main(command: Sequence[str]) -> int:
    """Run the compiler until it or standard input ends, and return its exit code."""
    compiler = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    input_ended = Event()

    def end_with_input() -> None:
        sys.stdin.read()
        input_ended.set()
        with suppress(ProcessLookupError):
            os.killpg(compiler.pid, signal.SIGTERM)  # The compiler then removes its temporary files.

    Thread(target=end_with_input, daemon=True).start()
    code = compiler.wait()
    if input_ended.is_set():
        with suppress(ProcessLookupError):
            os.killpg(compiler.pid, signal.SIGKILL)  # A process that was starting may have missed the first signal.
    return code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]) & 0xFF)  # Exit at once, even while a thread is reading.
