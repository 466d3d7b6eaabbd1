"""`python -m oaiserve` runs the same command line as `oaiserve`."""

import sys

from oaiserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
