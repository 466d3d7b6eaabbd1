"""Stored keys, batches, recordings and objectives in front of engines of other kinds."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.prompts import Workload, make_calls
from oaiserve.config import OptionError
from oaiserve.errors import StartupError
from oaiserve.plugins.gateway.options import EnginesOptions
from oaiserve.plugins.keys.key_table import KeyTable
from oaiserve.wire.prefix_keys import BYTES_PER_TOKEN
from tests.plugins.gateway.engines.doubles import (
    ASK,
    CHAT,
    STREAM,
    Front,
    RawEngine,
    before,
    event,
    piece,
    stream,
    whole,
)
from tests.plugins.keys.test_stored_keys import parts_in
from tests.world.serving import Place

USAGE = {"prompt_tokens": 9, "completion_tokens": 2}
WHOLE = whole({"id": "x", "choices": [{"index": 0, "message": {"content": "Hi"}}], "usage": USAGE})


@pytest.fixture
def engine(place: Place) -> RawEngine:
    found = RawEngine(place)
    found.answers[CHAT] = WHOLE
    return found


def key_in(place: Place, file: Path, **values: Any) -> dict[str, str]:
    """Store a new key, and return the header with it."""
    with closing(KeyTable(file, lambda: place.world.unix_ns() / 1e9)) as table:
        return {"authorization": f"Bearer {table.add('anna', values)}"}


@contextmanager
def with_keys(place: Place, engine: RawEngine, file: Path) -> Iterator[Front]:
    with before(place, engine, plugins=parts_in(place), stored_keys=True, response_store=file) as front:
        yield front


def test_stored_keys_are_needed_and_their_limits_count_what_engines_say(
    place: Place, engine: RawEngine, tmp_path: Path
) -> None:
    file = tmp_path / "store.db"
    headers = key_in(place, file, role="admin", tokens_per_minute=60)
    with with_keys(place, engine, file) as front:
        assert front.chat().status_code == 401
        answers = [front.chat(headers=headers, body={"max_tokens": 20}) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert "authorization" not in engine.questions()[0].headers
        assert {row["client"] for row in front.listed(**headers) if row["prompt_tokens"]} == {"anna"}


def test_a_stream_without_usage_counts_its_events(place: Place, engine: RawEngine, tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    headers = key_in(place, file, tokens_per_minute=120)
    engine.answers[CHAT] = stream(*[piece("a") for _ in range(30)], event({"choices": []}))
    with with_keys(place, engine, file) as front:
        answers = [front.chat(headers=headers, body={"stream": True, "max_tokens": 30}) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]


def test_a_limited_key_may_use_only_what_is_counted(place: Place, engine: RawEngine, tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    headers = key_in(place, file, requests_per_minute=5)
    engine.answers["/slots"] = whole([])
    with with_keys(place, engine, file) as front:
        assert front.http.get("/slots", headers=headers).status_code == 200
        assert front.http.post("/slots", headers=headers, json={}).status_code == 403


def test_a_key_for_one_model_is_refused_another(place: Place, engine: RawEngine, tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    headers = key_in(place, file, models=["m"])
    with with_keys(place, engine, file) as front:
        assert front.chat(headers=headers).status_code == 200
        assert front.chat(headers=headers, body={"model": "other"}).status_code == 403


def test_batches_are_answered_by_the_engine_two_lines_at_a_time(
    place: Place, engine: RawEngine, tmp_path: Path
) -> None:
    engine.answers[CHAT] = [0.5, *WHOLE]
    with before(place, engine, response_store=tmp_path / "store.db") as front:
        lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": ASK} for n in range(6)]
        content = "\n".join(map(json.dumps, lines)).encode()
        file = front.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("b.jsonl", content)}).json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = front.http.post("/v1/batches", json=body).json()
        front.settle(0.75)
        assert len(engine.questions()) <= 4
        front.settle(10)
        batch = front.http.get(f"/v1/batches/{batch['id']}").json()
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 6)
        output = front.http.get(f"/v1/files/{batch['output_file_id']}/content").text
        assert [json.loads(line)["response"]["body"]["id"] for line in output.splitlines()] == ["x"] * 6


def test_without_a_file_batches_are_the_engines(place: Place, engine: RawEngine) -> None:
    engine.answers["/v1/batches"] = whole({"object": "list", "data": []})
    with before(place, engine) as front:
        assert front.http.get("/v1/batches").json() == {"object": "list", "data": []}


def test_requests_are_recorded_and_judged_by_the_objectives(place: Place, engine: RawEngine, tmp_path: Path) -> None:
    recording = tmp_path / "load.jsonl"
    engine.answers[CHAT] = STREAM
    text = "word " * 400
    with before(place, engine, record_requests=recording, slo="ttft:1s") as front:
        for more in ("one", "another"):
            messages = [{"role": "user", "content": text}, {"role": "user", "content": more}]
            front.chat(body={"stream": True, "messages": messages})
        assert front.metric("oaiserve_slo_requests_total", 'slo="ttft"', 'outcome="met"') == 2
    first, second = make_calls(Workload(requests=recording), seed=1)
    assert len(first.prompt) >= len(text) / BYTES_PER_TOKEN
    num_common = next(place for place, (a, b) in enumerate(zip(first.prompt, second.prompt, strict=False)) if a != b)
    assert num_common >= 448  # seven blocks of 64


def test_stored_keys_need_their_file(place: Place, engine: RawEngine) -> None:
    with (
        pytest.raises(StartupError, match="--stored-keys needs --response-store"),
        before(place, engine, stored_keys=True),
    ):
        pass


def test_wrong_objectives_are_refused() -> None:
    with pytest.raises(OptionError, match="--slo"):
        EnginesOptions(engine=("http://a:1",), slo="soon")
