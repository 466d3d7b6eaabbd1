"""Measures what open tabs of the live page cost in throughput, as a ratio of paired runs: python -m tools.page_cost

One server of the demo model gets the same load in turns, with viewers and without, and a pair of runs gives one ratio.
Viewers are `tabs` of Chromium, or `feeds`: clients that load the page's files and then only read its feed. The
difference between the two is what the browser itself takes, where it shares the server's cores. Prints markdown: the
mean ratio with its 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import http.client
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tools.load import run_bench
from tools.paired import interval, measure_pairs
from tools.server_process import exit_on_sigterm, running_oaiserve

VIEWERS = ("feeds", "tabs")


def main() -> None:
    if sys.argv[1:2] == ["watch"]:
        kind, number, url = sys.argv[2:]
        return {"feeds": watch_feeds, "tabs": watch_tabs}[kind](int(number), url)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs for each kind of viewer (default 20)")
    parser.add_argument("--viewers", nargs="+", default=list(VIEWERS), choices=VIEWERS)
    parser.add_argument("--number", type=int, default=3, help="viewers at once (default 3)")
    parser.add_argument("--requests", type=int, default=128, help="requests of a run, 64 at once (default 128)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    print("| viewers | tokens/s, ratio | pairs | tokens/s without |\n|---|---|---|---|", flush=True)
    with running_oaiserve("--log-format", "json") as server:
        for kind in arguments.viewers:
            print(row(kind, arguments.number, server.url, arguments.pairs, arguments.requests), flush=True)


def row(kind: str, number: int, url: str, num_pairs: int, num_requests: int) -> str:
    def run_watched(seed: int) -> float:
        with watching(kind, number, url):
            return tokens_per_second(url, num_requests, seed)

    pairs = measure_pairs(run_watched, lambda seed: tokens_per_second(url, num_requests, seed), num_pairs)
    ratio = interval([watched / alone for watched, alone in pairs])
    return f"| {number} {kind} | {ratio} | {len(pairs)} | {statistics.median(alone for _, alone in pairs):.0f} |"


def tokens_per_second(url: str, num_requests: int, seed: int) -> float:
    options = {"--concurrency": 64, "--num-requests": num_requests, "--seed": seed}
    return run_bench(url, options)["runs"][0]["metrics"]["completion_tokens_per_second"]  # type: ignore[no-any-return]


@contextmanager
def watching(kind: str, number: int, url: str) -> Iterator[None]:
    """Keep the page open in the block, by a process of its own. The block begins when all viewers have the page."""
    command = [sys.executable, "-m", "tools.page_cost", "watch", kind, str(number), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"watching\n", "the viewers could not open the page"
        try:
            yield
        finally:
            assert process.poll() is None, "the viewers have failed"
            process.stdin.close()  # this ends the viewers


def watch_feeds(number: int, url: str) -> None:
    def follow(response: http.client.HTTPResponse) -> None:
        while response.readline():
            pass

    for _ in range(number):
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.request("GET", "/dashboard")
        page = connection.getresponse().read().decode()
        for name in re.findall(r'(?:src|href)="(dashboard/[^"]*)"', page):
            connection.request("GET", f"/{name}")
            connection.getresponse().read()
        connection.request("GET", "/dashboard/feed")
        response = connection.getresponse()
        assert response.status == 200
        threading.Thread(target=follow, args=(response,), daemon=True).start()
    print("watching", flush=True)
    sys.stdin.read()


def watch_tabs(number: int, url: str) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(number):
            page = browser.new_page()
            page.goto(f"{url}/dashboard")
            page.wait_for_selector("#status[data-state=live]")
        print("watching", flush=True)
        sys.stdin.read()
        browser.close()


if __name__ == "__main__":
    main()
