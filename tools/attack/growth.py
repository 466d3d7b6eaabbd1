"""Finds what takes more than linear time in its input: python -m tools.attack.growth

Measures functions that read what clients and models write, and the routes with bodies of all forms, with n and 8n
characters or bytes of what costs them most. The app runs in this process: prompts are rendered and encoded, and
grammars compiled, but no model computes. With --functions, routes are left out. CI runs that.

What fails is measured twice more, because the machine may be busy. Prints what fails; then the exit code is 1.
`python -m tools.attack --only growing` sends the same forms to a real server beside a neighbour.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from tools.attack.forms import Form, forms
from tools.attack.functions import dialects, files, grammars, routes, streams
from tools.attack.functions.linear import Case, is_linear

# n: within the limits of most fields, where all of their bytes are looked at, and far beyond these.
NUM_BYTES = (3_500, 2**17)


class Functions(Protocol):
    """A module with cases."""

    def cases(self) -> Iterable[Case]: ...


FUNCTIONS: tuple[Functions, ...] = (grammars, dialects, routes, streams, files)


def cases_of_routes() -> Iterator[Case]:
    """Yield each form of a body at two sizes."""
    from tools.attack.in_process import JSON, App, encoding_engine  # with torch, which --help does not need

    app = App(encoding_engine())

    def sending(form: Form) -> Callable[[int], None]:
        def send(num_bytes: int) -> None:
            status = app.post(form.path, form.body(num_bytes), JSON | form.headers).status_code
            assert status < 500, f"answered {status}"

        return send

    for form in forms():
        for num_bytes in NUM_BYTES:
            yield Case(f"{form.path}, {form.name}, {num_bytes:,} bytes", sending(form), num_bytes)


def fault(case: Case) -> str | None:
    """Return the fault of a case, or None."""
    try:
        return None if is_linear(case.run, case.size) else "takes more than linear time"
    except AssertionError as error:
        return str(error)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="TEXT", help="cases with this in their name; repeatable")
    parser.add_argument("--functions", action="store_true", help="leave out routes")
    arguments = parser.parse_args(argv)
    logging.disable(logging.ERROR)
    cases = chain.from_iterable(module.cases() for module in FUNCTIONS)
    if not arguments.functions:
        cases = chain(cases, cases_of_routes())
    num_cases = num_faults = 0
    for case in cases:
        if not any(part in case.name for part in arguments.only or [""]):
            continue
        num_cases += 1
        if found := fault(case):
            num_faults += 1
            print(f"{case.name}: {found}", flush=True)
    print(f"{num_faults} of {num_cases} cases fail")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
