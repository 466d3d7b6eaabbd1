"""Shows where the time of a start goes: python -m tools.bench.start_up

Starts `oaiserve serve demo` several times, and prints the medians of its parts, from the stamps that the server logs,
and of the time to the first answer over HTTP: a whole chat answer of eight tokens, or a completion where `--model`
names another model, which may have no chat template. Parts overlap where one runs in a thread beside another. With
`--recheck`, the starts are such that remember nothing.
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.markdown import as_markdown
from tools.server_process import CHAT, QUESTION, exit_on_sigterm, running_oaiserve

STAMPS = re.compile(r"Start, in ms since the process began: (.*)")
PART = re.compile(r"(.+) (\d+) to (\d+)")
COMPLETION = {"model": "demo", "prompt": "Hello", "max_tokens": 8}
ANSWER = "HTTP, and the first answer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5, help="starts to take the medians of (default 5)")
    parser.add_argument("--model", default="demo", help="what is served (default demo)")
    parser.add_argument("--recheck", action="store_true", help="compare with transformers' code at each start")
    arguments = parser.parse_args()
    exit_on_sigterm()
    flags = ["--log-level", "debug", *(["--recheck"] if arguments.recheck else [])]
    one_start(
        arguments.model, flags[:2]
    )  # so that the library and the check are there, and the files are in the page cache
    starts = [one_start(arguments.model, flags) for _ in range(arguments.starts)]
    print(table(starts))


def one_start(model: str, flags: list[str]) -> dict[str, tuple[float, float]]:
    """Return the begin and the end of each part, in ms, in the order in which they began."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        path, question = CHAT, QUESTION
        if model != "demo":
            flags = [*flags, "--served-model-name", "demo"]
            path, question = "/v1/completions", COMPLETION
        with running_oaiserve(*flags, model=model, log_file=log, ready_path=path, question=question) as server:
            parts = parts_of(log.read_text())
            listening = max(end for _, end in parts.values())
            return parts | {ANSWER: (listening, 1e3 * server.start_seconds)}


def parts_of(log: str) -> dict[str, tuple[float, float]]:
    """Return the parts that the log of a server names, each with its begin and its end in ms."""
    found = STAMPS.search(log)
    if found is None:
        raise ValueError("the log has no stamps of a start")
    parts = filter(None, map(PART.match, found[1].split(", ")))
    return {part[1]: (float(part[2]), float(part[3])) for part in parts}


def table(starts: list[dict[str, tuple[float, float]]]) -> str:
    rows = [["part", "begins at, ms", "takes, ms"]]
    for name in starts[0]:
        begins = statistics.median(start[name][0] for start in starts)
        takes = [start[name][1] - start[name][0] for start in starts]
        rows.append([name, f"{begins:.0f}", f"{statistics.median(takes):.0f} ({min(takes):.0f} to {max(takes):.0f})"])
    return "\n".join(as_markdown(rows))


if __name__ == "__main__":
    main()
