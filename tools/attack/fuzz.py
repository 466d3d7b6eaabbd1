"""Gives spoiled files and bodies to the code that reads them, for 60 s each: python -m tools.attack.fuzz

A reader may take an input or refuse it with its own errors. Any other exception is a fault, and so is a crash of its
process, and more than 10 s of CPU time or 3 GiB. The targets named start-FORMAT start the server on a whole model with
a spoiled file: the start must end with one sentence and exit code 2, or the model must answer.

Hypothesis draws the inputs from --seed, and makes one with a fault as small as it can. With --fixed, the number of
inputs is fixed, so a run finds the same faults on every machine.

An input with a fault is written to build/fuzz. Put it into tools/attack/kept with its folder, where each run begins and
a test looks, and mend the reader. The exit code is 1 after a fault.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.attack import schema
from tools.attack.targets import TARGETS, Read, Target

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).parent / "kept"
SECONDS = 60.0
CPU_SECONDS = 10.0  # for one input
MEMORY_BYTES = 3 << 30  # address space, in addition to what the process has before its first input
NUM_DRAWN = 200  # inputs between two looks at the clock


def kept(name: str) -> list[Path]:
    return sorted((KEPT / name).glob("*"))


def check(target: Target, read: Read, content: bytes) -> None:
    """Give an input to a reader. Raises whatever is no refusal, and ends the process if it takes too long."""
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        read(content)
    except target.refusals:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def fuzz(name: str, seed: int, seconds: float | None, into: Path) -> None:
    """Run a target in this process, which ends here: with status 1 after a fault, or by a signal. The last input stays
    in the folder then, after an error the smallest one. Without a time, the number of inputs is fixed."""
    target = TARGETS[name]
    numbers = count()
    try:
        warnings.simplefilter("ignore")  # Decoders warn of each fault in a file, also on the standard error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        last = into / f"{seed}"
        with TemporaryDirectory() as folder:
            read = target.read(Path(folder))
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))

            def give(content: bytes) -> None:
                next(numbers)
                last.write_bytes(content)
                check(target, read, content)

            for content in [*(path.read_bytes() for path in kept(name)), *target.sound()]:
                give(content)
            until = time.monotonic() + (seconds or 0.0)
            for turn in count():
                of_turn = min(target.num_fixed, NUM_DRAWN) if seconds is not None else target.num_fixed
                schema.for_each(give, target.inputs, from_seed=1000 * seed + turn, number=of_turn)
                if time.monotonic() > until:
                    break
            last.unlink()
    except BaseException:
        print(f"{name}: a fault after {next(numbers)} inputs\n{traceback.format_exc()}", flush=True)
        os._exit(1)
    print(f"{name}: {next(numbers):,} inputs", flush=True)
    os._exit(0)


def run_all(names: Sequence[str], seed: int, seconds: float | None, at_once: int, into: Path) -> list[str]:
    """Run targets in processes of their own. Return those with faults, and how they ended."""
    running: dict[int, str] = {}
    faults = []
    waiting = [*names]
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            (into / name).mkdir(parents=True, exist_ok=True)
            if (pid := os.fork()) == 0:
                fuzz(name, seed, seconds, into / name)
            running[pid] = name
        pid, status = os.wait()
        name = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else "raised an error"
            faults.append(f"{name}: {how} on {into / name / str(seed)}")
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--seconds", type=float, default=SECONDS, help=f"for each target (default: {SECONDS:g})")
    extent.add_argument("--fixed", action="store_true", help="a fixed number of inputs for each target instead")
    parser.add_argument("--only", action="append", choices=TARGETS, help="a target; repeatable")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--into", type=Path, default=ROOT / "build/fuzz", help="a folder for inputs with a fault")
    arguments = parser.parse_args(argv)
    names = arguments.only or [*TARGETS]
    seconds = None if arguments.fixed else arguments.seconds
    faults = run_all(names, arguments.seed, seconds, arguments.at_once, arguments.into)
    print(*faults, sep="\n", end="\n" if faults else "")
    print(f"{len(faults)} of {len(names)} targets of seed {arguments.seed} have a fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
