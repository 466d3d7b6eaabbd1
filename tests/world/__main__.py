"""python -m tests.world --seeds 1000: hours of the world from 1,000 seeds, on all cores. It fails where one breaks.

--seed 17 lives one hour and prints its trace.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import partial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seconds", type=float, default=3600, help="of simulated life for each seed")
    parser.add_argument("--seed", type=int, help="one seed, with its trace")
    arguments = parser.parse_args()
    from tests.world.hour import live

    if arguments.seed is not None:
        result = live(arguments.seed, arguments.seconds, keeps_trace=True)
        print(*result.lines, f"trace {result.trace}, {len(result.wrong)} wrong", *result.wrong, sep="\n")
        return bool(result.wrong)
    began = time.monotonic()
    counts = Counter[str]()
    failed = 0
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for result in pool.imap_unordered(partial(live, seconds=arguments.seconds), seeds):
            counts.update(result.counts, seeds=1, hours=result.hours)
            if result.wrong:
                failed += 1
                summary = f"seed {result.seed} (trace {result.trace}): {len(result.wrong)} wrong"
                print(summary, *result.wrong[:3], sep="\n  ")
    seconds = time.monotonic() - began
    print(f"{counts.pop('seeds')} seeds in {seconds:.0f} s, {arguments.seeds / seconds:.2f} a second, {failed} failed")
    hours = counts.pop("hours")
    print(f"{hours:.0f} hours of simulated life: " + ", ".join(f"{n} {of}" for of, n in counts.most_common()))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
