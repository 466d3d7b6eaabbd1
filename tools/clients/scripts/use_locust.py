"""A load test with locust. It runs for some seconds, because it counts no requests in advance."""

import json
from pathlib import Path

from features import BASE_URL, run, run_program

locustfile = """\
from locust import HttpUser, task


class Asker(HttpUser):
    host = "http://127.0.0.1:8000"

    @task
    def ask(self):
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        self.client.post("/v1/chat/completions", json={"model": "demo", "messages": messages, "max_tokens": 8})
"""


def load() -> None:
    Path("locustfile.py").write_text(locustfile.replace("http://127.0.0.1:8000", BASE_URL.removesuffix("/v1")))
    run_program("locust --headless --users 2 --spawn-rate 2 --run-time 5s --json-file stats")
    (stats,) = json.loads(Path("stats.json").read_text())
    assert stats["num_requests"] > 2, stats
    assert stats["num_failures"] == 0, stats


run(load)
