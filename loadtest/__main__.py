"""Runs the command line of the load test: `python -m loadtest`, or a command that runs it under its own name."""

import sys
from pathlib import Path

from loadtest.cli import main

if __name__ == "__main__":  # worker processes import this module again
    program = Path(sys.argv[0]).name
    sys.exit(main(name="loadtest" if program == Path(__file__).name else program))
