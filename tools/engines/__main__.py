"""Checks the gateway in front of a real engine of another kind: python -m tools.engines llama-cpp

The engine and the gateway start here, with a small model of random weights. The checks:

- bytes: clients get every byte that the engine sends for mixed requests, as a tap between engine and gateway shows.
  Answers past the gateway are the same, except for ids and times. The phases of each add up to its duration exactly.
- hog: a short prompt that waits beside long ones of another client names that client.
- clock: a system prompt that changes is named as the reason for tokens that are read again.
- killed: the engine gets a SIGKILL under 32 streams. Each ends with an error event, and after a restart of the engine
  the gateway goes on.
- boards: a real Prometheus scrapes the gateway, and the panels with data are counted.

The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tests.deploy.boards import panels
from tests.deploy.paths import DEPLOY
from tests.e2e.prometheus import running_prometheus
from tools.bench.servers import ServerSpec
from tools.engines.running import ENGINES, model_of, running_engine, running_gateway, small_model
from tools.engines.tap import running_tap
from tools.server_process import CHAT, ServerProcess, exit_on_sigterm, free_port

KEYS = {name: f"key-of-{name}" for name in ("anna", "batchjob", "operator")}
STREAMS = 32
TRIES = 4  # Two equal requests may differ: on a busy machine, vLLM puts two tokens into one event now and then.
HOGS = 40  # requests of the client that makes others wait
BEGIN_SECONDS = 15.0  # after which the engine is killed, even if it answers fewer streams at once
SILENT = "transformers"  # the engine that reports nothing of itself
WAIT_SECONDS = 60.0
LISTED = 50  # accounts to check at a time: the gateway lists the last 100
TEXT = "Tell me about the old river and the seven hills. "
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"a": {}}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# These differ between two answers of one engine to the same request.
VARYING = (
    (rb'"(id|system_fingerprint)": ?"[^"]*"', rb'"\1":""'),
    (rb"\b(req|chatcmpl|cmpl|resp|msg|rs|call|fc)[-_][\w-]+", b"ID"),
    (rb'"(created|created_at|completed_at)": ?[0-9.]+', rb'"\1":0'),
    (rb'"cached_tokens": ?[0-9]+', b'"cached_tokens":0'),
    (rb'"(timings|metrics)": ?\{[^}]*\}', rb'"\1":{}'),
)
VALUES = {"$__rate_interval": "5m", "$__range": "5m", " offset 1h": "", " offset 1d": ""}
VALUES |= dict.fromkeys(("$model", "$instance", "$job", "$namespace"), ".*")


@dataclass
class Check:
    """An engine with the gateway in front of it."""

    spec: ServerSpec
    stack: ExitStack
    port: int = field(default_factory=free_port)
    requests: int = 500

    def __post_init__(self) -> None:
        self.model = model_of(self.spec)
        # Without it, llama.cpp computes the second one of two equal prompts in other batches. Others refuse it.
        self.more = {"cache_prompt": False} if self.spec.name == "llama-cpp" else {}
        self.engine = self._start()
        folder = Path(self.stack.enter_context(TemporaryDirectory()))
        keys = folder / "keys"
        keys.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
        self.flags = ("--api-key-file", str(keys), "--log-level", "warning")
        self.gateway = self.stack.enter_context(running_gateway(self.engine.url, *self.flags))
        self.direct = self.stack.enter_context(httpx.Client(base_url=self.engine.url, timeout=600))
        self.clients = {name: self.stack.enter_context(self.client(name, self.gateway)) for name in KEYS}

    def _start(self) -> ServerProcess:
        return self.stack.enter_context(running_engine(self.spec, self.port))

    def client(self, name: str, gateway: ServerProcess) -> httpx.Client:
        headers = {"authorization": f"Bearer {KEYS[name]}"}
        limits = httpx.Limits(max_connections=None)
        return httpx.Client(base_url=gateway.url, timeout=600, headers=headers, limits=limits)

    def restart(self) -> None:
        self.engine = self._start()

    def ask(self, name: str, request_id: str, content: str, *, system: str = "", **more: Any) -> httpx.Response:
        """Send a chat as a client of the gateway."""
        system_turn = [{"role": "system", "content": system}] if system else []
        messages = [*system_turn, {"role": "user", "content": content}]
        body = {"model": self.model, "messages": messages, "max_tokens": 4, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}} | more
        return self.clients[name].post(CHAT, json=body, headers={"x-request-id": request_id})

    def account(self, request_id: str) -> dict[str, Any]:
        """Return the account of a request that has ended. The gateway writes accounts in batches."""
        ends = time.monotonic() + WAIT_SECONDS
        while (got := self.clients["operator"].get(f"/debug/requests/{request_id}")).status_code == 404:
            if time.monotonic() > ends:
                raise CheckFailed(f"{request_id} has no account")
            time.sleep(0.1)
        found: dict[str, Any] = got.json()
        return found


class CheckFailed(Exception):
    """The message says what is wrong."""


def cases(model: str, more: Mapping[str, Any]) -> Iterator[tuple[str, str, bytes]]:
    """Yield mixed requests without end: method, path and body. Some are wrong. Those that generate have `more`."""
    chat = {"model": model, "max_tokens": 4, "temperature": 0, "seed": 1} | more
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    number = 0
    while True:
        number += 1
        asked = chat | {"messages": [{"role": "user", "content": f"{number}. {TEXT}"}]}
        text = chat | {"prompt": f"{number}. Once upon a time"}
        bodies: tuple[tuple[str, dict[str, Any]], ...] = (
            (CHAT, asked),
            (CHAT, asked | usage),
            (CHAT, asked | {"stream": True}),
            (CHAT, asked | usage | {"logprobs": True, "top_logprobs": 2}),
            (CHAT, asked | usage | {"tools": [TOOL]}),
            (
                CHAT,
                asked | {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            ),
            (CHAT, asked | {"messages": [{"role": "user", "content": "\u00e9\U0001f600 " + TEXT}], "stop": ["e"]}),
            (CHAT, asked | {"messages": [{"role": "system", "content": TEXT * 20}, *asked["messages"]]} | usage),
            (CHAT, asked | {"messages": "none"}),
            ("/v1/completions", text),
            ("/v1/completions", text | usage),
            ("/v1/completions", text | {"max_tokens": -7}),
            ("/v1/embeddings", {"model": model, "input": TEXT}),
            (
                "/v1/responses",
                {"model": model, "input": TEXT, "max_output_tokens": 4} | {"temperature": 0, "cache_prompt": False},
            ),
        )
        for path, body in bodies:
            yield "POST", path, json.dumps(body).encode()
        yield "POST", CHAT, b'{"model": 7, "mess'
        yield "GET", "/v1/models", b""
        yield "GET", f"/none/{number}", b""


def masked(answer: httpx.Response) -> tuple[int, str, bytes]:
    """Return an answer without the parts in which two answers to the same request may differ."""
    content = answer.content
    for pattern, replacement in VARYING:
        content = re.sub(pattern, replacement, content)
    return answer.status_code, answer.headers.get("content-type", ""), content


def check_bytes(check: Check) -> str:
    """Compare what clients get with what the engine has sent, and with answers past the gateway."""
    statuses: Counter[int] = Counter()
    num_uneven = num_again = num_regrouped = 0
    with ExitStack() as stack:
        tap = stack.enter_context(running_tap(check.port))
        gateway = stack.enter_context(running_gateway(tap.url, *check.flags))
        http, operator = (stack.enter_context(check.client(name, gateway)) for name in ("anna", "operator"))
        for number, (method, path, body) in zip(range(check.requests), cases(check.model, check.more), strict=False):
            asked = f"{method} {path} {body[:200]!r}"
            for again in range(TRIES):
                headers = {"content-type": "application/json", "accept-encoding": "identity"}
                headers["x-request-id"] = f"mixed-{number}-{again}"
                direct = check.direct.request(method, path, content=body, headers=headers)
                through = http.request(method, path, content=body, headers=headers)
                if through.content != tap.bodies[headers["x-request-id"]]:
                    raise CheckFailed(f"{asked}: the client has got other bytes than the engine has sent")
                if masked(direct) == masked(through):
                    break
                num_again += 1
            else:
                if not is_regrouped(direct, through):
                    raise CheckFailed(f"{asked}: {difference(masked(direct), masked(through))}")
                num_regrouped += 1
            statuses[direct.status_code] += 1
            if number % LISTED == LISTED - 1:
                accounts = operator.get("/debug/requests").json()["requests"]
                num_uneven += sum(not adds_up(account) for account in accounts)
    if num_uneven:
        raise CheckFailed(f"the phases of {num_uneven} accounts do not add up")
    listed = ", ".join(f"{count:,} with {status}" for status, count in sorted(statuses.items()))
    again_text = f" after {num_again:,} further tries" if num_again else ""
    regrouped = f"; {num_regrouped:,} streams have the same text in other events past it" if num_regrouped else ""
    return (
        f"{sum(statuses.values()):,} answers have the engine's bytes and are like those past the gateway{again_text} "
        f"({listed}){regrouped}; all phases add up"
    )


def is_regrouped(one: httpx.Response, other: httpx.Response) -> bool:
    """Return whether two streams have the same text, in events that the engine has cut differently."""
    text = text_of(one)
    return masked(one)[:2] == masked(other)[:2] and text != "" and text == text_of(other)


def text_of(answer: httpx.Response) -> str:
    """Return the text of a stream's events."""
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event).get("choices", ())]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def difference(one: tuple[int, str, bytes], other: tuple[int, str, bytes]) -> str:
    """Return where two answers begin to differ, in words."""
    if one[:2] != other[:2]:
        return f"{one[:2]} and {other[:2]}"
    same = next((place for place, pair in enumerate(zip(one[2], other[2], strict=False)) if pair[0] != pair[1]), 0)
    since = max(0, same - 40)
    return f"from byte {same} on, {one[2][since : same + 100]!r} and {other[2][since : same + 100]!r}"


