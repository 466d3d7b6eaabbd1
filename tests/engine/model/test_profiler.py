"""torch's profiler records the steps of a small random model, and NVTX gets its ranges in order."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.started import assemble
from oaiserve.engine.start.ways.expanded import start_on_cpu
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.engine.doubles import TIMEOUT_SECONDS, Inbox, request
from tests.models.decoders import byte_tokenizer


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Iterator[Engine]:
    options = EngineOptions(block_size=4, kv_blocks=64, max_running=8, max_step_tokens=8, compile=False)
    with Engine(assemble(start_on_cpu(loaded, options), Tokenizer(byte_tokenizer()), options), options) as engine:
        yield engine


def test_a_trace_has_the_steps_with_their_sizes_and_the_operations_in_them(engine: Engine, tmp_path: Path) -> None:
    for number in range(2):  # the profiler can be started twice
        inbox = Inbox()
        asked = engine.profile(4, timeout_seconds=TIMEOUT_SECONDS)
        engine.submit(request("r", prompt_len=12, max_tokens=9, ignore_eos=True), inbox)
        inbox.wait_terminal("r")
        profile = asked.result(TIMEOUT_SECONDS)
        path = tmp_path / f"{number}.json.gz"
        profile.recording.save(path)
        assert sorted(file.name for file in tmp_path.iterdir()) == [f"{n}.json.gz" for n in range(number + 1)]
        trace = json.loads(gzip.decompress(path.read_bytes()))
        ranges = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
        launches = [event for event in ranges if event["name"].startswith("launch ")]
        prefills = [8, 4] if number == 0 else [4]  # the second time, the prefix cache has the first blocks
        sizes = [f"launch prefill, 1 sequence, {tokens} tokens" for tokens in prefills]
        sizes += ["launch decode, 1 sequence, 1 token"] * (4 - len(sizes))
        assert [event["name"] for event in sorted(launches, key=lambda event: event["ts"])] == sizes
        parts = {event["name"].partition(" ")[0] for event in ranges}
        assert {"commands", "schedule", "launch", "wait", "process", "hand_over"} <= parts
        operations = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
        for launch in launches:
            end = launch["ts"] + launch["dur"]
            assert any("mm" in o["name"] and launch["ts"] <= o["ts"] < end for o in operations), launch["name"]
