"""Decodes a client's file in a separate process, since a decoder may crash, or take any amount of time and memory.

The server uses `DecodingProcess`. The process itself calls `limit`, or `decode_stdin`, which sets limits, too.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

REFUSED = 3  # the exit code of a process that says why a file can't be decoded
NICENESS = 5  # A core that the model needs as well is shared with it 1 to 3.


class Refused(Exception):
    """A file can't be decoded. The reason completes a sentence such as 'the sound ...'."""


class DecodingProcess:
    """Decodes one file."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def close(self) -> None:
        """End the process, so that `output` returns or raises. Any thread may call this."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    def output(self, content: bytes, module: str, *arguments: str) -> bytes:
        """Return the decoded file, as the module writes it. This blocks. Raises Refused."""
        command = (sys.executable, "-m", module, *arguments)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # The stacks of more threads would count as memory.
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment) as process:
            self._process = process
            if self._is_closed:
                process.kill()
            output, _ = process.communicate(content)
        if process.returncode == REFUSED:
            raise Refused(output.decode())
        if process.returncode:
            raise Refused("takes too much time or memory to decode")
        return output


def decode_stdin(decode: Callable[[bytes], bytes], max_bytes: int, max_cpu_seconds: int) -> int:
    """Decode the file on stdin to stdout within these limits, or write why it is Refused. Return the exit code."""
    yield_to_the_model()
    limit(resource.RLIMIT_AS, max_bytes)
    limit(resource.RLIMIT_CPU, max_cpu_seconds)
    try:
        decoded = decode(sys.stdin.buffer.read())
    except Refused as refused:
        sys.stdout.buffer.write(str(refused).encode())
        return REFUSED
    sys.stdout.buffer.write(decoded)
    return 0


def yield_to_the_model() -> None:
    """Give this process less of a core than the model's threads."""
    os.nice(NICENESS)


def limit(kind: int, most: int) -> None:
    """Limit a resource of this process, such as RLIMIT_CPU, to `most` or to what its user may have, if that is less."""
    _, allowed = resource.getrlimit(kind)
    wanted = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    with suppress(ValueError):  # macOS takes no limit of the address space
        resource.setrlimit(kind, (wanted, allowed))
