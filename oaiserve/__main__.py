"""The program `oaiserve`, which `python -m oaiserve` runs, too: the command line, with a quiet Ctrl-C from the start.

It imports as little as it can before Ctrl-C is handled, because the command line takes a second to import.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Run the command line and return its exit code: 130 after Ctrl-C, as shells report it."""
    has_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if has_handler:  # It isn't ignored, as by `nohup`. The kernel drops an unhandled signal to a container's process 1.
        signal.signal(signal.SIGINT, _leave if os.getpid() == 1 else signal.SIG_DFL)
    from oaiserve import cli

    try:
        if has_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    except KeyboardInterrupt:
        return INTERRUPTED


def _leave(number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