def adds_up(account: dict[str, Any]) -> bool:
    return sum(phase["duration_ns"] for phase in account["phases"]) == account["duration_ns"]


def check_hog(check: Check) -> str:
    """Let a short prompt wait beside many long ones of another client."""
    if check.spec.name == SILENT:
        return "not known: it sends an event at once, so that waits are part of its stream"
    for number in range(6):  # By these, the gateway knows what a prompt takes alone.
        check.ask("anna", f"alone-{number}", f"{number} {TEXT}")
    with ThreadPoolExecutor(HOGS) as threads:
        hogs = [
            threads.submit(check.ask, "batchjob", f"hog-{n}", f"{n} {TEXT * 40}", max_tokens=50) for n in range(HOGS)
        ]
        time.sleep(0.5)
        check.ask("anna", "short", f"Now {TEXT}")
        failed = [hog.result().status_code for hog in hogs if hog.result().status_code != 200]
    found = check.account("short")
    sentence = next((text for text in found["explanation"] if text.startswith("first byte took")), "")
    if failed or "of batchjob" not in sentence:
        raise CheckFailed(f"{failed} {found['explanation']}")
    return sentence


def check_clock(check: Check) -> str:
    """Let the system prompt begin with a clock."""
    if check.spec.name == SILENT:
        return "not known: it reports no cached tokens"
    for number in (1, 2):
        check.ask("anna", f"clock-{number}", "Hi", system=f"It is 10:0{number}. {TEXT * 30}")
    found = check.account("clock-2")
    sentences = [text for text in found["explanation"] if "read again" in text or "does not say" in text]
    if not sentences and found["cached_tokens"] < 100:
        raise CheckFailed(f"nothing is said: {found['explanation']}")
    return sentences[0] if sentences else f"the engine had {found['cached_tokens']:,} tokens cached"


