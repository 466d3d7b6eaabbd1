"""Compiles real JSON Schemas, and counts refused schemas, and instances that are accepted wrongly or can't be written.

    python -m tools.schema_suite FOLDER [--sample 1200 --seed 7] [--not-strict] [--list]

FOLDER has files as in `maskbench/data` of guidance-ai/jsonschemabench, or in `tests` of JSON-Schema-Test-Suite. The
exit code is 1 if an invalid instance is accepted. With --not-strict, as with `"strict": false`, it may be accepted if a
keyword of its schema is left out and named: then it is counted as "named".
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oaiserve.engine.grammars.grammar import GrammarViolation
from oaiserve.errors import InvalidRequest
from oaiserve.routes.chat.constraints import not_obeyed
from tests.engine.grammars.keywords import Vocabulary

Case = tuple[str, Any, list[dict[str, Any]]]  # a name, a schema, and its instances


def cases(path: Path) -> Iterator[Case]:
    """Yield the schemas of a file of either suite."""
    content = json.loads(path.read_text())
    for group in content if isinstance(content, list) else [content]:
        name = path.name if group is content else f"{path.stem}: {group['description']}"
        yield name, group["schema"], group["tests"]


def outcomes(
    vocabulary: Vocabulary, schema: Any, tests: list[dict[str, Any]], *, is_lenient: bool
) -> Iterator[tuple[str, str]]:
    """Yield each fault: its kind, and the reason of the refusal or the instance."""
    try:
        compiled = vocabulary.compile(schema, is_lenient=is_lenient)
    except InvalidRequest as error:
        yield "refused", error.message
        return
    left_out = is_lenient and (not_obeyed(json.dumps(schema)) or compiled.left_out)
    wrong = "named" if left_out else "wrong"
    for test in tests:
        try:
            is_accepted = vocabulary.accepts(compiled, test["data"])
        except GrammarViolation:
            is_accepted = False
        if is_accepted != test["valid"]:
            yield wrong if is_accepted else "unwritable", json.dumps(test["data"], ensure_ascii=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sample", type=int, help="number of files, drawn by --seed (default: all)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--not-strict", action="store_true", help="leave out what can't be obeyed, and keep objects open"
    )
    parser.add_argument("--list", action="store_true", help="print each fault")
    args = parser.parse_args()
    paths = sorted(args.folder.glob("**/*.json"))
    if args.sample is not None:
        random.Random(args.seed).shuffle(paths)
        paths = paths[: args.sample]
    vocabulary = Vocabulary()
    counts: Counter[str] = Counter()
    for path in paths:
        for name, schema, tests in cases(path):
            counts["schemas"] += 1
            counts["instances"] += len(tests)
            for kind, about in outcomes(vocabulary, schema, tests, is_lenient=args.not_strict):
                counts[kind] += 1
                if args.list:
                    print(f"{kind} {name}: {about[:300]}")
    names = ("schemas", "instances", "refused", "wrong", "named", "unwritable")
    print(", ".join(f"{name} {counts[name]}" for name in names))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
