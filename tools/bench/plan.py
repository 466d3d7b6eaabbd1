"""Compares what `oaiserve plan` predicts with measurements: python -m tools.bench.plan FOLDER

A server records a training load, from which the costs are. Then the load test sends six other loads to servers that
record them, too. Each of them is replayed by the plan at its own arrivals, and its times are compared with what the
load test has measured, on the cores that it shares with the server. With --find-max, the highest rate of a load is
searched for both ways. What is measured stays in the folder, so that it can be compared with another plan: what is
there is not measured again. Prints markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oaiserve.facts import slos
from oaiserve.plan.command import BUSIEST_PROMPTS, figures, milliseconds
from oaiserve.plan.recorded import Cost, RecordedLoad, busiest, read
from oaiserve.plan.replay import LoadReplay
from oaiserve.plan.search import calibrated, highest_rate
from tools.markdown import as_markdown, write_json
from tools.server_process import exit_on_sigterm, running_oaiserve

SLO = "ttft:400ms,tpot:40ms"
WARM_UP = 4  # first requests of a recording, which are not in the report
COLUMNS = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")


@dataclass(frozen=True, slots=True)
class Load:
    """A load by the flags of the load test, without the number of its requests."""

    title: str
    rate: float
    flags: str

    @property
    def name(self) -> str:
        return self.title.replace(" ", "-").replace(",", "")

    def command(self, seconds: float) -> list[str]:
        number = max(8, round(self.rate * seconds))
        return [*self.flags.split(), "--rate", str(self.rate), "--num-requests", str(number)]


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
    parser.add_argument("--drafts", default="off", choices=["off", "lookup"], help="of the server (default off)")
    parser.add_argument("--find-max", action="store_true", help="compare the highest rate of a load instead")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    exit_on_sigterm()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(arguments.folder, arguments.seconds, arguments.drafts)
    trained = calibrated(bench.recorded("training", TRAINING)).cost
    assert trained is not None
    print(f"While it was trained, what else ran there added {trained.disturbance_share:.0%} to the time of steps.")
    if arguments.find_max:
        rates = bench.highest(trained)
        print(
            f"Highest rate within {SLO}: {rates['plan']:.3g}/s by the plan; by find-max, {rates['holds']:.3g}/s holds "
            f"and {rates['fails']:.3g}/s does not."
        )
        write_json(arguments.json, {"highest_rate": rates})
        return
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
    drafts: str

    def recorded(self, name: str, loads: tuple[Load, ...]) -> RecordedLoad:
        """Send loads to a server that records them, one after the other, and return the recording."""
        path, report = self._recording(name), self._report(name)
        if not report.exists():
            flags = ("--warmup", str(WARM_UP), "--json")
            with running_oaiserve("--record-requests", str(path), "--drafts", self.drafts) as server:
                for load in loads:
                    send("run", server.url, *load.command(self.seconds), *flags, str(unfinished(report)))
            unfinished(report).rename(report)
        return read(path)

    def compared(self, load: Load, cost: Cost) -> dict[str, Any]:
        """Return the times of a load (seconds) as they were measured, and as the plan expects them."""
        recorded = self.recorded(load.name, (load,))
        replayed = LoadReplay(recorded.server, cost).run([(one.seconds, 0, one) for one in recorded.arrivals])
        predicted = figures(replace(replayed, served=replayed.served[WARM_UP:]), recorded.rate, {})
        metrics = json.loads(self._report(load.name).read_text())["points"][0]["runs"][0]["metrics"]["distributions"]
        measured, expected = {}, {}
        for column in COLUMNS:
            metric, quantile = column.lower().split()
            measured[column] = metrics[metric][quantile]
            expected[column] = predicted[f"{metric}_seconds"][quantile]
        return {"load": load.title, "measured": measured, "predicted": expected, "busy_share": replayed.busy_share}

    def highest(self, cost: Cost) -> dict[str, float]:
        """Return the highest rate of the first load by the plan, and by the load test one that holds and one that
        fails."""
        load = LOADS[0]
        recorded = busiest(self.recorded(load.name, (load,)), BUSIEST_PROMPTS)
        best = highest_rate(recorded, cost, recorded.server, slos.parse(SLO), 0.95)
        report = self._report("search")
        if not report.exists():
            shape = load.flags.removeprefix(POISSON).split()  # find-max is poisson anyway
            flags = ("--slo", SLO, "--first-rate", str(2 * load.rate), "--json", str(unfinished(report)))
            with running_oaiserve("--drafts", self.drafts) as server:
                send("find-max", server.url, *shape, *flags)
            unfinished(report).rename(report)
        found = json.loads(report.read_text())
        return {
            "plan": 0.0 if best is None else best.rate,
            "holds": found["holds"] or 0.0,
            "fails": found["fails"] or math.inf,
        }

    def _recording(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def _report(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def unfinished(report: Path) -> Path:
    return report.with_suffix(".unfinished")


def send(command: str, url: str, *flags: str) -> None:
    program = [sys.executable, "-m", "loadtest", command, "--url", url, "--no-stop-on-eos", "--no-calibrate"]
    subprocess.run([*program, *flags], check=True, stdout=sys.stderr)


def row(one: dict[str, Any]) -> tuple[str, ...]:
    cells = [
        f"{milliseconds(one['predicted'][name])} / {milliseconds(one['measured'][name])} ms "
        f"({one['predicted'][name] / one['measured'][name]:.2f})"
        for name in COLUMNS
    ]
    return (one["load"], *cells)


if __name__ == "__main__":
    main()
