"""Checks one case after the other for `side_by_side`: python -m tools.gpu.worker DESCRIPTOR

It gets a check with its target, and then names of cases, through a connection with this file descriptor, and answers
each with its result.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tools.gpu.section import noted_kernels
from tools.gpu.workload import OFF

LAST_LINES = 6


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.WARNING)
    name, target = connection.recv()
    find(name)
    kernels = noted_kernels()
    connection.send("ready")
    is_alive = True
    while is_alive:
        try:
            case = connection.recv()
        except EOFError:
            break
        kernels.update(dict.fromkeys(kernels, 0))
        found = answer(name, target, case)
        is_alive = is_usable()
        connection.send({**found, "kernels": dict(kernels), "off": OFF, "is_alive": is_alive})
    os._exit(0)  # The end of a process whose device has failed would crash.


def find(check: str) -> Callable[[Any, str], dict[str, Any]]:
    """Return the function whose module and name these are."""
    module, _, name = check.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def answer(check: str, target: Any, case: str) -> dict[str, Any]:
    """Return the result of the check, or one with the error that it raises."""
    try:
        return find(check)(target, case)
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        last = traceback.format_exc().splitlines()[-LAST_LINES:]
        return {"equal": False, "problem": f"{type(error).__name__}: {error}", "log": last}


def is_usable() -> bool:
    """Free the memory of a case. Return whether the device still works: after an illegal access, it never does."""
    import torch

    gc.collect()
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception:
        return False
    return True


if __name__ == "__main__":
    main()
