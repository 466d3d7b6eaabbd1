"""What this project was asked for, and what may never be cut: one test for each of its six parts.

Each part works, has a command, and is marked as promised in tests/features.md. A change that makes one of
these tests fail removes what users were promised.
"""

import gc
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch.profiler import itt

from loadtest.cli import _command_line
from loadtest.cli import main as bench
from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.event_streams import LoopStream, LoopStreams
from oaiserve.engine.request import Finished, Request, SamplingParams, TextPrompt, TokenChunk, TokenPrompt
from oaiserve.engine.requests.output import ChoiceOutput
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.facts.record import Outcome
from oaiserve.runtime import THREADS
from oaiserve.telemetry.metrics import Metrics
from tests.counted import count_hand_overs
from tests.engine.doubles import (
    TOKENIZER,
    BlockedTokenizer,
    Inbox,
    ScriptedRunner,
    make_engine,
    request,
    wait_until_idle,
)
from tests.models.decoders import byte_tokenizer, random_model, real_shape
from tests.routes.doubles import FakeTelemetry
from tests.serving import run_server
from tests.telemetry.exported import OFFSET_NS, spans_of
from tests.telemetry.pages import metrics_of, samples
from tests.world.serving import Place, staying

ROOT = Path(__file__).parent.parent


class Gated(BlockedTokenizer):
    """A tokenizer that notes the thread of each call of `encode`. At the prompt "blocked", it waits for `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def encode(self, prompt: Any) -> list[int]:
        self.threads.append(threading.get_ident())
        return super().encode(prompt)


def text_request(request_id: str, text: str) -> Request:
    return Request(request_id, (TextPrompt(text),), SamplingParams(max_tokens=1))


def test_tokenize_workers_make_submit_a_light_enqueue() -> None:
    """Submit returns while `encode` is blocked, and each prompt is encoded once. Without workers, submit encodes."""
    tokenizer = Gated()
    inbox = Inbox()
    with make_engine(tokenizer=tokenizer, tokenize_workers=1, runtime=THREADS) as engine:
        engine.submit(text_request("a", "blocked"), inbox)  # would never return if it encoded
        engine.submit(text_request("b", "abc"), inbox)
        tokenizer.entered.wait()
        tokenizer.release.set()
        assert inbox.wait_terminal("a", "b").keys() == {"a", "b"}
    assert len(tokenizer.threads) == 2
    assert len({*tokenizer.threads, threading.get_ident()}) == 2, "one worker, and not this thread"
    tokenizer = Gated()
    with make_engine(tokenizer=tokenizer, tokenize_workers=0, runtime=THREADS) as engine:
        engine.submit(text_request("a", "abc"), inbox)
        assert tokenizer.threads == [threading.get_ident()]
        inbox.wait_terminal("a")


class CountedBackend:
    """The backend of a tokenizer. It notes the texts that it encodes, by whichever of its methods."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.encoded: list[str] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)
        if not name.startswith("encode") or not callable(method):
            return method

        def counted(texts: Any, *arguments: Any, **options: Any) -> Any:
            self.encoded += [texts] if isinstance(texts, str) else texts
            return method(texts, *arguments, **options)

        return counted


def test_reuse_of_tokenization_encodes_each_prompt_once_and_token_ids_never() -> None:
    """Token ids are prompts, in process and through HTTP."""
    tokenizer = Tokenizer(TOKENIZER.stored)
    tokenizer.backend = backend = CountedBackend(tokenizer.backend)  # type: ignore[assignment]
    place = Place()
    engine = make_engine(tokenizer=tokenizer, max_step_tokens=64, runtime=place.world)
    ids = TOKENIZER.encode(TextPrompt("abc"))
    assert len(ids) == 3
    app = create_app(Config("demo"), engine, FakeTelemetry(place.world), runtime=place.world)
    with staying(place), place.running(app) as url, place.plain(url) as http:

        def complete(prompt: Any, **body: Any) -> list[str]:
            backend.encoded.clear()
            answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, **body})
            assert answer.status_code == 200, answer.text
            return backend.encoded.copy()

        assert complete("abc") == ["abc"]
        assert complete("abc", stream=True, n=2) == ["abc"]
        assert complete(["abc", "defg"]) == ["abc", "defg"]
        assert complete(ids) == complete([ids, ids]) == complete(ids, stream=True) == []
        chat = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200
        assert ["Who?" in text for text in backend.encoded] == [True]
        backend.encoded.clear()
        of_text = engine.generate(["abc"], SamplingParams(max_tokens=4))
        assert backend.encoded == ["abc"]
        of_ids = engine.generate([ids], SamplingParams(max_tokens=4))
        assert backend.encoded == ["abc"]
    assert of_ids[0].token_ids == of_text[0].token_ids


