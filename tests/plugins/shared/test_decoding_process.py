"""A decoding process limits itself within what its user may have, and ends when it is closed."""

import signal
import subprocess
import sys
from typing import Any

import pytest

from oaiserve.plugins.shared.decoding_process import DecodingProcess, Refused


@pytest.mark.parametrize(("wanted", "expected"), [(60, 60), (5000, 1000)])
def test_a_limit_stays_within_that_of_the_user(wanted: int, expected: int) -> None:
    code = (
        "import resource\n"
        "from oaiserve.plugins.shared.decoding_process import limit\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))\n"
        f"limit(resource.RLIMIT_CPU, {wanted})\n"
        "print(*resource.getrlimit(resource.RLIMIT_CPU))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(expected), "1000"]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_process_that_is_closed_ends_at_once(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    process = DecodingProcess()
    children: list[subprocess.Popen[bytes]] = []
    communicate = subprocess.Popen.communicate

    def close_then_communicate(child: subprocess.Popen[bytes], content: bytes) -> Any:
        children.append(child)
        process.close()
        return communicate(child, content)

    if is_late:
        monkeypatch.setattr(subprocess.Popen, "communicate", close_then_communicate)
    else:
        process.close()
    with pytest.raises(Refused, match="takes too much time or memory"):
        process.output(b"abc", "base64")
    assert [child.returncode for child in children] == [-signal.SIGKILL] * is_late
