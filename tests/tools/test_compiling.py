"""The processes that compile kernels."""

import subprocess
import sys
from pathlib import Path

POOL = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from tools.gpu.compiling import end_with_parent

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"), initializer=end_with_parent)
    print(pool.submit(abs, -1).result(), flush=True)
    time.sleep(600)
"""


def test_processes_of_a_pool_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        process.kill()
        # The pool's processes have inherited this pipe, so its end is theirs.
        assert process.communicate()[0] == ""
