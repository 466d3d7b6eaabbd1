"""What open tabs of the live page cost in throughput, as a ratio of paired runs: python -m tools.page_cost

One server of the demo model gets the same load in turns, with viewers and without, and a pair of runs gives one ratio.
Viewers are `tabs` of a Chromium, or `feeds`: clients that load the page's files and then only read its feed. The
difference between the two is what the browser itself takes, where it shares the server's cores. Prints markdown: the
mean ratio with its 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.figures import free_port
from tools.overhead import child, interval, wait_until_ready

VIEWERS = ("feeds", "tabs")


def main() -> None:
    if sys.argv[1:2] == ["watch"]:
        kind, number, port = sys.argv[2:]
        return {"feeds": watch_feeds, "tabs": watch_tabs}[kind](int(number), int(port))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of runs for each kind of viewer (default 20)")
    parser.add_argument("--viewers", nargs="+", default=list(VIEWERS), choices=VIEWERS)
    parser.add_argument("--number", type=int, default=3, help="viewers at once (default 3)")
    parser.add_argument("--requests", type=int, default=128, help="requests of a run, 64 at once (default 128)")
    arguments = parser.parse_args()
    print("| viewers | tokens/s, ratio | pairs | tokens/s without |\n|---|---|---|---|", flush=True)
    with child("-m", "oaiserve", "serve", port=(port := free_port())):
        wait_until_ready(f"http://127.0.0.1:{port}")
        for kind in arguments.viewers:
            pairs = measure(kind, arguments.number, port, arguments.pairs, arguments.requests)
            ratio = interval([watched / alone for watched, alone in pairs])
            alone = statistics.median(alone for _, alone in pairs)
            print(f"| {arguments.number} {kind} | {ratio} | {len(pairs)} | {alone:.0f} |", flush=True)


def measure(kind: str, number: int, port: int, num_pairs: int, num_requests: int) -> list[tuple[float, float]]:
    """Tokens per second with viewers and without."""
    pairs = []
    for pair in range(num_pairs + 1):
        found: dict[bool, float] = {}
        for is_watched in (True, False) if pair % 2 else (False, True):
            seed = 2 * pair + is_watched  # no prompt twice: it would be cached
            if is_watched:
                with watching(kind, number, port):
                    found[True] = tokens_per_second(port, num_requests, seed)
            else:
                found[False] = tokens_per_second(port, num_requests, seed)
        if pair > 0:  # the first one is the warm-up
            pairs.append((found[True], found[False]))
    return pairs


def tokens_per_second(port: int, num_requests: int, seed: int) -> float:
    command = [sys.executable, "-m", "loadtest", "run", "--url", f"http://127.0.0.1:{port}", "--no-calibrate"]
    command += ["--concurrency", "64", "--num-requests", str(num_requests), "--seed", str(seed)]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run([*command, "--json", str(report)], check=True, capture_output=True)
        (point,) = json.loads(report.read_text())["points"]
    (run,) = point["runs"]
    errors = [request["error"] for request in run["requests"] if request["error"]]
    assert not errors, errors[:3]
    speed: float = run["metrics"]["completion_tokens_per_second"]
    return speed


@contextmanager
def watching(kind: str, number: int, port: int) -> Iterator[None]:
    """By a process of its own, from when all viewers have the page."""
    command = [sys.executable, "-m", "tools.page_cost", "watch", kind, str(number), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"watching\n", "the viewers could not open the page"
        try:
            yield
        finally:
            assert process.poll() is None, "the viewers have failed"
            process.stdin.close()  # which they wait for


def watch_feeds(number: int, port: int) -> None:
    def follow(response: http.client.HTTPResponse) -> None:
        while response.readline():
            pass

    for _ in range(number):
        connection = http.client.HTTPConnection("127.0.0.1", port)
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


def watch_tabs(number: int, port: int) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(number):
            page = browser.new_page()
            page.goto(f"http://127.0.0.1:{port}/dashboard")
            page.wait_for_selector("#status[data-state=live]")
        print("watching", flush=True)
        sys.stdin.read()
        browser.close()


if __name__ == "__main__":
    main()
