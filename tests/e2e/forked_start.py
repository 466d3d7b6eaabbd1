"""Runs checked_start.py in a fork of the fork server whose address is the first argument."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests import forking  # noqa: E402

if __name__ == "__main__":
    words = [sys.executable, str(ROOT / "tests/e2e/checked_start.py"), *sys.argv[2:]]
    connection = forking.connect(Path(sys.argv[1]), words, os.environ, Path.cwd(), (0, 1, 2), has_group=False)
    sys.exit(forking.ForkedProcess(words, connection).wait())
