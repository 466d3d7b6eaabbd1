"""Measures how long starts take until the first answer, in turns with llama.cpp's: python -m tools.bench.starts FILES

Each round starts three servers on a GGUF file: oaiserve with an empty start cache, oaiserve again, and llama.cpp's. The
native code is compiled before, and the file is in the system's memory. The table has medians and ranges of seconds, and
what oaiserve's median starts did when, in milliseconds.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.servers import CACHE, ServerSpec, llama_cpp, oaiserve
from tools.bench.table import spread
from tools.markdown import add_publishing, as_markdown, publish, results_of
from tools.server_process import exit_on_sigterm

FIRST = ("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "temperature": 0})
PARTS = "Start, in ms since the process began: "
PART = re.compile(r"([^,]+) (\d+ to \d+)(?:, |$)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="GGUF files")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    add_publishing(parser, "starts")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, lambda asked: {"runs": measured(asked.files, asked.repeats)})
    publish(arguments, "starts", results, report(results))


def measured(files: Sequence[Path], repeats: int) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    for path in files:
        ours = oaiserve(path, "--log-level", "debug", "--log-format", "console")
        with ours.running(*FIRST):  # compiles, and reads the file
            pass
        for _ in range(repeats):
            forget(ours)
            servers = {"first start": ours, "later start": ours, "llama.cpp": llama_cpp(path, slots=4)}
            runs += [{"model": path.name, "start": start, **started(server)} for start, server in servers.items()]
    return runs


def started(server: ServerSpec) -> dict[str, Any]:
    """Return the seconds of a start until its first answer, and what it says that it did."""
    with server.running(*FIRST) as process:
        log = process.log_file.read_text(errors="replace")
        return {"seconds": process.start_seconds, "parts": log.partition(PARTS)[2].partition("\n")[0]}


def forget(server: ServerSpec) -> None:
    """Remove what earlier starts have stored, except for the compiled code."""
    for path in (CACHE / "oaiserve").iterdir():
        if path.is_dir() and path not in server.compile_caches:
            shutil.rmtree(path)


def report(results: dict[str, Any]) -> str:
    runs = results["runs"]
    starts = list(dict.fromkeys(run["start"] for run in runs))
    rows = [["file", *(f"{start}, s" for start in starts)]]
    parts: dict[str, dict[str, str]] = {}  # when each part of each median start ran
    for model in dict.fromkeys(run["model"] for run in runs):
        row = [model]
        for start in starts:
            of_start = [run for run in runs if (run["model"], run["start"]) == (model, start)]
            of_start.sort(key=lambda run: run["seconds"])
            row.append(spread([run["seconds"] for run in of_start]))
            if shown := of_start[len(of_start) // 2]["parts"]:
                parts[f"{model}, {start}"] = dict(PART.findall(shown))
        rows.append(row)
    names = dict.fromkeys(name for each in parts.values() for name in each)
    waterfalls = [["part, ms", *parts], *([name, *(each.get(name, "") for each in parts.values())] for name in names)]
    tables = [*as_markdown(rows), "", *as_markdown(waterfalls)]
    return "\n".join([textwrap.fill(f"{results['machine']} {results['created']}.", 120), "", *tables])


if __name__ == "__main__":
    main()