def test_one_hand_over_per_step_takes_locks_and_wakes_per_step_and_not_per_token() -> None:
    """`--stream-interval N` hands a stream's text over every N tokens."""

    def counted(num_streams: int, interval: int, num_tokens: int = 41) -> Any:
        options = {"max_tokens": num_tokens, "stream_interval": interval}
        requests = [request(f"{index}", **options) for index in range(num_streams)]
        limits = {"max_running": num_streams, "max_step_tokens": 512, "kv_blocks": 1024}
        return count_hand_overs(lambda: make_engine(ScriptedRunner(), runtime=THREADS, **limits), requests)

    of_one = counted(1, 1)
    assert (of_one.num_tokens, of_one.num_steps, of_one.hand_overs, of_one.wake_ups) == (41, 41, 41, 41)
    of_many = counted(32, 1)
    assert of_many.num_tokens == 32 * 41
    assert of_many.hand_overs == of_many.wake_ups <= of_many.num_steps <= 41 + 32
    assert of_many.queue_puts == 0
    longer = counted(32, 1, 81)
    assert longer.num_steps >= 81
    assert longer.locks == of_many.locks <= 2 * 32, "locks are taken for a request, and never for a step or a token"
    every_eighth = counted(1, 8)
    assert every_eighth.hand_overs == every_eighth.wake_ups == 6, "of 1, 8, 8, 8, 8 and 8 tokens"


