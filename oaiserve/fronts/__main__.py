"""Runs a front process, which the main process of a server starts."""

import sys

from oaiserve.fronts.front_process import run

if __name__ == "__main__":
    sys.exit(run([*map(int, sys.argv[1:3])]))
