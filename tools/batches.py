"""Batches: killed servers, beside others, and alone: python -m tools.batches [kills|beside|alone] [--rounds N]

`kills` sends SIGKILL to a server in the middle of a batch, again and again; the exit code is 1 if a line was lost,
doubled or answered otherwise than without kills. `beside` has two streams at a time, with and without a batch in turns;
`alone` the tokens per second of a batch and of the same requests sent at once, in turns. These have the demo model.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import httpx

from tools.kills import preloaded, serve
from tools.load import run_bench
from tools.server_process import exit_on_sigterm, free_port, running_oaiserve

PATH = "/v1/completions"
STREAMS = 2
LINES = 400
KILLED_LINES = 4000
WORDS = ["river", "stone", "seven", "lamp", "under", "paper", "green", "often", "walk", "cloud", "table", "north"]


def bodies(seed: int, number: int, tokens: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    fields = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return [fields | {"prompt": " ".join(rng.choices(WORDS, k=30))} for _ in range(number)]


def begin(http: httpx.Client, requests: list[dict[str, Any]]) -> str:
    lines = [{"custom_id": f"{number}", "url": PATH, "body": body} for number, body in enumerate(requests)]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": content}).json()
    fields = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
    return str(http.post("/v1/batches", json=fields).json()["id"])


def wait(http: httpx.Client, batch: str, most: float = 1.0) -> dict[str, Any]:
    """Wait until this share of the lines is done."""
    while (answer := http.get(f"/v1/batches/{batch}").json())["status"] == "in_progress":
        if answer["request_counts"]["completed"] >= most * answer["request_counts"]["total"]:
            break
        time.sleep(0.1)
    return dict(answer)


def texts(http: httpx.Client, batch: dict[str, Any]) -> list[tuple[str, str]]:
    lines = map(json.loads, http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines())
    return [(one["custom_id"], one["response"]["body"]["choices"][0]["text"]) for one in lines]


def kills(rounds: int) -> int:
    batch = ""
    undisturbed = []
    num_amid = 0
    with TemporaryDirectory() as folder:
        context = preloaded(model := Path(folder) / "model")
        for number in range(rounds + 2):  # the first one is undisturbed, and the last one ends what is left
            port = free_port()
            store = f"{folder}/{number > 0}.db"
            server = context.Process(target=serve, args=(model, port, "--response-store", store))
            server.start()
            transport = httpx.HTTPTransport(retries=8, trust_env=False)  # until it listens
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, transport=transport) as http:
                while not http.get("/ready").is_success:
                    time.sleep(0.1)
                batch = batch if number > 1 else begin(http, bodies(0, KILLED_LINES, 12))
                last = wait(http, batch, number / (rounds + 1) if 0 < number <= rounds else 2)
                num_amid += last["status"] == "in_progress"
                if last["status"] != "in_progress":
                    answers = texts(http, last)
                    undisturbed = undisturbed or answers
            server.kill()
            server.join()
            print(f"{number}: {last['request_counts']['completed']} lines", file=sys.stderr, flush=True)
    is_same = answers == undisturbed and last["request_counts"]["completed"] == KILLED_LINES
    same = "the same" if is_same else "others"
    print(f"{num_amid} kills amid a batch, {len(answers)} answers, {same} as without kills")
    return not is_same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kills", "beside", "alone"))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    exit_on_sigterm()
    if arguments.what == "kills":
        return kills(arguments.rounds)
    rates: dict[bool, list[float]] = {False: [], True: []}
    is_alone = arguments.what == "alone"
    with (
        running_oaiserve("--no-prefix-cache") as server,  # both of a pair have the same prompts
        httpx.Client(base_url=server.url, timeout=60) as http,
        NamedTemporaryFile() as file,
    ):
        load = {"--num-requests": 64, "--input-len": 30, "--max-new-tokens": 64, "--concurrency": 64}
        run_bench(server.url, load, "--no-stop-on-eos")  # so that the cost of steps is known
        for number in range(2 * arguments.rounds):
            has_batch = number % 4 in (1, 2)
            begun = time.monotonic()
            requests = bodies(number // 2, 128 if is_alone else LINES, 48)
            batch = begin(http, requests) if has_batch else ""
            if is_alone and has_batch:
                tokens = wait(http, batch, 2)["usage"]["output_tokens"]
                rates[has_batch].append(tokens / (time.monotonic() - begun))
                continue
            Path(file.name).write_text("".join(json.dumps(body) + "\n" for body in requests))
            most = {"--requests": file.name, "--concurrency": 128, "--num-requests": 128}
            own = most if is_alone else load | {"--concurrency": STREAMS, "--seed": number // 2, "--num-requests": 24}
            run = run_bench(server.url, own, "--no-stop-on-eos")["runs"][0]["metrics"]
            itl = run["distributions"]["itl"]["p99"]
            rate = run["completion_tokens_per_second"]
            rates[has_batch].append(rate if is_alone else itl)
            if has_batch:
                counts = http.post(f"/v1/batches/{batch}/cancel").json()["request_counts"]
                print(f"{counts['completed']} lines were answered meanwhile")
    for has_batch, values in rates.items():
        shown = f"{median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
        print(f"{arguments.what}, {'with' if has_batch else 'without'} a batch: {shown}")
    print(f"ratio of medians {median(rates[True]) / median(rates[False]):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
