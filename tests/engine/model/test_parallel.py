"""A model split over two processes gives the answers of one process, and any end of a process is handled.

The processes use gloo on the CPU.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, PreTrainedConfig

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model import model_config, sampling
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.parallel import group, workers
from oaiserve.engine.model.parallel.executor import ALWAYS_BYTES, Capacity, Needs, ParallelExecutor
from oaiserve.engine.model.parallel.messages import Assignment, BatchShape, Copies, Replay, Work
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.request import Finished, Grammar, Request, SamplingParams, TokenPrompt
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, OutOfMemory, Step
from oaiserve.errors import InternalError, StartupError, Unavailable
from tests.engine.answers import Answers, collect
from tests.engine.doubles import Inbox
from tests.engine.model.gpu.graphs import Plain
from tests.engine.model.graph_worker import FAILS, Again, with_doubles
from tests.engine.model.runners import greedy, greedy_answers
from tests.engine.model.steps import sequence_of
from tests.engine.remembered import save
from tests.models.decoders import FAMILIES, byte_tokenizer, random_model
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
TIMEOUT_SECONDS = 60  # the limit of waits that end within seconds unless something is broken
PROMPTS = [[5, 9, 3, 17], list(range(20, 51)), [90], [7] * 12, [11, 40, 11, 40, 11]]
# With few tokens in a step, prompts are cut into chunks. With few blocks, sequences are preempted.
SMALL_STEPS = {"block_size": 4, "kv_blocks": 32, "max_running": 8, "max_step_tokens": 12}


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of a small model. Its vocabulary has an even number of tokens."""
    config = copy.deepcopy(FAMILIES[family])
    for name, value in {"vocab_size": 96, **changes}.items():
        setattr(config, name, value)
    return config


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that saves a small random model once, and returns its folder."""

    def made(family: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"parallel-{family}"
        if not folder.exists():
            save(random_model(config_of(family)), folder)
        return folder

    return made


@pytest.fixture(scope="module", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let engines of these tests have a temporary folder of their own, so that what is left in it is theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
        yield


@contextmanager
def started(model: Path, tensor_parallel: int, **options: Any) -> Iterator[Engine]:
    """Run an engine, and assert that no process, file or setting of it is left afterwards."""
    threads, excepthook = torch.get_num_threads(), sys.excepthook
    engine = Engine.from_pretrained(
        model, device="cpu", dtype="float32", compile=False, tensor_parallel=tensor_parallel, **options
    )
    pids = worker_pids(engine)
    assert len(pids) == tensor_parallel - 1
    try:
        with engine:
            yield engine
    finally:
        torch.set_num_threads(threads)
    assert not any(is_alive(pid) for pid in pids)
    assert not dist.is_initialized()
    assert sys.excepthook is excepthook
    assert list(Path(tempfile.gettempdir()).glob("oaiserve-*")) == []


def worker_pids(engine: Engine) -> list[int]:
    processes = engine._processes
    return [worker.process.pid for worker in processes._workers] if isinstance(processes, workers.Workers) else []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def capture_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Let both processes have doubles for CUDA graphs."""
    with_doubles(patch)
    patch.setattr(sampling, "triton_sampling", Plain(), raising=False)
    patch.setattr(workers, "WORKER", "tests.engine.model.graph_worker")


def graphs_of(engine: Engine) -> tuple[bool, bool]:
    """Return whether decodes and prompts are replayed."""
    runner = engine._loop._runner
    return runner.has_graphs, runner._prompt_graphs is not None


def answer_all(engine: Engine, prompt_logprobs: int | None = 0) -> Answers:
    """Run all prompts at once, with two answers to each."""
    params = greedy(10, logprobs=2, prompt_logprobs=prompt_logprobs, n=2)
    found = collect(engine, [Request(f"r{i}", (TokenPrompt(prompt),), params) for i, prompt in enumerate(PROMPTS)])
    assert all(isinstance(event, Finished) for event in found.ended.values())
    return found


