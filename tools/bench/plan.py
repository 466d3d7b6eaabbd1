"""Compares what `oaiserve plan` predicts with measurements, on loads that it does not know: python -m tools.bench.plan

A server records a training load, from which the cost of steps is. Then the load test sends six other loads to a server
that records them, too. Each of them is replayed by the plan at its own arrivals, and its times are compared with the
measured ones. With --find-max, the highest rate of one load is searched for both ways. Prints markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oaiserve.plan.command import figures, parse_limits
from oaiserve.plan.recorded import RecordedLoad, read
from oaiserve.plan.replay import Replay
from oaiserve.plan.search import highest_rate
from tools.markdown import as_markdown, write_json
from tools.server_process import exit_on_sigterm, running_oaiserve

SLO = "ttft:300ms,tpot:30ms"
COLUMNS = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")


@dataclass(frozen=True, slots=True)
class Load:
    """A load by the flags of the load test, without the number of its requests."""

    title: str
    rate: float
    flags: str

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
    parser.add_argument("--seconds", type=float, default=25, help="time of each load (default 25)")
    parser.add_argument("--find-max", action="store_true", help="also compare the highest rate of the last load")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    exit_on_sigterm()
    with TemporaryDirectory() as folder:
        trained = record(Path(folder) / "training.jsonl", TRAINING, arguments.seconds)
        found = [compared(Path(folder) / "load.jsonl", load, trained, arguments.seconds) for load in LOADS]
        rates = highest(Path(folder) / "rate.jsonl", trained, arguments.seconds) if arguments.find_max else None
    print("\n".join(as_markdown([("load", *COLUMNS), *(row(one) for one in found)])))
    for name in COLUMNS:
        ratios = [one["predicted"][name] / one["measured"][name] for one in found]
        print(f"{name}: median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")
    if rates is not None:
        print(f"Highest rate within {SLO}: {rates['plan']:.3g} by the plan, {rates['find_max']:.3g} by find-max.")
    write_json(arguments.json, {"loads": found, "highest_rate": rates})


def record(path: Path, loads: tuple[Load, ...], seconds: float) -> RecordedLoad:
    """Send loads to a server that records them, and return the recording."""
    with running_oaiserve("--record-requests", str(path), "--drafts", "off") as server:
        for load in loads:
            bench("run", server.url, *load.command(seconds))
    return read(path)


def compared(path: Path, load: Load, trained: RecordedLoad, seconds: float) -> dict[str, Any]:
    report = path.with_suffix(".report")
    path.unlink(missing_ok=True)
    with running_oaiserve("--record-requests", str(path), "--drafts", "off") as server:
        bench("run", server.url, *load.command(seconds), "--json", str(report), "--warmup", "4")
    recorded = read(path)
    assert trained.cost is not None
    replay = Replay(
        recorded.server,
        trained.cost,
        host_seconds=trained.host_seconds,
        before_queue_seconds=trained.before_queue_seconds,
    )
    predicted = figures(replay.run([(one.seconds, 0, one) for one in recorded.arrivals]), recorded.rate, {})
    metrics = json.loads(report.read_text())["points"][0]["runs"][0]["metrics"]
    measured = {name: metrics[name.split()[0].lower()][name.split()[1]] for name in COLUMNS}
    expected = {name: predicted[f"{name.split()[0].lower()}_seconds"][name.split()[1]] for name in COLUMNS}
    print(f"{load.title}: {measured} measured, {expected} predicted", file=sys.stderr, flush=True)
    return {"load": load.title, "measured": measured, "predicted": expected}


def highest(path: Path, trained: RecordedLoad, seconds: float) -> dict[str, float]:
    """Return the highest rate of the last load, by the plan and by the load test."""
    load = LOADS[-1]
    recorded = record(path, (load,), seconds)
    assert trained.cost is not None
    best = highest_rate(recorded, trained.cost, recorded.server, parse_limits(SLO), 0.95)
    searched = path.with_suffix(".search")
    shape = load.flags.removeprefix(POISSON).split()
    with running_oaiserve("--drafts", "off") as server:
        bench("find-max", server.url, *shape, "--slo", SLO, "--first-rate", str(load.rate), "--json", str(searched))
    return {"plan": 0.0 if best is None else best.rate, "find_max": json.loads(searched.read_text())["holds"] or 0.0}


def bench(command: str, url: str, *flags: str) -> None:
    program = [sys.executable, "-m", "loadtest", command, "--url", url, "--no-stop-on-eos", "--no-calibrate"]
    subprocess.run([*program, *flags], check=True, stdout=sys.stderr)


def row(one: dict[str, Any]) -> tuple[str, ...]:
    cells = [
        f"{one['predicted'][name] * 1e3:.3g} / {one['measured'][name] * 1e3:.3g} ms "
        f"({one['predicted'][name] / one['measured'][name]:.2f})"
        for name in COLUMNS
    ]
    return (one["load"], *cells)


if __name__ == "__main__":
    main()
