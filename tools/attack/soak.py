"""Attacks a server for a long time, along with honest clients: python -m tools.attack.soak --minutes 30

In each round, attackers reset connections, send half a head or half a body, read slowly, take all the room there is,
send bodies of the growth test and generated requests, and speak on sockets, as the seed says. Honest clients ask seeded
questions meanwhile, whose answers must be those that they got at rest. After each round nobody sends anything for a
moment, and then memory, open files, threads, blocks of the KV cache and requests are noted. Before the first one, all
blocks have been used, because their memory is only then the process's, and each kind of attack has filled what is kept
for it within bounds: 64 compiled grammars, for example. The store of responses is small, so that it is soon full.

Memory counts once the rounds have replaced all prompts that the server remembers in order to explain what later ones
read again: long ones take up to 38 MiB, and short ones next to nothing.

The soak holds if the memory in the second half of these rounds is that of the first, nothing is left open, and no
answer is wrong. Prints a table in markdown; the exit code is 1 if it does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import statistics
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

from loadtest.metrics_page import parse_metrics
from oaiserve.engine.grammars.grammar import MOST_KEPT
from oaiserve.explain.reuse.recent_prompts import MAX_PROMPTS
from oaiserve.http.fair_turns import MUCH_BYTES
from oaiserve.plugins.responses.socket_frames import VERSION
from tools.attack.attack import (
    ATTACKER_KEY,
    CHAT,
    COMPLETIONS,
    ENDED,
    FULL,
    HI,
    NEIGHBOUR_KEY,
    Attack,
    Strike,
    outcomes,
    post,
)
from tools.attack.families.access import FORMS
from tools.attack.families.bodies import long_prompts, sequences
from tools.attack.families.connections import HEAD
from tools.attack.families.generated import generate
from tools.attack.families.grammars import EXPLODING, body, schema
from tools.attack.forms import forms
from tools.attack.server import Server, oaiserve
from tools.attack.verdict import wrong
from tools.bench import process_usage
from tools.markdown import as_markdown, publish
from tools.server_process import exit_on_sigterm

ROUND_SECONDS = 30.0
SETTLE_SECONDS = 5.0
HONEST = 3
ATTACKERS = 6
ANSWER_SECONDS = 300.0  # the machine may be busy, and a prompt of the whole context before others
FILLING = 16  # prompts of 1,500 words, which use all blocks once
SIZES = (7_000, 60_000, 2**20)  # bytes of a growing body
FILL_SECONDS = 40.0  # time for each kind of attack, before the first round
MOST_GROWTH_MIB = 24.0  # growth of the median from one half of the rounds that count to the other
LEAST_ROUNDS = 4  # in each half
MOST_MORE = 4  # open files and threads than at the beginning: pools grow to their size
STORE = ("--response-store-bytes", "16MiB")
HOSTILE = (b'"x":1', b" " * 2**21 + b'"x":1', b",".join(b'"%x":1' % number for number in range(2**17)))
EMPTY_PING = b"\x89\x80" + bytes(4)
MARKERS = "soak"
HEAD_OF_TABLE = ("minute", "RSS, MiB", "peak, MiB", "open files", "threads", "blocks used", "requests", "attacks",
                 "honest", "read")  # fmt: skip
ACTS = Attack(name="soak", family="soak", of_class="soak", sends="all kinds", run=lambda _: asyncio.sleep(0), bare=True,
              outcomes=outcomes(*range(200, 500), "left", "cut", "timeout", "not HTTP") | ENDED | FULL)  # fmt: skip


class Sample(NamedTuple):
    """What the server holds while nobody asks."""

    minute: float
    rss_mib: float
    peak_mib: float  # in the round before
    num_fds: int
    num_threads: int
    num_blocks: int  # in use
    num_requests: int  # running and waiting
    num_attacks: int  # so far
    num_honest: int
    num_read: int  # requests so far whose prompts the engine has read


class Soak:
    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.samples: list[Sample] = []
        self.problems: Counter[str] = Counter()
        self.num_honest = 0
        self._random = random.Random(seed)
        self._forms = forms()
        self._at_rest: dict[int, Any] = {}
        self._started = time.monotonic()
        self._strike = Strike(server.url, server.process.log_file, quick=True, answer_seconds=ANSWER_SECONDS)
        self._acts: tuple[Callable[[], Awaitable[None]], ...] = (
            *(self._grow,) * 4, self._generated, self._bomb, self._resets, self._half, self._slow, self._hog,
            self._socket,
        )  # fmt: skip

    async def run(self, minutes: float) -> None:
        await self._strike.ask_all([*long_prompts(lambda *_: FILLING), *sequences(self._strike.number)], 32)
        for number in range(len(FORMS)):
            self._at_rest[number] = await self._honest_answer(number)
        for act in dict.fromkeys(self._acts):
            await self._fill(act)
        self._started = time.monotonic()
        while (left := self._started + 60 * minutes - time.monotonic()) > 0:
            process_usage.reset_peak_rss(self.server.pid)
            until = time.monotonic() + min(ROUND_SECONDS, left)
            async with asyncio.TaskGroup() as group:
                for _ in range(HONEST):
                    group.create_task(self._honest(until))
                for _ in range(ATTACKERS):
                    group.create_task(self._attack(until))
            await self._strike.ask_all(_small_grammars(), ATTACKERS)
            # After a large body, the server gives memory back to the system that it has freed and kept.
            await self._strike.ask(post(COMPLETIONS, {"prompt": "a " * MUCH_BYTES, "max_tokens": 1}))
            await asyncio.sleep(SETTLE_SECONDS)
            self._count_wrong()
            self.samples.append(self._sample())
            print(self.samples[-1], file=sys.stderr, flush=True)

    async def _honest(self, until: float) -> None:
        while time.monotonic() < until:
            number = self._random.randrange(len(FORMS))
            answer = await self._honest_answer(number)
            self.num_honest += 1
            if answer not in (self._at_rest[number], "429"):
                self.problems[f"{FORMS[number]} got {answer!s:.100} instead of {self._at_rest[number]!s:.100}"] += 1

    async def _honest_answer(self, number: int) -> Any:
        path, fields = FORMS[number]
        body: dict[str, Any] = {"messages": HI} if "chat" in path else {"prompt": "Tell me of the sea"}
        body |= {"max_tokens": 16, "seed": 5} | fields
        strike = Strike(self.server.url, self.server.process.log_file, quick=True, answer_seconds=ANSWER_SECONDS)
        answer = await strike.ask(post(path, body, key=NEIGHBOUR_KEY))
        return json.loads(answer.body)["choices"] if answer.status == 200 else answer.outcome

    async def _fill(self, act: Callable[[], Awaitable[None]]) -> None:
        """Fill what the server keeps within bounds after attacks of a kind, such as compiled grammars."""
        until = time.monotonic() + FILL_SECONDS

        async def repeat() -> None:
            while time.monotonic() < until:
                await act()

        async with asyncio.TaskGroup() as group:
            for _ in range(ATTACKERS):
                group.create_task(repeat())

    async def _attack(self, until: float) -> None:
        while time.monotonic() < until:
            await self._random.choice(self._acts)()

    async def _grow(self) -> None:
        form = self._random.choice(self._forms)
        body = form.body(self._random.choice(SIZES))
        await self._strike.ask(post(form.path.replace("{conversation_id}", "none"), body, form.headers))

    async def _generated(self) -> None:
        await self._strike.ask_all(generate(self._random.randrange(2**32), 20), 4)

    async def _bomb(self) -> None:
        await self._strike.ask(post(CHAT, body(schema(self._random.choice(EXPLODING)))))

    async def _resets(self) -> None:
        body = {"prompt": "Tell me of the sea.", "max_tokens": 500, "ignore_eos": True, "stream": True}
        await self._strike.leave_all([post(COMPLETIONS, body)] * 20, 10, after_seconds=0.02)

    async def _half(self) -> None:
        """Leave in the midst of a head, or of a body."""
        whole = post(COMPLETIONS, b" " * 2**20)
        halves = (HEAD.encode(), whole[: self._random.randrange(len(whole))])
        await self._strike.leave_all([self._random.choice(halves)] * 10, 10, after_seconds=0.5)

    async def _slow(self) -> None:
        """Read a stream byte by byte for a while, and leave."""
        connection = await self._strike.connect()
        body = {"prompt": "Hi", "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 5}
        await connection.send(post(COMPLETIONS, body))
        for _ in range(10):
            await connection.reader.read(1)
            await asyncio.sleep(0.2)
        connection.close(reset=True)

    async def _socket(self) -> None:
        """Send messages on a socket, read some of what comes back, and leave in the midst."""
        connection = await self._strike.connect()
        await connection.send(_handshake(urlsplit(self.server.url).netloc))
        hostile = self._random.choice(HOSTILE)
        for _ in range(self._random.randrange(1, 8)):
            fields = {"type": "response.create", "input": "Hi", "store": False, "max_output_tokens": 16}
            fields["stream_id"] = self._random.choice("ab")
            message = b"{%b,%b" % (hostile, json.dumps(fields).encode()[1:])
            await connection.send(_framed(message) + _framed(b"{}") * 20 + EMPTY_PING * 100)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await connection.reader.read(2**16)
        connection.close(reset=self._random.random() < 0.5)

    async def _hog(self) -> None:
        await self._strike.ask_all(sequences(self._strike.number), 1)

    def _count_wrong(self) -> None:
        """Note what is wrong with the answers to the attackers, and forget them."""
        for answer in self._strike.answers:
            sentence = wrong(ACTS, answer)
            if sentence is not None and "without OpenAI's error object" not in sentence:
                self.problems[sentence] += 1
        self._strike.answers.clear()

    def _sample(self) -> Sample:
        pid = self.server.pid
        process = psutil.Process(pid)
        headers = {"authorization": f"Bearer {ATTACKER_KEY}"}
        metrics = parse_metrics(httpx.get(f"{self.server.url}/metrics", headers=headers, trust_env=False).text)

        def value(name: str, **labels: str) -> int:
            return int(sum(each for (at, its), each in metrics.items() if at == name and labels.items() <= set(its)))

        return Sample(
            (time.monotonic() - self._started) / 60,
            process_usage.rss_mib(pid),
            process_usage.peak_rss_mib(pid),
            process.num_fds(),
            process.num_threads(),
            value("oaiserve_kv_blocks", state="used"),
            value("oaiserve_requests_running") + value("oaiserve_requests_waiting"),
            self._strike.num_sent,
            self.num_honest,
            value("oaiserve_time_to_first_token_seconds_count"),
        )


def _handshake(host: str) -> bytes:
    """Return the request for a socket."""
    key = base64.b64encode(os.urandom(16)).decode()
    head = f"GET /v1/responses HTTP/1.1\r\nhost: {host}\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    head += f"sec-websocket-version: {VERSION}\r\nsec-websocket-key: {key}\r\nauthorization: Bearer {ATTACKER_KEY}\r\n"
    return f"{head}\r\n".encode()


def _framed(message: bytes) -> bytes:
    """Return a whole message in one frame, whose mask changes nothing."""
    return b"\x81\xff" + struct.pack(">Q", len(message)) + bytes(4) + message


def _small_grammars() -> list[bytes]:
    """Return requests whose grammars take the places of all that a server keeps. Those of attacks differ by megabytes,
    so memory would depend on which of them came last."""
    return [post(CHAT, body(schema({"type": "boolean"}))) for _ in range(MOST_KEPT)]


def failures(samples: Sequence[Sample], problems: Counter[str]) -> list[str]:
    """Return a sentence for each sign of growth, and for each wrong answer."""
    faults = [sentence if number == 1 else f"{number} times: {sentence}" for sentence, number in problems.items()]
    if not samples:
        return [*faults, "no round has ended"]
    steady = [one.rss_mib for one in samples if one.num_read >= samples[0].num_read + MAX_PROMPTS]
    half = len(steady) // 2
    if half < LEAST_ROUNDS:
        rounds = f"{len(steady)} of {len(samples)} rounds"
        faults.append(f"only {rounds} came after {MAX_PROMPTS:,} prompts: to judge memory, give more --minutes")
    else:
        first, second = (statistics.median(part) for part in (steady[:half], steady[-half:]))
        if second - first > MOST_GROWTH_MIB:
            faults.append(f"memory grew from {first:.0f} to {second:.0f} MiB (medians of the halves that count)")
    for name in ("num_fds", "num_threads"):
        begin, end = (getattr(one, name) for one in (samples[0], samples[-1]))
        if end > begin + MOST_MORE:
            faults.append(f"{name.removeprefix('num_')} grew from {begin} to {end}")
    for name in ("num_blocks", "num_requests"):
        if left := samples[-1]._asdict()[name]:
            faults.append(f"{left} {name.removeprefix('num_')} are left in use")
    return faults


def markdown(samples: Sequence[Sample], found: Sequence[str]) -> str:
    rows = [(f"{one.minute:.1f}", *(f"{value:,.0f}" for value in one[1:])) for one in samples]
    verdict = f"**fails**: {'; '.join(found)}" if found else "holds: flat, nothing left, every honest answer as at rest"
    return "\n".join([*as_markdown([HEAD_OF_TABLE, *rows]), "", f"Verdict: {verdict}."])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="demo")
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--markdown", type=Path, help=f"write the table between the markers '{MARKERS}' of this page")
    arguments = parser.parse_args(argv)
    exit_on_sigterm()
    with oaiserve("keys", arguments.model, [*STORE, *arguments.flags]) as server:
        soak = Soak(server, arguments.seed)
        try:
            asyncio.run(soak.run(arguments.minutes))
        except* (OSError, httpx.HTTPError, psutil.Error) as gone:  # the server has ended, or takes no connection
            soak.problems[f"the soak ended early: {gone.exceptions[0]!r}"] += 1
        faults = failures(soak.samples, soak.problems)
        if (state := server.state()) != "alive":
            faults.append(f"the server {state}")
    results = {"seed": arguments.seed, "samples": [one._asdict() for one in soak.samples], "failures": faults}
    publish(arguments, MARKERS, results, markdown(soak.samples, faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
