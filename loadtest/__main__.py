"""Run the command line of the load test: `python -m loadtest`."""

import sys

from loadtest.cli import main

if __name__ == "__main__":  # worker processes import this module again
    sys.exit(main())
