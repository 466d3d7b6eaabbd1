"""A server with adapters, as a process: what clients ask, load and unload, and what it reports of that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from oaiserve.engine.model.adapted_modules import adaptable
from tests.e2e.conftest import API_KEY, LiveServer, serve_process
from tests.models.adapters import write_adapter
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("adapters")
    shapes = adaptable(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small_model)))
    for seed, name in enumerate(["first", "second"]):
        write_adapter(folder / name, shapes, seed=seed, size=3.0)
    write_adapter(folder / "other", {"model.layers.0.self_attn.q_proj": (7, 8)})
    flags = ("--lora", f"first={folder / 'first'}", "--lora-dir", str(folder), "--api-key", API_KEY)
    with serve_process(str(small_model), folder / "log", *flags, "--served-model-name", "small") as server:
        yield server
        assert server.terminate() == 0


def test_adapters_are_asked_loaded_unloaded_and_reported(server: LiveServer) -> None:
    with server.http() as http:

        def answer(model: str) -> str:
            body = {"model": model, "prompt": "abc", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            found: dict[str, Any] = http.post("/v1/completions", json=body).json()
            assert found["model"] == model
            return found["choices"][0]["text"]  # type: ignore[no-any-return]

        def models() -> dict[str, str | None]:
            return {model["id"]: model["parent"] for model in http.get("/v1/models").json()["data"]}

        assert models() == {"small": None, "first": "small"}
        loaded = http.post("/v1/load_lora_adapter", json={"lora_name": "second", "lora_path": "second"})
        assert loaded.status_code == 200, loaded.text
        assert models() == {"small": None, "first": "small", "second": "small"}
        answers = [answer(model) for model in ("small", "first", "second")]
        assert len(set(answers)) == 3
        assert [answer(model) for model in ("small", "first", "second")] == answers  # from the prefix cache, too
        refused = http.post("/v1/load_lora_adapter", json={"lora_name": "other", "lora_path": "other"})
        assert refused.status_code == 400
        assert "has the shape" in refused.json()["error"]["message"]
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "second"}).status_code == 200
        assert models() == {"small": None, "first": "small"}
        missing = http.post("/v1/completions", json={"model": "second", "prompt": "abc"})
        assert missing.status_code == 404
        assert missing.json()["error"]["message"].endswith("This server serves 'small', 'first'.")

        def num_counted() -> float:
            """Return how many tokens the metrics have of the adapter that is unloaded now."""
            lines = http.get("/metrics").text.splitlines()
            of_adapter = [
                line for line in lines if line.startswith("oaiserve_generation_tokens_total{") and '"second"' in line
            ]
            return sum(float(line.rpartition(" ")[2]) for line in of_adapter)

        wait_until(lambda: num_counted() == 48)
        page = http.get("/metrics").text
        assert 'oaiserve_adapter_requests{model="first",state="running"} 0.0' in page
        assert 'oaiserve_adapter_requests{model="second"' not in page
    logged = {line["model"] for line in server.log() if line.get("operation") == "text_completion"}
    assert logged == {"small", "first", "second"}
