"""Imports `vllm bench serve` once and forks for each run. Runs in vLLM's environment, for `client.py`.

Reads a line of JSON per run (argv, log, limit_seconds) and answers with one (exit_code, cpu_seconds).
"""

import json
import os
import resource
import signal
import sys
import traceback

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser


def run(job):
    """Do one run in the fork, and exit. The alarm's signal ends a run that takes too long."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    exit_code = 1
    try:
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        signal.alarm(job["limit_seconds"])
        main(parser.parse_args(job["argv"]))
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    before = cpu_seconds()
    child = os.fork()
    if not child:
        run(json.loads(line))
    _, status = os.waitpid(child, 0)
    answer = {"exit_code": os.waitstatus_to_exitcode(status), "cpu_seconds": cpu_seconds() - before}
    print(json.dumps(answer), flush=True)
