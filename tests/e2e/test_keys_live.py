"""Stored keys in a running server: the `keys` command changes their limits, and the next requests notice it."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.e2e.conftest import clean_environment, serve_process
from tests.waiting import wait_until


def command(store: Path, *words: str) -> str:
    line = [sys.executable, "-m", "oaiserve", "keys", *words, "--response-store", str(store)]
    return subprocess.run(line, check=True, capture_output=True, text=True, env=clean_environment()).stdout.strip()


def complete(url: str, key: str) -> tuple[int, str | None]:
    """Send a request on a connection of its own."""
    headers = {"authorization": f"Bearer {key}"}
    body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    return answer.status_code, answer.headers.get("x-ratelimit-remaining-requests")


def test_limits_of_stored_keys_change_while_the_server_runs(small_model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    alice, bob = (command(store, "add", name, "--requests-per-day", "12") for name in ("alice", "bob"))
    flags = ("--kv-cache-memory", "12MiB", "--stored-keys", "--response-store", str(store))
    with serve_process(str(small_model), tmp_path / "log", *flags) as server, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: complete(server.url, alice), range(30)))
        assert sorted(rest for status, rest in answers if status == 200) == sorted(str(number) for number in range(12))
        assert [status for status, _ in answers].count(429) == 18
        used = r"alice +use .* 12 requests, 60 tokens, cost [0-9.e-]*[1-9]"
        wait_until(lambda: re.search(used, command(store, "list")))
        command(store, "limit", "alice", "--requests-per-day", "13")
        wait_until(lambda: complete(server.url, alice)[0] == 200)
        assert complete(server.url, alice) == (429, "0")
        assert complete(server.url, bob) == (200, "11")
        command(store, "revoke", "bob")
        wait_until(lambda: {complete(server.url, bob)[0] for _ in range(4)} == {401})
        assert server.terminate() == 0
