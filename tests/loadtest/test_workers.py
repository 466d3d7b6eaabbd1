"""Processes that send requests leave Ctrl-C to the process that has started them."""

import re
import signal
from pathlib import Path

from loadtest.workers import Workers


def test_processes_block_ctrl_c_before_they_import_anything() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with Workers(1) as workers:
        status = Path(f"/proc/{workers._processes[0].pid}/status").read_text()
    (blocked,) = re.findall(r"^SigBlk:\s*([0-9a-f]+)$", status, re.MULTILINE)
    assert int(blocked, 16) & 1 << signal.SIGINT - 1
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
