"""Sends histories of all kinds of messages, blocks and items to three APIs: python -m tests.histories

Each is sent to its route, and to the one that counts its tokens, in this process: with each chat template that
llama.cpp's source has, a prompt is rendered and encoded, and a grammar is compiled, but no model computes.

A 500 is a fault, and so is a 400 for which ALLOWED has no reason, because the same history comes back with each later
turn. A text of the user or of a result that is not in the prompt is one, too, unless a header says what was left out.
Hypothesis makes the first history of an API that has a fault as small as it can, in some minutes, and the API's search
ends. The history is printed in JSON, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from hypothesis import strategies as st

from tests.histories.bodies import Bodies, Body
from tests.histories.sending import ROUTES, Fault, Target, real_templates
from tools.attack import schema


def histories(api: str) -> st.SearchStrategy[Body]:
    return st.randoms(use_true_random=False).map(lambda random: getattr(Bodies(random), api)())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--number", type=int, default=100, help="bodies for each API and template")
    parser.add_argument("--api", action="append", choices=ROUTES, default=[], help="repeatable; default: all")
    parser.add_argument("--template", default="", help="only those whose name has this")
    options = parser.parse_args(argv)
    logging.disable(logging.ERROR)
    seed = int(time.time()) if options.seed is None else options.seed
    num_sent = 0
    apis = options.api or [*ROUTES]
    sound = list(apis)
    for name, template in real_templates().items():
        if options.template.lower() not in name.lower():
            continue
        with closing(Target(name, template)) as target:
            for api in [*sound]:
                try:
                    schema.for_each(partial(target.check, api), histories(api), seed, options.number)
                except Fault as fault:
                    sound.remove(api)
                    print(fault, flush=True)
            num_sent += target.num_sent
    print(
        f"Seed {seed}: {num_sent:,} requests, faults in {len(apis) - len(sound)} of {len(apis)} APIs", file=sys.stderr
    )
    return 0 if sound == apis else 1


if __name__ == "__main__":
    sys.exit(main())