def check_killed(check: Check) -> str:
    """Kill the engine under streams, and start it again."""
    has_begun = Counter[int]()

    def stream(number: int) -> str:
        body = {"model": check.model, "max_tokens": 1500, "stream": True}
        body |= {"messages": [{"role": "user", "content": f"{number} {TEXT}"}]}
        content = b""
        with check.clients["anna"].stream("POST", CHAT, json=body) as answer:
            for part in answer.iter_raw():
                has_begun[number] += 1
                content += part
        if answer.status_code != 200:
            return f"{answer.status_code} before it began"
        *_, last, done, rest = content.split(b"\n\n")
        is_whole = all(each.startswith((b"data: ", b":")) for each in content.split(b"\n\n")[:-1])
        if not is_whole or rest or done != b"data: [DONE]" or b'"error"' not in last:
            return f"a wrong end: {content[-200:]!r}"
        return "ended with an error event"

    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(stream, number) for number in range(STREAMS)]
        ends = time.monotonic() + BEGIN_SECONDS
        while len(has_begun) < STREAMS and time.monotonic() < ends:
            time.sleep(0.05)
        check.engine.process.kill()
        results = Counter(each.result() for each in streams)
    if set(results) - {"ended with an error event", "503 before it began", "502 before it began"}:
        raise CheckFailed(str(results))
    away = check.ask("anna", "away", "Hi").status_code
    check.restart()
    began = time.monotonic()
    while (status := check.ask("anna", "back", "Hi").status_code) != 200:
        if time.monotonic() > began + WAIT_SECONDS:
            raise CheckFailed(f"{status} after the restart")
        time.sleep(0.1)
    listed = ", ".join(f"{count} {what}" for what, count in sorted(results.items()))
    return f"{listed}; then a {away}, and after its restart answers again"


