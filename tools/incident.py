"""Walks through an incident: one client makes the others wait, until a command limits it: python -m tools.incident

A server of the demo model has stored keys: alice sends short prompts, batchjob long ones in several threads. A real
Prometheus with the rules of `deploy` watches it. The objective is twice what alice's first tokens take when she is
alone, at the 90th percentile. Once batchjob begins, the alert OaiserveSloFastBurn fires. Its link leads to the page of
clients, which proposes commands, and these are typed one after the other, until the alert ends.

All windows of the rules are 20 times shorter, so that an hour takes three minutes, and an alert needs 5 requests
instead of 50 in an hour. With --screenshots FOLDER, a Chromium takes pictures of the pages on the way.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tests.deploy.paths import DEPLOY
from tests.e2e.prometheus import Prometheus, running_prometheus
from tools.bench.shares import COMPLETIONS, LIGHT_TOKENS, MOST_ID
from tools.markdown import as_markdown, number
from tools.server_process import QUESTION, exit_on_sigterm, running_oaiserve

THREADS = 6  # threads of batchjob
WINDOW = 20  # Times of the rules are divided by this.
LEAST_REQUESTS = 5  # for an alert
ALERT = "OaiserveSloFastBurn"
WAIT_SECONDS = 400.0
TARGET = 2  # the objective, in relation to the ninetieth percentile alone
MOST_ROUNDS = 4  # rounds of commands
SIZES = {"desk": (1280, 900), "phone": (390, 844)}
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
HEAD = ("alice's short prompts", "requests", "TTFT p50, ms", "p90", "max")
OPERATOR = "operator"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement (default 20)")
    parser.add_argument("--tokens", type=int, default=1535, help="of batchjob's prompts (default 1535)")
    parser.add_argument("--screenshots", type=Path, help="a folder for pictures of the pages")
    arguments = parser.parse_args()
    exit_on_sigterm()
    with TemporaryDirectory() as folder:
        walk(Path(folder), arguments.seconds, arguments.tokens, arguments.screenshots)


def walk(folder: Path, seconds: float, num_tokens: int, pictures: Path | None) -> None:
    env = os.environ | {"OAISERVE_RESPONSE_STORE": f"{folder / 'store'}"}
    keys = {name: created_key(name, env) for name in ("alice", "batchjob")}
    keys[OPERATOR] = created_key(OPERATOR, env, "--role", "watch")
    rows = []
    with ExitStack() as running:
        with running_oaiserve("--stored-keys", env=env) as server, client(server.url, keys["alice"]) as alice:
            measured(alice, 2)  # the first requests are slow
            target_ms = round(1e3 * TARGET * most(measured(alice, seconds)))
        flags = ("--stored-keys", "--slo", f"ttft:{target_ms}ms")
        print(f"oaiserve serve demo {' '.join(flags)}", flush=True)
        server = running.enter_context(running_oaiserve(*flags, env=env))
        rules = shorter_rules(folder)
        prometheus = running.enter_context(
            running_prometheus(
                folder, {"oaiserve": server.url}, rules, key=keys[OPERATOR], labels={"oaiserve_url": server.url}
            )
        )
        with client(server.url, keys["alice"]) as alice:
            measured(alice, 2)  # the first requests are slow
            rows.append(("alone", measured(alice, seconds)))
            print(f"{alerts(prometheus) or 'no alert'}", flush=True)
            heavy = running.enter_context(load(server.url, keys["batchjob"], num_tokens))
            began = time.monotonic()
            until(lambda: bool(measured(alice, 1)) and "firing" in alerts(prometheus))
            print(f"{ALERT} fires after {time.monotonic() - began:.0f} s.", flush=True)
            (fired,) = (one for one in prometheus.get("alerts")["alerts"] if one["labels"]["alertname"] == ALERT)
            print("\n".join(f"{name}: {text}" for name, text in fired["annotations"].items()), flush=True)
            rows.append(("beside batchjob", measured(alice, seconds)))
            began = time.monotonic()
            for _ in range(MOST_ROUNDS):
                for command in proposed(fired["annotations"]["clients_url"], keys[OPERATOR], pictures):
                    type_in(command, env)
                    num_before = len(heavy)
                    rows.append((command, measured(alice, seconds)))
                    print(f"batchjob got {len(heavy) - num_before} answers meanwhile.", flush=True)
                if has_ended(prometheus, alice):
                    break
            print(f"{alerts(prometheus) or 'no alert'} {time.monotonic() - began:.0f} s after the first command.")
    print("\n".join(as_markdown([HEAD, *(shown(*row) for row in rows)])))


def has_ended(prometheus: Prometheus, alice: httpx.Client) -> bool:
    """Return whether the alert ends within the hour of the rules."""
    ends = time.monotonic() + 3600 / WINDOW
    while alerts(prometheus) and time.monotonic() < ends:
        measured(alice, 1)
    return not alerts(prometheus)


def proposed(url: str, key: str, pictures: Path | None) -> list[str]:
    """Return the commands on the page of clients. Take pictures of it, and of a request of alice, in two sizes."""
    from playwright.sync_api import sync_playwright  # not needed where there is no Chromium

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for size, (width, height) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(1000 * WAIT_SECONDS)
            page.add_init_script(f"sessionStorage.setItem('oaiserve-api-key', '{key}')")

            def show(path: str, *selectors: str, page: Any = page, size: str = size) -> None:
                page.goto(url.removesuffix("clients") + path)
                for selector in selectors[:-1]:
                    page.click(f"{selector} >> nth=0")
                page.wait_for_selector(selectors[-1])
                if pictures is not None:
                    name = f"{path.replace('?client=', '-')}-{len(selectors)}-{size}.png"
                    page.screenshot(path=pictures / name, full_page=True)

            show("requests", "#requests li")
            show("requests?client=batchjob", "#open-requests a", ".open")
            show("requests?client=alice", "#requests a", ".why")
            show("clients", "#commands code")
            commands: list[str] = page.locator("#commands code").all_inner_texts()
        browser.close()
        return commands


def type_in(command: str, env: dict[str, str]) -> None:
    print(f"$ {command}", flush=True)
    _, *words = shlex.split(command)
    subprocess.run([sys.executable, "-m", "oaiserve", *words], check=True, env=env)
    time.sleep(2)  # The server obeys within a second.


def created_key(name: str, env: dict[str, str], *flags: str) -> str:
    command = [sys.executable, "-m", "oaiserve", "keys", "add", name, *flags]
    printed = subprocess.run(command, check=True, env=env, capture_output=True, text=True).stdout
    (key,) = re.findall(r"sk-\S+", printed)
    return key


def shorter_rules(folder: Path) -> list[Path]:
    """Write the rules with shorter windows, and return their files."""
    files = []
    for name in ("recording.rules.yml", "alerts.rules.yml"):
        text = (DEPLOY / "prometheus" / name).read_text()
        text = re.sub(r"\[(\d+)([smhd])\]", lambda found: f"[{shorter(found)}]", text)
        text = re.sub(r"for: (\d+)([smhd])\b", lambda found: f"for: {shorter(found)}", text)
        text = text.replace("* 3600 >= 50", f"* {3600 // WINDOW} >= {LEAST_REQUESTS}")
        file = folder / name
        file.write_text(text)
        files.append(file)
    return files


def shorter(found: re.Match[str]) -> str:
    return f"{int(found[1]) * UNITS[found[2]] * 1000 // WINDOW}ms"


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=600, headers={"authorization": f"Bearer {key}"})


def ask(http: httpx.Client, num_tokens: int, max_tokens: int) -> None:
    """Send a prompt of random tokens, and read its answer."""
    prompt = random.choices(range(1000, MOST_ID), k=num_tokens)
    body = {"model": QUESTION["model"], "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    http.post(COMPLETIONS, json=body).raise_for_status()


def measured(alice: httpx.Client, seconds: float) -> list[float]:
    """Return how long each request took. Its answer has one token, so that is its TTFT."""
    taken = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        began = time.monotonic()
        ask(alice, LIGHT_TOKENS, 1)
        taken.append(time.monotonic() - began)
        time.sleep(0.3)
    return taken


@contextmanager
def load(url: str, key: str, num_tokens: int) -> Iterator[list[int]]:
    """Send batchjob's long prompts in several threads, and yield a list of the answers, by their status."""
    ends = threading.Event()
    answers: list[int] = []

    def send() -> None:
        with client(url, key) as http:
            while not ends.is_set():
                try:
                    ask(http, num_tokens, 16)
                    answers.append(200)
                except httpx.HTTPStatusError as error:
                    ends.wait(float(error.response.headers.get("retry-after", "1")))

    threads = [threading.Thread(target=send) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def alerts(prometheus: Prometheus) -> set[str]:
    """Return the states of the alert: pending, firing, or none."""
    return {dict(labels)["alertstate"] for labels in prometheus.query(f'ALERTS{{alertname="{ALERT}"}}')}


def until(condition: Any) -> None:
    ends = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > ends:
            sys.exit(f"not within {WAIT_SECONDS:.0f} s")
        time.sleep(0.2)


def most(taken: list[float]) -> float:
    """Return the ninetieth percentile."""
    return sorted(taken)[len(taken) * 9 // 10]


def shown(name: str, taken: list[float]) -> tuple[str, ...]:
    times = [statistics.median(taken), most(taken), max(taken)]
    return (name, str(len(taken)), *(number(1e3 * each) for each in times))


if __name__ == "__main__":
    main()
