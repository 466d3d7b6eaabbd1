"""Faults planted into the product one at a time, and the number of seeds of the world that find each of them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

MOST_SECONDS = 30  # for a seed of a mutant, which takes two without one


class Mutant(NamedTuple):
    name: str
    module: str
    old: str  # which is there once
    new: str


GATEWAY, UPSTREAM, WATCH = (f"oaiserve.scale.gateway.{name}" for name in ("gateway", "upstream", "watch"))
REQUESTS, SCHEDULER, BLOCKS, STREAMS, STORE, RESPOND, PREPARE = (
    *(
        "oaiserve.engine.open_requests",
        "oaiserve.engine.scheduler",
        "oaiserve.engine.blocks",
        "oaiserve.engine.streams",
    ),
    *("oaiserve.routes.responses.store", "oaiserve.routes.respond", "oaiserve.routes.prepare"),
)
MUTANTS = [
    Mutant("a piece is forgotten", GATEWAY, "asked.sent += pieces", "asked.sent += pieces[1:]"),
    Mutant("streams begin anew", GATEWAY, "asked.sent += pieces", "pass"),
    Mutant("what was sent comes again", RESPOND, "if not event.was_sent:", "if True:"),
    Mutant("the echo comes again", RESPOND, '[b"" for _ in parts] if was_sent else parts', "parts"),
    Mutant("another seed goes on", REQUESTS, "draw_key(seed, choice)", "draw_key(seed + len(request.sent), choice)"),
    Mutant("the gateway's seed is lost", PREPARE, "replace(params, seed=self.exchange.ids.seed)", "params"),
    Mutant("another id goes on", PREPARE, "if exchange.ids is None else exchange.ids[:2]", "if True else None"),
    Mutant("answers are of the past", GATEWAY, "int(time.time())", "int(time.time()) - 900"),
    Mutant("no [DONE] behind an error", GATEWAY, 'sse.event(msgspec.json.encode(body)) + sse.event(b"[DONE]")',
           "sse.event(msgspec.json.encode(body))"),
    Mutant("usage forgets what was sent", REQUESTS, "completion_tokens += len(token_ids)", "completion_tokens += 0"),
    Mutant("silent servers keep streams", WATCH, "upstream.abandon()\n                slow_seconds", "slow_seconds"),
    Mutant("hung engines keep streams", WATCH, "if report.is_hung:", "if False:"),
    Mutant("the watchdog sleeps", "oaiserve.engine.watchdog", "self._num_looks += 1", "return"),
    Mutant("failing servers are not left out", WATCH, "is_enough = ", "is_enough = False and "),
    Mutant("failing servers end streams", GATEWAY, "if begun.answer.status < 500 and begun.answer.status != 429:",
           "if begun.answer.status not in MOVES_ON:"),
    Mutant("shutdowns end streams", RESPOND, "self.exchange.ids is not None and isinstance(", "False and isinstance("),
    Mutant("broken engines answer 500", RESPOND, "is_asked_elsewhere = ", "is_asked_elsewhere = False and "),
    Mutant("nobody looks for another", GATEWAY, "PAUSE_SECONDS = 60.0", "PAUSE_SECONDS = 0.0"),
    Mutant("one server is asked", GATEWAY, "MOST_TRIES = 3", "MOST_TRIES = 1"),
    Mutant("503 moves nothing", GATEWAY, "MOVES_ON = (429, 503)", "MOVES_ON = (429,)"),
    Mutant("silent servers stay out", WATCH, "self.silent.discard(name)\n        self._router", "self._router"),
    Mutant("a cut is an end", UPSTREAM, 'raise CutOff("the replica has closed the connection")', 'return b""'),
    Mutant("connections are kept", UPSTREAM, "self._upstream._forget(self)", "pass"),
    Mutant("bodies are kept", GATEWAY, "        finally:\n            self._received.give_back(client, len(body))\n\n",
           "        finally:\n            pass\n\n"),
    Mutant("requests stay open", GATEWAY, "begun.upstream.num_open -= 1", "pass"),
    Mutant("a header leaks", GATEWAY, 'b"x-content-type-options", KIND_HEADER.encode()}', 'b"x-content-type-options"}'),
    Mutant("marks leak", "oaiserve.facts.continuation", 'b"".join(found[::2])', "content[: len(content) - len(rest)]"),
    Mutant("clients have no address", GATEWAY, 'headers.append((b"x-forwarded-for", client.encode()))', "pass"),
    Mutant("like servers are unlike", GATEWAY, "if not kind or begun.kind != kind:", "if kind:"),
    Mutant("blocks are kept", SCHEDULER, "self._release(sequence)\n        self._unpark", "self._unpark"),
    Mutant("shared blocks are written", BLOCKS, "self._references[block] == 1 and", "self._hashes[block] is None or"),
    Mutant("old text is found", BLOCKS, "del self._published[block_hash]", "pass"),
    Mutant("who waits for a prefix waits for ever", SCHEDULER, "in self._prefixes.publish(sequence, start, end)",
           "in self._prefixes.publish(sequence, start, end)[:0]"),
    Mutant("waiting room is kept", REQUESTS, "self._stop_waiting(opened, opened.num_waiting)", "pass"),
    Mutant("waiting tokens are kept", REQUESTS, "give_back(opened.request.client, opened.waiting_tokens)", "total"),
    Mutant("body bytes are kept", "oaiserve.engine.engine", "partial(self._body_bytes.give_back,", "partial({}.get,"),
    Mutant("streams are kept", STREAMS, "del self._streams[event.request_id]\n            stream", "stream"),
    Mutant("readers are kept", STREAMS, "self._held.streams.discard(self)", "pass"),
    Mutant("ends of encoding are kept", "oaiserve.engine.tokenize", "del self._aborted[request.request_id]", "pass"),
    Mutant("who leaves has no account", "oaiserve.routes.exchange", "            if exchange.stream is None:\n",
           "            if exchange.client_left:\n                pass\n            elif exchange.stream is None:\n"),
    Mutant("a stamp is late", REQUESTS, "times.tokenized = tokenized.at_ns", "times.tokenized = 2**62"),
    Mutant("responses are not stored", STORE, "await asyncio.wrap_future(done)", "pass"),
    Mutant("servers outlive their engine", "oaiserve.http.server", "self.should_exit = True\n        return", "return"),
]  # fmt: skip


class _Planted(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds and loads the module of a mutant with its fault in it."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        path = Path(__file__).parents[2] / (mutant.module.replace(".", "/") + ".py")
        super().__init__(mutant.module, str(path))

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name == self._mutant.module else None

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text()
        assert source.count(self._mutant.old) == 1, f"{self._mutant} is there {source.count(self._mutant.old)} times"
        return compile(source.replace(self._mutant.old, self._mutant.new), self.path, "exec")


def _tried(given: tuple[Mutant, range, float]) -> tuple[Mutant, int, str]:
    """Return how many seeds find a mutant, and what the first one says. This process is for it alone."""
    mutant, seeds, seconds = given
    sys.meta_path.insert(0, _Planted(mutant))

    def stop(*_: object) -> None:
        signal.alarm(1)  # what it meets may catch the error
        raise TimeoutError("the seed takes too long")

    signal.signal(signal.SIGALRM, stop)
    number, said = 0, ""
    for seed in seeds:
        signal.alarm(MOST_SECONDS)
        try:
            from tests.world.hour import live

            wrong = live(seed, seconds).wrong
        except Exception as error:
            if isinstance(error.__context__ or error, AssertionError) and "times" in str(error):
                raise
            wrong = [f"{error!r}"[:300]]
        signal.alarm(0)
        number += bool(wrong)
        said = said or (wrong[0] if wrong else "")
    return mutant, number, said


def try_all(names: list[str], num_seeds: int, first: int, seconds: float) -> int:
    """Print for each mutant by how many seeds it was found. Return 1 if one was not."""
    import transformers  # noqa: F401 - before the processes part

    seeds, num_found = range(first, first + num_seeds), 0
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for mutant, number, said in pool.imap(_tried, [(mutant, seeds, seconds) for mutant in chosen], chunksize=1):
            num_found += number > 0
            print(f"{mutant.name:34}{number:4} of {num_seeds} seeds  {said[:130]}", flush=True)
    print(f"{num_found} of {len(chosen)} faults found")
    return int(num_found < len(chosen))
