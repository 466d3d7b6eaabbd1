"""Model families and GGUF architectures of plug-ins: a type that transformers doesn't have starts and answers."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder import families, settings
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.sources.gguf import architectures
from oaiserve.engine.decoder.sources.gguf.architecture import TURNED, Architecture
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.start.described import describe_model
from oaiserve.errors import StartupError
from oaiserve.plugin import Plugin
from oaiserve.plugin.parts import InnerParts
from oaiserve.plugin_loading import add_models, load, media_of
from tests.engine.doubles import SimulatedEngine
from tests.engine.executors.native.small_models import FAMILIES, config, make_model
from tests.models.decoders import byte_tokenizer
from tests.models.in_blocks import file_of
from tests.plugin_pages import plugins_of_page

# The names that modules of Llama have in files of the page's family.
NAMES = {
    r"^model\.embed_tokens": "tokens",
    r"^model\.layers": "blocks",
    r"^model\.norm": "norm",
    r"^lm_head": "head",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    r"self_attn\.q_proj": "attn.query",
    r"self_attn\.k_proj": "attn.key",
    r"self_attn\.v_proj": "attn.value",
    r"self_attn\.o_proj": "attn.out",
    r"mlp\.(gate|up|down)_proj": r"ffn.\1",
}


@pytest.fixture(autouse=True)
def as_before(tmp_path: Path) -> Iterator[None]:
    """Forget what a test adds. Of modules, only its plug-ins: an extension module can't be imported twice."""
    tables = (families.FAMILIES, architectures.ARCHITECTURES, settings.ALIKE)
    before = [dict(table) for table in tables]
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


def renamed(name: str) -> str:
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def answer(folder: Path) -> str:
    options = EngineOptions(device="cpu", compile=False, cpu_threads=1, kv_blocks=8)
    with SimulatedEngine.from_pretrained(folder, options) as engine:
        return engine.generate(["Once"], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0].text


def test_the_family_of_the_page_gives_the_answers_of_llama_under_its_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))
    llama = tmp_path / "llama"
    make_model(FAMILIES["llama"]).save_pretrained(llama)
    byte_tokenizer().save_pretrained(llama)
    finch = tmp_path / "finch"
    finch.mkdir()
    for file in llama.glob("*.json"):
        (finch / file.name).write_bytes(file.read_bytes())
    tensors = {renamed(name): tensor for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(tensors, finch / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((llama / "config.json").read_text())
    (finch / "config.json").write_text(json.dumps(stated | {"model_type": "finch", "architectures": ["Finch"]}))
    *_, page = plugins_of_page(tmp_path)

    add_models([each.plugin for each in load([str(page)])])

    assert answer(finch) == answer(llama)


def test_an_architecture_of_a_plugin_reads_gguf_files_of_an_added_family(tmp_path: Path) -> None:
    llama = file_of(config("llama", hidden_size=256, head_dim=64), tmp_path)
    finch = tmp_path / "finch.gguf"
    finch.write_bytes(llama.read_bytes().replace(b"llama", b"finch"))
    plugin = Plugin(
        name="finch",
        families=lambda: [Family(type="finch", like="llama")],
        gguf_architectures=lambda: [Architecture(name="finch", type="finch", rows=TURNED)],
    )

    add_models([plugin])

    options = EngineOptions(device="cpu", compile=False)
    as_llama, as_finch = (describe_model(find_model(str(path)), options) for path in (llama, finch))
    assert len(as_finch.decoder.layers) == len(as_llama.decoder.layers)
    assert as_finch.spec.kv_shapes == as_llama.spec.kv_shapes


def broken() -> list[Family]:
    raise ArithmeticError


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (
            Plugin(name="p", families=lambda: [Family(type="llama", is_transposed=True)]),
            "Plug-in 'p' cannot add its models: there is a family 'llama' already.",
        ),
        (
            Plugin(name="p", families=lambda: [Family(type="finch", like="bird")]),
            "Plug-in 'p' cannot add its models: the family 'finch' has `like='bird'`, which is not a known type. Name "
            "the type whose settings its config.json has, such as 'llama'.",
        ),
        (
            Plugin(name="p", gguf_architectures=lambda: [Architecture(name="llama", type="qwen2")]),
            "Plug-in 'p' cannot add its models: there is a GGUF architecture 'llama' already.",
        ),
        (
            Plugin(name="p", gguf_architectures=lambda: [Architecture(name="finch", type="finch")]),
            "Plug-in 'p' cannot add its models: the GGUF architecture 'finch' has the type 'finch', which no family "
            "has.",
        ),
    ],
)
def test_a_family_or_architecture_that_cannot_be_added_stops_the_start(plugin: Plugin, reason: str) -> None:
    with pytest.raises(StartupError) as caught:
        add_models([plugin])
    assert str(caught.value) == reason


def test_media_are_read_by_the_first_plugin_that_can_and_the_log_names_one_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    media: Any = object()
    request: Any = object()
    failing = Plugin(name="bad", inner=InnerParts(media=lambda request, mmproj: media if 1 / 0 else None))
    declining = Plugin(name="none", inner=InnerParts(media=lambda request, mmproj: None))
    reading = Plugin(name="good", inner=InnerParts(media=lambda request, mmproj: media))
    load_media = media_of([Plugin(name="other"), failing, declining, reading])
    assert load_media is not None
    assert load_media(request, None) is media
    assert [record.getMessage() for record in caplog.records] == [
        "Plug-in 'bad' could not make its reader of images and sounds, and has none"
    ]
    assert media_of([Plugin(name="other")]) is None


def test_families_that_raise_another_error_are_left_out_and_the_log_names_the_plugin(
    caplog: pytest.LogCaptureFixture,
) -> None:
    added = Plugin(name="good", families=lambda: [Family(type="finch", like="llama")])
    add_models([Plugin(name="bad", families=broken), added])
    assert [record.getMessage() for record in caplog.records] == [
        "Plug-in 'bad' could not make its models, and has none"
    ]
    assert "finch" in families.FAMILIES
