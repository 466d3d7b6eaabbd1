"""Runs a front process, which the main process of a server starts."""

import sys

from oaiserve.fronts.front_process import run

sys.exit(run([*map(int, sys.argv[1:3])]))
