"""Measures this server alone by the six workloads in short form, with its own load test: python -m tools.bench.ours"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tools import machine
from tools.bench import client
from tools.bench.process_usage import peak_rss_mib
from tools.bench.servers import oaiserve
from tools.bench.workloads import WORKLOADS
from tools.markdown import as_markdown, number, write_json
from tools.server_process import exit_on_sigterm

# The figures by their titles here: rates per second, and times in ms.
FIGURES = {"out/s": "output_throughput", "in and out/s": "total_throughput"} | {
    f"{kind.upper()} {share}": f"{kind}_{share}_ms" for kind in ("ttft", "tpot", "itl") for share in ("p50", "p99")
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
        results["workloads"] = {one.name: client.run(running, one, one.seed(0)) for one in workloads}
        results |= {"start_seconds": running.start_seconds, "peak_rss_mib": peak_rss_mib(running.process.pid)}
    print(f"{results['machine']}; oaiserve {server.version}.")
    print(f"Start to first answer: {results['start_seconds']:.1f} s. Most memory: {results['peak_rss_mib']:,.0f} MiB.")
    rows = [["", "", *FIGURES, "client"]]
    for name, found in results["workloads"].items():
        cells = [number(found[key]) if key in found else "" for key in FIGURES.values()]
        rows.append([name, WORKLOADS[name].title, *cells, found["client"]])
    print("", *as_markdown(rows), sep="\n")
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
