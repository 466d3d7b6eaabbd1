"""Loads torch's largest library while the start imports other code. Stdlib only.

It is a quarter of the time that `import torch` takes, and the only part that needs no lock of Python.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Thread


def load_library() -> Thread | None:
    """Load the library in a thread, which is returned.

    Until it ends, no other thread can load native code, and thus import a module that has some. None: torch is imported
    already, or it is for CUDA, whose libraries it loads in an order of its own.
    """
    if "torch" in sys.modules:
        return None
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    libraries = Path(spec.origin).parent / "lib"
    path = libraries / "libtorch_cpu.so"
    if not path.exists() or (libraries / "libtorch_cuda.so").exists():
        return None
    # ctypes.CDLL would hold Python's lock. If the library can't be loaded, `import torch` raises the error.
    load = ctypes.CDLL(None).dlopen
    load.argtypes = (ctypes.c_char_p, ctypes.c_int)
    load.restype = ctypes.c_void_p
    thread = Thread(target=load, args=(os.fsencode(path), os.RTLD_NOW), name="torch", daemon=True)
    thread.start()
    return thread
