"""A server with adapters, as a process: what clients ask, load and unload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from oaiserve.engine.model.adapted_modules import adaptable
from tests.e2e.conftest import API_KEY, serve_process
from tests.models.adapters import write_adapter


def test_adapters_are_asked_loaded_and_unloaded(small_model: Path, tmp_path: Path) -> None:
    shapes = adaptable(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small_model)))
    for seed, name in enumerate(["first", "second"]):
        write_adapter(tmp_path / name, shapes, seed=seed, size=3.0)
    write_adapter(tmp_path / "other", {"model.layers.0.self_attn.q_proj": (7, 8)})
    flags = ("--lora", f"first={tmp_path / 'first'}", "--lora-dir", str(tmp_path), "--api-key", API_KEY)
    flags += ("--served-model-name", "small")
    with serve_process(str(small_model), tmp_path / "log", *flags) as server, server.http() as http:

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
        assert server.terminate() == 0
