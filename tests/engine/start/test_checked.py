"""A model that was checked starts again without transformers, computes the same, and is still compared."""

import json
import logging
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu import build
from oaiserve.engine.request import ChatPrompt
from oaiserve.engine.start import cache, load, stored
from oaiserve.engine.start.cache import cache_key, recall_model, start_checked
from oaiserve.engine.start.stored import StoredFiles, StoredTensors, TooLarge, from_json, to_json
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.facts.start_times import StartTimes
from oaiserve.files.start_cache import NotRemembered, recall
from tests.engine.model.cpu.small_models import FAMILIES, described, make_model
from tests.engine.model.cpu.small_models import load as load_small
from tests.engine.model.runners import greedy
from tests.engine.remembered import answer, save, started
from tests.models.adapters import write_adapter

pytestmark = pytest.mark.compiler
PARTS = ["import of torch", "start cache", "weights and check", "tokenizer"]
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_blocks": 64, "cpu_threads": 1}


@pytest.fixture
def folder(tmp_path: Path, empty_cache: Path, request: pytest.FixtureRequest) -> Path:
    """Return a folder with a small model, of the family that a test names."""
    return save(make_model(FAMILIES[getattr(request, "param", "llama")]), tmp_path / "model")


def started_how(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return how the model has been started, since the last call."""
    found = [record.message for record in caplog.records if record.name == "oaiserve.engine.start.plan"]
    caplog.clear()
    return [line for line in found if line.startswith("The model ")]


@pytest.mark.parametrize("folder", ["llama", "qwen3_5_text"], indirect=True)
def test_a_model_that_was_checked_starts_again_without_transformers_and_answers_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "oaiserve")
    expected = answer(folder, **OPTIONS)
    (line,) = started_how(caplog)
    assert line.startswith(
        "The model starts with expanded weights (not from the start cache: no earlier start has found it with these "
        "options; not to pool: it generates text; "
    )
    with monkeypatch.context() as patch:
        patch.setattr(load, "load_model", None)
        patch.setattr("oaiserve.engine.text.tokenizer._load", None)
        assert answer(folder, **OPTIONS) == expected
    assert started_how(caplog) == ["The model starts from the start cache"]
    assert answer(folder, **OPTIONS, recheck=True) == expected
    (line,) = started_how(caplog)
    assert "(not from the start cache: --recheck asks transformers' code again; " in line


def test_a_model_with_adapters_starts_again_after_a_check_that_had_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(**OPTIONS, lora_dir=folder.parent)
    shapes = {"model.layers.1.mlp.up_proj": (96, 64), "model.layers.0.self_attn.v_proj": (32, 64)}
    given = f"small={write_adapter(folder.parent / 'adapter', shapes, rank=3)}"

    def both_answers() -> list[list[int]]:
        with started(folder, options, lora=(given,)) as engine:
            engine.load_adapter("other", folder.parent / "adapter")
            names = (None, "small", "other")
            *found, again = [engine.generate([[5, 9, 3, 17]], greedy(12), adapter=name)[0].token_ids for name in names]
            engine.unload_adapter("other")
            assert (again, engine.adapters.get("other")) == (found[1], None)
            return found

    expected = both_answers()
    assert expected[0] != expected[1]
    assert len(recall_model(cache_key(folder, options), options).checked.expected) == 6  # three of them with an adapter
    with pytest.raises(NotRemembered):  # what was found without adapters says nothing about them, and the reverse
        recall_model(cache_key(folder, without := EngineOptions(**OPTIONS)), without)
    monkeypatch.setattr(load, "load_model", None)
    assert both_answers() == expected


def test_a_cache_in_eight_bits_is_remembered_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "oaiserve")
    in_eight_bits = {"kv_cache_dtype": "int8", "kv_blocks": None, "kv_cache_memory": 2**20}
    expected = answer(folder, **OPTIONS | in_eight_bits)
    monkeypatch.setattr(load, "load_model", None)
    assert answer(folder, **OPTIONS | in_eight_bits) == expected
    # A token has 3 layers with 2 heads of 16 + 16 numbers, and 2 scales for each head. A block has 16 tokens.
    num_blocks = 2**20 // (16 * 3 * 2 * (16 + 16 + 2 * 4))
    lines = [record.message for record in caplog.records if " KV blocks of " in record.message]
    assert len(lines) == 2
    assert all(f": {num_blocks} KV blocks of 16 tokens (0.00 GiB in int8)" in line for line in lines)
    with pytest.raises(NotRemembered):
        recall_model(cache_key(folder, options := EngineOptions(**OPTIONS)), options)


def test_a_first_start_of_a_server_has_its_garbage_looked_for_only_in_what_the_load_leaves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    collector = SimpleNamespace(isenabled=lambda: False, freeze=lambda: calls.append("freeze"))
    monkeypatch.setattr("oaiserve.engine.start.plan.gc", collector)
    for _ in range(2):  # the second start imports nothing that would be worth it
        answer(folder, **OPTIONS)
    assert calls == ["freeze"]


def test_a_start_counts_its_parts_and_leaves_time_to_import_more(folder: Path) -> None:
    answer(folder, **OPTIONS)
    times, called = StartTimes(), []
    answer(folder, **OPTIONS, times=times, meanwhile=lambda: called.append("meanwhile"))
    assert called == ["meanwhile"]
    assert [name for name in PARTS if name in str(times)] == PARTS


def test_other_weights_are_checked_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    before = answer(folder, **OPTIONS)
    torch.manual_seed(7)
    other = make_model(FAMILIES["llama"])
    with torch.no_grad():
        other.get_input_embeddings().weight.normal_()
    other.save_pretrained(folder)
    started_how(caplog)
    after = answer(folder, **OPTIONS)
    (line,) = started_how(caplog)
    assert "(not from the start cache: model.safetensors has changed; " in line
    assert after != before
    assert answer(folder, **OPTIONS) == after


def test_a_native_step_with_other_logits_than_remembered_is_not_used(folder: Path) -> None:
    answer(folder, **OPTIONS)
    options = EngineOptions(**OPTIONS)
    checked = recall_model(cache_key(folder, options), options)
    start_checked(checked, options, num_blocks=4, num_threads=1)
    other = checked._replace(
        checked=replace(checked.checked, expected=[logits * 1.01 for logits in checked.checked.expected])
    )
    with pytest.raises(NotRemembered, match=r"its outputs differ by 1\.0% from those of transformers' code"):
        start_checked(other, options, num_blocks=4, num_threads=1)


def test_the_library_is_part_of_what_was_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(folder, **OPTIONS)
    options = EngineOptions(**OPTIONS)
    monkeypatch.setattr(build, "_cpu_features", lambda: "another CPU")
    with pytest.raises(NotRemembered, match="the CPU, the compiler or the native code is another"):
        recall_model(cache_key(folder, options), options)


def test_the_code_that_made_a_record_is_part_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(folder, **OPTIONS)
    options = EngineOptions(**OPTIONS)
    code = recall(cache_key(folder, options)).data["code"]
    rooms = {"engine/model/cpu": ("describe", "operations", "pack_weights"), "engine/model/attention": ("rotation",)}
    rooms |= {"engine/start": ("prepare", "check"), "files": ("safetensors_header",)}
    used = {f"{room}/{name}.py" for room, names in rooms.items() for name in names}
    assert used <= code.keys()
    digest = cache._digest

    def changed(path: Path) -> str:
        return digest(path)[:-1] if str(path).endswith(name) else digest(path)

    for name in used:
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_digest", changed)
            with pytest.raises(NotRemembered, match=f"^the code in oaiserve/{name} has changed$"):
                recall_model(cache_key(folder, options), options)


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"compile": False}, {"task": "embed"}])
def test_nothing_is_remembered_of_what_the_native_step_is_not_for(folder: Path, options: dict[str, Any]) -> None:
    assert cache_key(folder, EngineOptions(**OPTIONS | options)) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_description_is_read_as_it_was_written(family: str, tmp_path: Path) -> None:
    loaded = load_small(FAMILIES[family])
    loaded.model.save_pretrained(tmp_path)
    decoder = described(loaded)
    tensors = StoredTensors(tmp_path, loaded.model.named_parameters(remove_duplicate=False))
    written = json.loads(json.dumps(to_json(decoder, tensors)))
    read = from_json(written, StoredFiles(tmp_path, bytearray(b"x" * 64 + tensors.content), 64))
    assert same(read, decoder)
    for layer, before in zip(read.layers, decoder.layers, strict=True):
        # Whether the MLP reads what attention reads is told by these two being one.
        assert (layer.mlp_norm is layer.attention_norm) == (before.mlp_norm is before.attention_norm)
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters() if parameter.dim() == 2)
    if not family.startswith(("gpt2", "gpt_bigcode")):  # whose weights are turned
        in_file = sum(4 * torch.Size(place["shape"]).numel() for place in places(written) if place["file"])
        assert in_file >= 0.9 * weights


def test_weights_are_not_on_the_disk_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_small(FAMILIES["gpt2"])  # whose weights are the other way round in its file
    loaded.model.save_pretrained(tmp_path)
    monkeypatch.setattr(stored, "MOST_BYTES", 1000)
    tensors = StoredTensors(tmp_path, loaded.model.named_parameters())
    with pytest.raises(TooLarge, match="in another form"):
        tensors.place(loaded.model.base_model.h[0].attn.c_attn.weight.T.contiguous())


def test_a_tokenizer_that_is_remembered_is_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = Tokenizer.from_pretrained(folder)
    monkeypatch.setattr("oaiserve.engine.text.tokenizer._load", None)
    second = Tokenizer.from_pretrained(folder)
    assert second.backend.to_str() == first.backend.to_str()
    for name in ("vocab_size", "eos_token_id", "special_token_ids", "special_ids"):
        assert getattr(second, name) == getattr(first, name)
    prompt = ChatPrompt([{"role": "user", "content": "Hello, é!"}])
    assert second.encode(prompt) == first.encode(prompt)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if is_dataclass(one):
        names = [field.name for field in fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)


def places(written: Any) -> list[Any]:
    if isinstance(written, list):
        return [place for item in written for place in places(item)]
    if not isinstance(written, dict):
        return []
    return [written["tensor"]] if "tensor" in written else places(list(written.values()))
