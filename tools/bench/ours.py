"""Measures this server alone by the six workloads in short form, with its own load test: python -m tools.bench.ours"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tools import machine
from tools.bench.process_usage import peak_rss_mib
from tools.bench.servers import oaiserve
from tools.bench.workloads import WORKLOADS, Workload
from tools.load import run_bench
from tools.markdown import as_markdown, number, write_json
from tools.server_process import exit_on_sigterm

# The figures of the load test's report by their titles here: rates per second, and times.
RATES = {"out/s": "completion_tokens_per_second", "in and out/s": "total_tokens_per_second"}
TIMES = {
    f"{kind.upper()} {percentile}": (kind, percentile)
    for kind in ("ttft", "tpot", "itl")
    for percentile in ("p50", "p99")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), help="default: all")
    parser.add_argument("--full", action="store_true", help="as many requests as against the peers")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    exit_on_sigterm()
    workloads = [WORKLOADS[name] if arguments.full else WORKLOADS[name].short() for name in arguments.only]
    server = oaiserve()
    results: dict[str, Any] = {"machine": machine.sentence(), "version": server.version}
    with server.running() as running:
        server.wait_for_full_speed(running)
        results["workloads"] = {workload.name: run(workload, running.url) for workload in workloads}
        results |= {"start_seconds": running.start_seconds, "peak_rss_mib": peak_rss_mib(running.process.pid)}
    print(f"{results['machine']}; oaiserve {server.version}.")
    print(f"Start to first answer: {results['start_seconds']:.1f} s. Most memory: {results['peak_rss_mib']:,.0f} MiB.")
    rows = [["", "", *RATES, *TIMES, "client"]]
    for name, found in results["workloads"].items():
        cells = ["" if found[key] is None else number(found[key]) for key in (*RATES, *TIMES)]
        rows.append([name, WORKLOADS[name].title, *cells, found["client"]])
    print("", *as_markdown(rows), sep="\n")
    write_json(arguments.json, results)


def run(workload: Workload, url: str) -> dict[str, Any]:
    """Return the figures of the workload, times in ms, with the load test's verdict on itself."""
    options = {
        "--num-requests": workload.num_requests,
        "--input-len": workload.input_len,
        "--prefix-len": workload.prefix_len,
        "--max-new-tokens": workload.output_len,
        "--seed": workload.seed(0),
    }
    if workload.rate is None:
        options["--concurrency"] = workload.concurrency
    else:
        options |= {"--arrival": "poisson", "--rate": workload.rate}
    point = run_bench(url, options, "--no-stop-on-eos")
    metrics = point["runs"][0]["metrics"]
    found = {title: metrics[key] for title, key in RATES.items()}
    for title, (kind, percentile) in TIMES.items():
        distribution = metrics["distributions"][kind]
        found[title] = distribution[percentile] * 1e3 if distribution else None
    return found | {"client": point["verdict"]}


if __name__ == "__main__":
    main()