GRAMMARS = [
    None,
    Grammar("regex", "[A-Z]{2,5}-[0-9]{4}-hello[a-z]*"),
    Grammar("choice", '["IMPOSSIBLE", "ABCABC", "ABCDEF", "xyzxyzxyz"]'),
    Grammar("json_schema", '{"type": "object", "properties": {"ab": {"type": "integer"}}, "required": ["ab"]}'),
]


def answer_under_grammars(engine: Engine) -> dict[tuple[str, int], list[int]]:
    """Return the ids of an answer to each prompt under each grammar, all at once."""
    requests = []
    for i, prompt in enumerate(PROMPTS):
        for j, grammar in enumerate(GRAMMARS):
            params = SamplingParams(max_tokens=16, temperature=1.0, seed=i, ignore_eos=grammar is None, grammar=grammar)
            requests.append(Request(f"{i} {j}", (TokenPrompt(prompt),), params))
    found = collect(engine, requests)
    assert all(isinstance(event, Finished) for event in found.ended.values())
    return found.token_ids


def answer_alone(engine: Engine) -> tuple[list[int], int]:
    """Return the ids of an answer whose grammar forces most of them, and how many it forced.

    How many are forced in a step depends on the other sequences of the step, so this request has to be alone.
    """
    grammar = Grammar("json_schema", '{"const": "hello"}')
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=1, grammar=grammar)
    found = collect(engine, [Request("alone", (TokenPrompt(PROMPTS[0]),), params)])
    assert isinstance(found.ended["alone"], Finished)
    return found.token_ids["alone", 0], found.total("num_forced_tokens")


class Compared(NamedTuple):
    """Holds what one process and two have answered to the same requests."""

    overlap: bool
    is_scarce: bool  # the other process has no room for some steps
    has_graphs: bool
    expected: Answers
    found: Answers
    again: Answers  # with what the first run has left in the prefix cache
    sent: list[Work]  # to the other process, in these two runs
    num_unknown: int  # ids that were not known when a step of these runs was launched
    constrained: list[
        tuple[dict[tuple[str, int], list[int]], tuple[list[int], int]]
    ]  # the answers under grammars: of one, of two
    num_masked_draws: int
    num_out_of_memory: int  # steps


