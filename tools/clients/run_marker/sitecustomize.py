"""Python imports this when it starts, if this folder is on PYTHONPATH. It adds a line to the file in HELLO_RUNS for
each run of a hello.py that exists."""

import os
import sys
from pathlib import Path

program = Path("hello.py") if sys.argv[0] == "-m" and "hello" in sys.orig_argv else Path(sys.argv[0])
if program.name == "hello.py" and program.exists():
    with open(os.environ["HELLO_RUNS"], "a") as file:
        file.write(f"{sys.orig_argv}\n")
