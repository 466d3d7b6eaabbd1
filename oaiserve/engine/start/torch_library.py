"""Loads torch's largest library while the start imports other code. Stdlib only.

Loading it takes a quarter of the time of `import torch`, and is the only part that doesn't hold the GIL.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Thread


def load_library() -> Thread | None:
    """Load the library in a thread, and return that thread.

    Until it ends, no other thread can load native code, and so none can import a module that contains any. Return None
    if torch is imported already, or if it is built for CUDA, whose libraries it loads in an order of its own.
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
    # ctypes.CDLL would hold the GIL. If the library can't be loaded, `import torch` raises the error.
    load = ctypes.CDLL(None).dlopen
    load.argtypes = (ctypes.c_char_p, ctypes.c_int)
    load.restype = ctypes.c_void_p
    thread = Thread(target=load, args=(os.fsencode(path), os.RTLD_NOW), name="torch", daemon=True)
    thread.start()
    return thread