# One family for each way of splitting: a plain one, softcaps, norms of queries and keys. The last two have windows.
@pytest.fixture(
    scope="module",
    params=[
        ("llama", False, False, False),
        ("gemma2", True, False, False),
        ("gemma3", True, True, False),
        ("llama", True, False, True),
    ],
    ids=["llama, in turn", "gemma2, overlap", "gemma3, overlap, scarce", "llama, overlap, graphs"],
)
def compared(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> Compared:
    """Ask an engine with one process, and then one with two. With `overlap`, steps are launched as on a GPU."""
    family, overlap, is_scarce, has_graphs = request.param
    with started(saved(family), 1, **SMALL_STEPS) as engine:
        expected = answer_all(engine)
        constrained = [(answer_under_grammars(engine), answer_alone(engine))]
    sent, num_unknown = list[Work](), 0
    forward, send = ParallelExecutor.forward, workers.Workers.send

    def counting_forward(self: ParallelExecutor, batch: Batch) -> torch.Tensor:
        nonlocal num_unknown
        num_unknown += len(batch.unknown_rows)
        return forward(self, batch)

    def recording_send(self: workers.Workers, work: Work) -> None:
        sent.append(work)
        send(self, work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelExecutor, "forward", counting_forward)
        patch.setattr(workers.Workers, "send", recording_send)
        if overlap:  # as on a GPU, ids that a step draws are copied into the next step on the device
            always = property(lambda _: True, lambda _self, _value: None)
            patch.setattr(ModelRunner, "is_asynchronous", always, raising=False)
        if is_scarce:
            patch.setattr(workers, "WORKER", "tests.engine.model.scarce_worker")
        if has_graphs:
            capture_as_on_a_gpu(patch)
        # Drafts are for steps that do not overlap.
        with started(saved(family), 2, **SMALL_STEPS, drafts="off" if overlap else "auto") as engine:
            found, again = answer_all(engine), answer_all(engine, prompt_logprobs=None)
            of_runs = sent.copy(), num_unknown
            constrained.append((answer_under_grammars(engine), answer_alone(engine)))
            ended = engine.snapshot()
        assert Again.released_in_group == [True] * has_graphs  # NCCL's group cannot be left before
    counts = ended.num_masked_draws, ended.num_out_of_memory
    return Compared(overlap, is_scarce, has_graphs, expected, found, again, *of_runs, constrained, *counts)


def test_answers_are_those_of_one_process(compared: Compared) -> None:
    overlap, is_scarce, has_graphs, expected, found, again, sent, num_unknown, *_ = compared
    assert len({tuple(token_ids) for token_ids in expected.token_ids.values()}) == len(PROMPTS)
    found.check(expected, error=1e-3)
    again.check(replace(expected, prompt_logprobs={}), error=1e-3)
    # The run had the situations that this test is about.
    assert any(isinstance(work, Copies) for work in sent), "no block was copied"
    replayed = {work for work in sent if isinstance(work, Replay)}
    if has_graphs:
        assert replayed == {Replay("decodes", size) for size in (1, 2, 4, 8)} | {Replay("prompts", 12)}
        num_eager = sum(isinstance(work, BatchShape) for work in sent)  # with log-probabilities of prompts
        assert num_eager < sum(isinstance(work, Replay) for work in sent)
    else:
        assert not replayed
    assert any(1 < length < 12 for work in sent if isinstance(work, BatchShape) for length in work.query_lens)
    assert again.num_preemptions > 0
    assert sum(event.usage.cached_tokens for event in again.ended.values()) > 0
    assert (num_unknown > 0) == overlap
    assert (compared.num_out_of_memory > 10) == is_scarce


def test_answers_under_grammars_are_those_of_one_process(compared: Compared) -> None:
    """Masks and forced tokens are the engine's, and the other process has to follow what comes of them."""
    (expected, expected_alone), (found, alone) = compared.constrained
    assert found == expected
    assert alone == expected_alone
    assert alone[1] == len('hello"')
    assert compared.num_masked_draws > 20
    text = byte_tokenizer().decode(found["0 1", 0])
    assert re.fullmatch("[A-Z]{2,5}-[0-9]{4}-hello[a-z]*", text) or len(found["0 1", 0]) == 16


@pytest.mark.parametrize("has_graphs", [False, True], ids=["in a step", "in a replay"])
def test_a_killed_worker_stops_the_engine_and_fails_its_requests(
    saved: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, has_graphs: bool
) -> None:
    if has_graphs:
        capture_as_on_a_gpu(monkeypatch)
    with started(saved("llama"), 2, **SMALL_STEPS) as engine:
        assert graphs_of(engine) == (has_graphs, has_graphs)
        (pid,) = worker_pids(engine)
        inbox, long = Inbox(), greedy(100)
        os.kill(pid, signal.SIGSTOP)
        engine.submit(Request("r", (TokenPrompt([5, 9, 3]),), long), inbox)
        wait_until(lambda: engine._loop.requests.num_left_waiting == 1)  # from now on, the server waits for the worker
        os.kill(pid, signal.SIGKILL)
        failed = inbox.wait_terminal("r")["r"]
        assert isinstance(failed.error, InternalError)
        assert not engine.is_ready
        assert str(engine.failure) == "The process with part 1 of the model was ended by SIGKILL."
        with pytest.raises(Unavailable):
            engine.submit(Request("late", (TokenPrompt([5]),)), Inbox())
    assert "The engine has stopped" in caplog.text


def test_a_capture_that_fails_at_a_worker_is_off_at_all_with_one_warning(
    saved: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(saved("llama"), 1, **SMALL_STEPS) as engine:
        expected = greedy_answers(engine, PROMPTS)
    capture_as_on_a_gpu(monkeypatch)
    monkeypatch.setenv(FAILS, "yes")
    caplog.set_level(logging.INFO)
    with started(saved("llama"), 2, **SMALL_STEPS) as engine:
        assert graphs_of(engine) == (False, True)
        assert greedy_answers(engine, PROMPTS) == expected
    lines = [(record.levelname, record.message) for record in caplog.records if "of decodes: off" in record.message]
    assert len(lines) == 2
    (worker_level, of_worker), (own_level, own) = sorted(lines, key=lambda line: line[0], reverse=True)
    assert (worker_level, own_level) == ("WARNING", "INFO")
    assert of_worker.startswith("Worker 1: ")
    assert of_worker.endswith("RuntimeError: a graph too many")
    assert own.endswith("another part of the model has a problem with it")


def test_an_error_in_a_worker_stops_an_idle_engine_and_is_logged(
    saved: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with started(saved("llama"), 2) as engine:
        engine._processes.send(Copies([(0, 10**9)]))
        assert group.all_agree(True)
        wait_until(lambda: not engine._loop.is_alive)
        assert not engine.is_ready
        assert str(engine.failure).startswith("The process with part 1 of the model failed (")
    assert "Worker 1 failed\nTraceback" in caplog.text


def test_workers_end_when_the_server_is_killed(saved: Callable[[str], Path], tmp_path: Path) -> None:
    program = (
        "import sys; from oaiserve.engine.engine import Engine;"
        f"engine = Engine.from_pretrained({str(saved('llama'))!r}, device='cpu', tensor_parallel=2);"
        "engine.start(); print(engine._processes._workers[0].process.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True) as server:
        pid = int(server.stdout.readline())
        assert is_alive(pid)
        server.kill()
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: not any(tmp_path.glob("oaiserve-*")))


def test_the_server_raises_the_startup_error_of_a_worker(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "Assignment", lambda *task: Assignment(*task)._replace(model=Path("/nowhere/model")))
    with pytest.raises(StartupError, match="/nowhere/model"), started(saved("llama"), 2):
        pass


def test_a_worker_that_does_not_start_is_noticed(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    message = "The process with part 1 of the model ended with exit code 1."
    with pytest.raises(StartupError, match=message), started(saved("llama"), 2):
        pass


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (config_of("gpt2"), 2, "transformers does not know how to split a model of type 'gpt2'."),
        (AutoConfig.for_model("doge"), 2, "keys of its own heads, and the masks of all. Leave --tensor-parallel out"),
        (AutoConfig.for_model("gpt_oss"), 2, "can only share out whole experts of models of type 'gpt_oss'"),
        (config_of("llama"), 3, "'m' has 4 attention heads, which are to be split evenly. .* model: 1, 2."),
        (config_of("llama"), 4, "--tensor-parallel is 4, but 'm' has 2 key-value heads"),
        (config_of("llama", vocab_size=97), 2, "'m' has 97 tokens in its vocabulary, .* model: 1."),
        (config_of("llama", intermediate_size=49), 2, "'m' has 49 values between the layers of its MLP"),
        (None, 2, "--tensor-parallel 2 is not for GGUF files; 'm' is one."),
    ],
)
def test_a_model_that_cannot_be_split_into_so_many_parts_is_refused(
    config: PreTrainedConfig | None, size: int, message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        model_config.refuse_unless_divisible(config or config_of("llama"), size, "m", is_gguf=config is None)


def test_a_refused_model_starts_no_process(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(StartupError, match="2 key-value heads"), started(saved("llama"), 4):
        pass


@pytest.mark.parametrize(
    ("device", "count", "message"),
    [
        ("cuda", 1, "--tensor-parallel is 2, but torch sees 1 CUDA devices here."),
        ("cpu", 1, "--tensor-parallel 2 with --device cpu needs CUDA_VISIBLE_DEVICES="),
    ],
)
def test_members_without_suitable_devices_are_refused(
    device: str, count: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    with pytest.raises(StartupError, match=message):
        group.place(torch.device(device), group.Member(1, 2, lambda _: None))


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    before = dict(os.environ)
    with group.environment(1):
        assert os.environ["LOCAL_RANK"] == "1"
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"  # a setting of the user is kept
    assert dict(os.environ) == before


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> workers.Workers:
    """Return a supervisor without worker processes, and collectives that do nothing."""
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: None)
    monkeypatch.setattr(group, "all_agree", lambda yes: yes)
    return workers.Workers("nowhere", EngineOptions())


def parallel_runner(no_workers: workers.Workers, capacity: Capacity | None = None) -> ModelRunner:
    loaded = prepare(random_model(config_of("llama")))
    own = EagerExecutor.with_cache(loaded, num_blocks=4, block_size=4)
    tables = BlockTables(2, 4, 4, loaded.device)
    executor = ParallelExecutor(own, no_workers, capacity or Capacity(), tables)
    return ModelRunner(executor, loaded.device, 4, tables=tables, check_results=no_workers.check)


def one_step() -> Step:
    return Step([Chunk(sequence_of([5, 9, 3], [0], temperature=0.0), 0, 3)])


def test_results_are_not_used_after_a_worker_has_ended(no_workers: workers.Workers) -> None:
    runner = parallel_runner(no_workers)
    launched = runner.launch(one_step())  # on a GPU, a worker may end while the step is computed
    no_workers.failure = RuntimeError("gone")
    with pytest.raises(RuntimeError, match="gone"):
        runner.collect(launched)
    with pytest.raises(RuntimeError, match="gone"):
        runner.launch(one_step())


def test_a_device_that_waits_for_a_worker_that_has_ended_is_not_waited_for(no_workers: workers.Workers) -> None:
    runner = parallel_runner(no_workers)
    launched = runner.launch(one_step())

    num_asked = count()

    def never_arrives() -> bool:
        if next(num_asked) == 2:
            no_workers.failure = RuntimeError("gone")
        return False

    launched.samplings[0][1].read_back.arrived = SimpleNamespace(query=never_arrives)
    with pytest.raises(RuntimeError, match="gone"):
        runner.collect(launched)


def test_a_step_without_room_is_not_begun_and_may_be_repeated(no_workers: workers.Workers) -> None:
    spec = prepare(random_model(config_of("llama")))
    needs = Needs.of_model(spec, 4, largest_step_bytes=1000, max_step_tokens=10)
    row = 2 * 96 * 4
    assert needs == (100, row, 4 * 2 * 2 * 8 * 4)
    memory = SimpleNamespace(free=ALWAYS_BYTES + 3 * 100 + row - 1)
    memory.fits = lambda needed: needed <= memory.free
    runner = parallel_runner(no_workers, Capacity(memory, needs))
    with pytest.raises(OutOfMemory, match="a member of the model that is split has no room"):
        runner.launch(one_step())
    with pytest.raises(OutOfMemory):
        runner.copy_blocks([(0, 1)] * 9)
    memory.free += 1
    assert len(runner.collect(runner.launch(one_step())).chunks) == 1
    runner.copy_blocks([(0, 1)])


def test_a_step_that_takes_more_than_expected_is_not_repeated(
    no_workers: workers.Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = parallel_runner(no_workers)

    def no_memory(self: EagerExecutor, batch: Batch) -> torch.Tensor:
        raise torch.OutOfMemoryError("1 GiB")

    monkeypatch.setattr(EagerExecutor, "forward", no_memory)
    with pytest.raises(RuntimeError, match="No memory for a step of a model that is split over devices: 1 GiB"):
        runner.launch(one_step())


def test_members_on_gpus_do_not_wait_for_each_other_when_they_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: done.append("abort"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroy"))
    group.leave(broken=True)
    group.leave(broken=False)
    assert done == ["abort", "abort"]
