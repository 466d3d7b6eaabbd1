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
    given = parser.parse_args()
    from tests.world.hour import live

    if given.seed is not None:
        found = live(given.seed, given.seconds, keeps_trace=True)
        print(*found.lines, f"trace {found.trace}, {len(found.wrong)} wrong", *found.wrong, sep="\n")
        return bool(found.wrong)
    began = time.monotonic()
    counts = Counter[str]()
    failed = 0
    seeds = range(given.first, given.first + given.seeds)
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for found in pool.imap_unordered(partial(live, seconds=given.seconds), seeds):
            counts.update(found.counts, seeds=1, hours=found.hours)
            if found.wrong:
                failed += 1
                told = f"seed {found.seed} (trace {found.trace}): {len(found.wrong)} wrong"
                print(told, *found.wrong[:3], sep="\n  ")
    seconds = time.monotonic() - began
    print(f"{counts.pop('seeds')} seeds in {seconds:.0f} s, {given.seeds / seconds:.2f} a second, {failed} failed")
    hours = counts.pop("hours")
    print(f"{hours:.0f} hours of simulated life: " + ", ".join(f"{n} {of}" for of, n in counts.most_common()))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
