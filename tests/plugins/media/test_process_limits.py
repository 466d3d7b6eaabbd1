"""A process limits itself within what its user may have."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("wanted", "expected"), [(60, 60), (5000, 1000)])
def test_a_limit_stays_within_that_of_the_user(wanted: int, expected: int) -> None:
    code = (
        "import resource\n"
        "from oaiserve.plugins.media.model.process_limits import limit\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))\n"
        f"limit(resource.RLIMIT_CPU, {wanted})\n"
        "print(*resource.getrlimit(resource.RLIMIT_CPU))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(expected), "1000"]