def check_boards(check: Check) -> str:
    """Count the panels of all dashboards that have data in front of the engine."""
    with_data: dict[str, list[str]] = {}
    without: dict[str, list[str]] = {}
    with (
        TemporaryDirectory() as folder,
        running_prometheus(Path(folder), {"oaiserve": check.gateway.url}, key=KEYS["operator"]) as prometheus,
    ):
        for number in range(12):
            check.ask("anna", f"board-{number}", f"{number // 2} {TEXT * 10}")
            time.sleep(0.5)
        for file in sorted((DEPLOY / "grafana/dashboards").glob("*.json")):
            board = json.loads(file.read_text())
            title = board["title"].removeprefix("oaiserve / ")
            for panel in panels(board):
                if targets := panel.get("targets", ()):
                    values = [one for each in targets for one in prometheus.query(filled_in(each["expr"])).values()]
                    found = with_data if any(map(math.isfinite, values)) else without
                    found.setdefault(title, []).append(panel["title"])
    for title in sorted(with_data | without):
        listed = with_data.get(title, [])
        print(f"  {title}: {len(listed)} of {len(listed) + len(without.get(title, []))} panels have data")
    missing = ", ".join(without.get("Engines", [])) or "none"
    if len(with_data.get("Engines", [])) <= len(without.get("Engines", [])):
        raise CheckFailed(f"most panels of Engines have no data: {missing}")
    return f"panels of Engines without data: {missing}"


def filled_in(query: str) -> str:
    for name, value in VALUES.items():
        query = query.replace(name, value)
    return query


CHECKS: dict[str, Callable[[Check], str]] = {
    "bytes": check_bytes,
    "hog": check_hog,
    "clock": check_clock,
    "boards": check_boards,
    "killed": check_killed,
}


@contextmanager
def prepared(name: str, requests: int) -> Iterator[Check]:
    with ExitStack() as stack:
        model = small_model(Path(stack.enter_context(TemporaryDirectory())))
        yield Check(ENGINES[name](model), stack, requests=requests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", choices=list(ENGINES), metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), help="default: all")
    parser.add_argument("--requests", type=int, default=500, help="of the check of bytes (default 500)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    num_failed = 0
    for name in arguments.engines:
        with prepared(name, arguments.requests) as check:
            print(f"{name} {check.spec.version}", flush=True)
            for only in arguments.only:
                try:
                    print(f"- {only}: {CHECKS[only](check)}", flush=True)
                except CheckFailed as error:
                    num_failed += 1
                    print(f"- {only} FAILED: {error}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
