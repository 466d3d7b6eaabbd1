"""Tests the lines that a server prints when it is ready."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from oaiserve import __version__
from oaiserve.checkpoints import demo
from oaiserve.commands import model_banner
from oaiserve.config import Config, EngineOptions
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.screen import Screen
from tests.engine.doubles import make_engine
from tests.engine.text.tokenizers_for_tests import byte_level

FACTS = {"Model": "a model", "Runs on": f"CPU, {'a very long description, ' * 8}which ends"}


@pytest.mark.parametrize("columns", [60, 100])
def test_lines_are_wrapped_but_addresses_and_the_command_stay_whole(columns: int) -> None:
    text = model_banner.of_server(Config("demo"), 8000, "generate", FACTS).text(Screen(lambda: columns))
    lines = text.splitlines()
    assert lines[1] == f"oaiserve {__version__} serves demo at http://127.0.0.1:8000/v1"
    assert "  API       http://127.0.0.1:8000/v1" in lines
    assert "  Chat      http://127.0.0.1:8000/" in lines
    assert max(len(line) for line in lines if "curl" not in line and "-d" not in line) <= columns
    assert "  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\" in lines


def test_without_pages_the_banner_names_none() -> None:
    assert model_banner.of_server(Config("demo"), 8000, "generate", {}, has_pages=False).facts == {
        "API": "http://127.0.0.1:8000/v1"
    }


def test_banner_describes_model_and_device(tmp_path: Path) -> None:
    file = tmp_path / "small-Q4_K_M.gguf"
    file.write_bytes(bytes(2_000_000))
    of_model = {"device": "cpu", "dtype": "bfloat16", "block_bytes": 2**24, "features": {"native_step": ""}}
    engine = make_engine(path=file, default_params={"temperature": 0.2, "top_p": 0.9}, **of_model)
    facts = model_banner.engine_facts(Config(str(file), engine=EngineOptions(cpu_threads=3)), engine)
    assert facts == {
        "Model": f"{file} (-), damaged, 2 MB, up to 256 tokens a request",
        "Runs on": "CPU, 3 threads, native code, bfloat16, KV cache of 256 tokens (1.00 GiB)",
        "Sampling": "temperature 0.2, top_p 0.9 (the model), unless a request sets others",
    }


def test_the_demo_names_a_model_for_real_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "available_bytes", lambda: 12 * 10**9)
    monkeypatch.setattr(demo, "usable_cpus", lambda: 4)
    demo.advice.cache_clear()
    facts = model_banner.engine_facts(Config("demo"), make_engine(device="cpu", dtype="bfloat16"))
    demo.advice.cache_clear()
    assert facts["This demo"] == (
        "is very small. For real work, serve a model that fits this machine: oaiserve serve "
        "unsloth/Qwen3-8B-GGUF:Q4_K_M"
    )


def test_slower_code_is_named(tmp_path: Path) -> None:
    engine = make_engine(path=tmp_path, device="cpu", dtype="float32", features={"native_step": "no code for it"})
    assert "PyTorch, which is slower than native code" in model_banner.engine_facts(Config("m"), engine)["Runs on"]


def test_the_example_of_a_model_with_a_long_name_leaves_it_out(tmp_path: Path) -> None:
    file = tmp_path / f"{'a' * 41}.gguf"
    file.touch()
    shown = model_banner.of_server(Config(str(file)), 8000, "embed", {})
    assert "model" not in shown.example
    assert f"serves {'a' * 41} at" in shown.title
    assert "API page" in shown.facts


def test_a_model_without_a_chat_template_has_an_example_and_an_advice_for_it() -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level()))
    engine = make_engine(tokenizer=tokenizer, device="cpu", dtype="bfloat16")
    facts = model_banner.engine_facts(Config("small"), engine)
    shown = model_banner.of_server(Config("small"), 8000, "complete", facts)
    assert "/v1/completions" in shown.example
    assert "Chat" not in shown.facts
    assert "oaiserve launch" not in shown.closing
    assert facts["No chat"].startswith("The model has no chat template, so it only continues texts")