class Unscanned(dict[str, Any]):
    """Open requests that no code may go through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("somebody scans all open requests")

    items = keys = values = copy = __iter__  # type: ignore[assignment]


def test_finished_events_are_collected_where_they_happen() -> None:
    inbox = Inbox()
    lengths = {"a": 3, "b": 2, "c": 5, "d": 2}
    with make_engine() as engine:
        engine._loop.requests._open = Unscanned()
        for request_id, length in lengths.items():
            engine.submit(request(request_id, max_tokens=length), inbox)
        inbox.wait_terminal(*lengths)
        wait_until_idle(engine)
        engine._loop.requests._open = {}
    for events in inbox.hand_overs:  # an end comes with the last token, in the hand-over of its step
        last = {e.request_id for e in events if isinstance(e, TokenChunk) and e.finish_reason is not None}
        assert last == {event.request_id for event in events if isinstance(event, Finished)}


def test_finished_events_a_client_that_disconnects_leaves_no_queue_no_detokenizer_and_no_block() -> None:
    runner = ScriptedRunner(gated=True)
    engine = make_engine(runner, prefix_cache=False, runtime=THREADS)
    telemetry = FakeTelemetry()
    app = create_app(Config("demo"), engine, telemetry)
    aborted = threading.Event()
    abort = engine.abort

    def noted(request_id: str) -> None:
        abort(request_id)
        aborted.set()

    engine.abort = noted
    body = {"prompt": "abc", "stream": True, "max_tokens": 100}
    runner.permit(2)
    with run_server(app) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # kept, because its end closes the connection
            assert next(lines).startswith("data: ")
            (request_id,) = engine._loop.requests.all()
            assert {type(each) for each in _held(request_id)} == {Request, LoopStream, ChoiceOutput}
        aborted.wait()
        runner.permit(100)
        assert telemetry.next_record().outcome == Outcome.CANCELLED
        wait_until_idle(engine)
        numbers = engine.snapshot()
        assert (numbers.blocks_used, numbers.num_running, numbers.num_waiting, engine.num_waiting) == (0, 0, 0, 0)
        assert len(runner.steps) < 10
        streams: LoopStreams = app.state.serving.streams
        assert (len(streams), streams.held.number, len(streams.held.streams)) == (0, 0, 0)
        assert (len(engine._loop.requests), len(engine._loop.requests.outbox)) == (0, 0)
        gc.collect()
        assert _held(request_id) == []


def _held(request_id: str) -> list[Any]:
    """Return the objects of a request: itself, its queue, and the output of its choice, which has the detokenizer."""
    parts = {
        Request: lambda it: it,
        LoopStream: lambda stream: stream.request,
        ChoiceOutput: lambda output: output._sequence,
    }
    return [
        each
        for each in gc.get_objects()
        if (of := parts.get(type(each))) is not None and of(each).request_id == request_id
    ]


def test_ttft_in_parts_has_the_same_stamps_in_spans_and_histograms() -> None:
    """Tokenize, queue wait and prefill are parts of TTFT, between the stamps of submit, admission and first token."""
    place = Place()
    world = place.world
    telemetry = FakeTelemetry(world)
    engine = make_engine(ScriptedRunner(computing=lambda _: world.sleep(0.01)), runtime=world)
    body = {"prompt": "abc", "max_tokens": 5}
    app = create_app(Config("demo"), engine, telemetry, runtime=world)
    with staying(place), place.running(app) as url, place.plain(url) as http:
        assert http.post("/v1/completions", json=body).status_code == 200
        record = telemetry.next_record()
    times = record.times
    stamps = [times.submitted, times.tokenize_started, times.tokenized, times.scheduled, times.first_token]
    assert stamps == sorted(stamps)  # none is missing
    phases = {phase.name: phase for phase in times.phases()}
    parts = ("receive", "tokenize_wait", "tokenize", "queue", "prefill")
    assert sum(phases[name].duration_ns for name in parts) == times.time_to_first_token_ns
    assert (phases["queue"].start_ns, phases["queue"].end_ns) == (times.tokenized, times.scheduled)
    metrics: Metrics = metrics_of()
    metrics.observe(record)
    page = samples(metrics)
    spans = {span.name: span for span in spans_of(record)}
    for name in ("tokenize", "queue", "prefill"):
        phase = phases[name]
        assert (spans[name].start_time, spans[name].end_time) == (phase.start_ns + OFFSET_NS, phase.end_ns + OFFSET_NS)
        ((_, seconds),) = [
            (labels, value)
            for (sample, labels), value in page.items()
            if sample == "oaiserve_request_phase_seconds_sum" and ("phase", name) in labels
        ]
        assert seconds == pytest.approx(phase.duration_ns / 1e9, rel=1e-9)


LOAD = (
    *("--model", "--prompt", "--prompt-repeats", "--unique-prompts", "--num-requests", "--max-new-tokens"),
    *("--no-stop-on-eos", "--warmup-runs", "--repeat-runs"),
)
ENGINE = (
    *("--device", "--dtype", "--max-batch-size", "--prefill-max-batch-size", "--submit-interval-ms"),
    *("--submit-schedule", "--stream-interval", "--tokenize-workers", "--pretok", "--no-prefix-cache"),
    *("--no-cuda-graph", "--mode", "--nvtx"),
)
LINES = (  # each line of the summary, with what stands beside its title
    *("Model", "Device", "Pretok +off", "Tokenize workers +1", "Stream interval +2", "Paged attention +on"),
    *("CUDA graphs +off", "NVTX +on", "Requests +3 a run", "Prompt tokens", "Completion tokens +12"),
    *(
        r"Submit wall +[\d.]+ ms",
        "Submit interval +1 ms, absolute schedule",
        r"Throughput +[\d,.]+ completion tokens/s",
    ),
    *("ms +mean +p50 +p95 +p99", "Submit lag", "Submit latency", "Tokenize", "Queue wait", "Prefill to first token"),
    *("TTFT", "TPOT", "ITL", "Latency"),
)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny GPT-2 with random weights and a token for each byte."""
    folder = tmp_path_factory.mktemp("gpt2")
    config = real_shape("gpt2-124m", tiny=True)
    random_model(config).save_pretrained(folder)
    byte_tokenizer(config.vocab_size).save_pretrained(folder)
    return folder


