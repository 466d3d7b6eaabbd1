"""Compares what `oaiserve plan` predicts with measurements: python -m tools.bench.plan FOLDER

A server records a training load, from which the costs are. Then the load test sends six other loads to servers that
record them, too. Each of them is replayed by the plan at its own arrivals, and its times are compared with what the
load test has measured, on the cores that it shares with the server. What is measured stays in the folder, so that it
can be compared with another plan: what is there is not measured again. Prints markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from oaiserve.plan.command import figures
from oaiserve.plan.recorded import Cost, RecordedLoad, read
from oaiserve.plan.replay import LoadReplay
from oaiserve.plan.search import calibrated
from tools.markdown import as_markdown, write_json
from tools.server_process import exit_on_sigterm, running_oaiserve

WARM_UP = 4  # first requests of a recording, which are not in the report
COLUMNS = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")


class Load(NamedTuple):
    """A load by the flags of the load test, without the number of its requests."""

    title: str
    rate: float
    flags: str

    @property
    def name(self) -> str:
        return self.title.replace(" ", "-").replace(",", "")


POISSON = "--arrival poisson"
TRAINING = (
    Load("training", 2.0, f"{POISSON} --input-len uniform:16:700 --max-new-tokens uniform:8:96"),
    Load("training", 6.0, f"{POISSON} --input-len uniform:16:200 --max-new-tokens uniform:8:64"),
)
LOADS = (
    Load("chat, 3 a second", 3.0, f"{POISSON} --input-len 128 --max-new-tokens 64"),
    Load("chat, 7 a second", 7.0, f"{POISSON} --input-len 128 --max-new-tokens 64"),
    Load("long prompts", 0.8, f"{POISSON} --input-len uniform:512:1800 --max-new-tokens 32"),
    Load("bursts", 12.0, "--arrival onoff --on-seconds 2 --off-seconds 4 --input-len 128 --max-new-tokens 32"),
    Load("a shared prefix", 5.0, f"{POISSON} --prefix-len 512 --input-len 64 --max-new-tokens 64"),
    Load("mixed lengths", 4.0, f"{POISSON} --input-len lognormal:200:0.8 --max-new-tokens lognormal:64:0.6"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="has what is measured; what is there is not measured again")
    parser.add_argument("--seconds", type=float, default=25, help="time of each load (default 25)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    exit_on_sigterm()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.folder, arguments.seconds)
    trained = calibrated(bench.recorded("training", TRAINING)).cost
    assert trained is not None
    print(f"While it was trained, what else ran there added {trained.disturbance_share:.0%} to the time of steps.")
    found = [bench.compared(load, trained) for load in LOADS]
    print("\n".join(as_markdown([("load", *COLUMNS), *(row(one) for one in found)])))
    for name in COLUMNS:
        ratios = [one["predicted"][name] / one["measured"][name] for one in found]
        print(f"{name}: median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")
    write_json(arguments.json, {"loads": found})


@dataclass(frozen=True, slots=True)
class Bench:
    """Measures loads once each, into a folder, and compares them with what the plan says."""

    folder: Path
    seconds: float

    def recorded(self, name: str, loads: tuple[Load, ...]) -> RecordedLoad:
        """Send loads to a server that records them, one after the other, and return the recording."""
        path, report = self.folder / f"{name}.jsonl", self.folder / f"{name}.json"
        if not report.exists():
            unfinished = report.with_suffix(".unfinished")
            flags = ("--no-stop-on-eos", "--no-calibrate", "--warmup", str(WARM_UP), "--json", str(unfinished))
            with running_oaiserve("--record-requests", str(path), "--drafts", "off") as server:
                for load in loads:
                    number = max(8, round(load.rate * self.seconds))
                    rate = ("--rate", str(load.rate), "--num-requests", str(number))
                    program = (sys.executable, "-m", "loadtest", "run", "--url", server.url)
                    subprocess.run([*program, *load.flags.split(), *rate, *flags], check=True, stdout=sys.stderr)
            unfinished.rename(report)
        return read(path)

    def compared(self, load: Load, cost: Cost) -> dict[str, Any]:
        """Return the times of a load (seconds) as they were measured, and as the plan expects them."""
        recorded = self.recorded(load.name, (load,))
        replayed = LoadReplay(recorded.server, cost).run([(one.seconds, 0, one) for one in recorded.arrivals])
        predicted = figures(replace(replayed, served=replayed.served[WARM_UP:]), recorded.rate, {})
        report = json.loads((self.folder / f"{load.name}.json").read_text())
        metrics = report["points"][0]["runs"][0]["metrics"]["distributions"]
        measured, expected = {}, {}
        for column in COLUMNS:
            metric, quantile = column.lower().split()
            measured[column] = metrics[metric][quantile]
            expected[column] = predicted[f"{metric}_seconds"][quantile]
        return {"load": load.title, "measured": measured, "predicted": expected, "busy_share": replayed.busy_share}


def row(one: dict[str, Any]) -> tuple[str, ...]:
    cells = [
        f"{1e3 * one['predicted'][name]:.3g} / {1e3 * one['measured'][name]:.3g} ms "
        f"({one['predicted'][name] / one['measured'][name]:.2f})"
        for name in COLUMNS
    ]
    return (one["load"], *cells)


if __name__ == "__main__":
    main()