def test_the_benchmark_itself_runs_the_engine_in_process_and_prints_every_line(
    gpt2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`oaiserve bench run --target engine`: without HTTP, online and offline, with warm-ups and repeats."""
    pushed: list[str] = []
    encoded: list[Any] = []
    encode = Tokenizer.encode_in_pieces
    monkeypatch.setattr(itt, "range_push", pushed.append)
    monkeypatch.setattr(Tokenizer, "encode_in_pieces", lambda *these: encoded.append(these[1]) or encode(*these))
    load = ["--model", f"{gpt2}", "--device", "cpu", "--prompt", "Hi", "--prompt-repeats", "2", "--unique-prompts"]
    load += ["--num-requests", "3", "--max-new-tokens", "4", "--max-batch-size", "2", "--prefill-max-batch-size", "1"]
    load += ["--seed", "0"]
    load += ["--no-stop-on-eos", "--no-prefix-cache", "--tokenize-workers", "1", "--warmup-runs", "1"]
    online = ["--submit-interval-ms", "1", "--submit-schedule", "absolute", "--stream-interval", "2", "--nvtx"]
    online += ["--repeat-runs", "2", "--json", f"{tmp_path}/online.json"]
    assert bench(["run", "--target", "engine", *load, *online]) == 0
    shown = capsys.readouterr().out
    assert [line for line in LINES if re.search(f"^{line}", shown, re.MULTILINE) is None] == [], shown
    assert "step" in pushed
    assert [prompt.text for prompt in encoded] == [
        f"{seed}-{index}: HiHi" for seed in (0, 1000, 2000) for index in range(3)
    ], "each prompt of the warm-up and of both runs, once"
    (point,) = json.loads((tmp_path / "online.json").read_text())["points"]
    for name in ("send_lag", "submit", "phase_tokenize", "phase_queue", "phase_prefill", "ttft"):
        assert {f"{name}_{share}" for share in ("p50", "p95", "p99")} <= point["summary"].keys(), name
    for run in point["runs"]:
        for row in run["requests"]:
            parts = ("receive", "tokenize_wait", "tokenize", "queue", "prefill")
            assert sum(row["phases"][part] for part in parts) <= row["ttft"] + 1e-6, "the parts are of the same stamps"
    pushed.clear()
    encoded.clear()
    assert bench(["run", "--target", "engine", *load, "--mode", "offline", "--pretok"]) == 0
    assert re.search("^Pretok +on$", capsys.readouterr().out, re.MULTILINE)
    kinds = [type(prompt) for prompt in encoded]
    assert kinds == ([TextPrompt] * 3 + [TokenPrompt] * 3) * 2, "the engine gets the ids of prompts encoded before"
    assert pushed == [], "there are no ranges without --nvtx"


def test_what_was_promised_says_so_in_the_list_of_features() -> None:
    lines = (ROOT / "tests/features.md").read_text().splitlines()
    promised = [line for line in lines if "promised:" in line]
    for name in ("--tokenize-workers", "--stream-interval", "--nvtx", "bench run"):
        assert [line for line in promised if line.startswith("| `") and f"`{name}`" in line.split("|")[1]], name
    of_bench = {name for line in promised if line.startswith("| `bench`:") for name in re.findall("`(--[^`]+)`", line)}
    flags = {flag.replace("--no-", "--") for flag in ENGINE}
    assert flags - {"--device", "--dtype"} <= {flag.replace("--no-", "--") for flag in of_bench}
    command = _command_line("bench")["run"]
    options = {name for each in command.assemble_argument_collection(parse_docstring=True) for name in each.names}
    assert {*LOAD, *ENGINE, "--target"} <= options
