"""How a model is started, what is compiled, and what is logged without native code."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from oaiserve.checkpoints.source import find_model
from oaiserve.config import Bytes, EngineOptions
from oaiserve.engine.executors.native import build
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.plan import _stored_dtype, compile_early, start_model
from oaiserve.engine.start.request import ON_GPU, Declined, StartRequest
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.engine.start.ways import described
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from tests.engine.doubles import new_world
from tests.engine.executors.native.small_models import FAMILIES, config, make_model
from tests.engine.remembered import OPTIONS, answer, save, started
from tests.models.decoders import generate
from tests.models.in_blocks import TOKENIZER, TOKENS, WIDE, file_of
from tests.models.small_configs import config_of

pytestmark = pytest.mark.compiler
UNKNOWN = config_of("nanochat", vocab_size=256)  # a type without a description
NATIVE = ""
PLAIN = "PyTorch computes the steps; the log says why"
FOREIGN = "transformers' own code computes the steps"
DESCRIBED = "The model starts from a description of its files"


def started_how(caplog: pytest.LogCaptureFixture) -> str:
    """Return how the model has been started."""
    lines = [record.message for record in caplog.records if record.name == "oaiserve.engine.start.plan"]
    (line,) = [line for line in lines if line.startswith("The model starts ")]
    return line


@pytest.mark.parametrize(
    ("asked", "options", "how", "native_step"),
    [
        (FAMILIES["llama"], {}, DESCRIBED, NATIVE),
        (FAMILIES["llama"], {"compile": False}, DESCRIBED, PLAIN),
        (FAMILIES["llama"], {"dtype": "float16"}, DESCRIBED, PLAIN),  # no native code has this type
        (config("llama", hidden_size=72), {}, DESCRIBED, PLAIN),
        (
            UNKNOWN,
            {},
            "The model starts in transformers' own code (not from a description of its files: models of type "
            "'nanochat' have no description)",
            FOREIGN,
        ),
    ],
    ids=["family", "--no-compile", "float16", "odd size", "unknown type"],
)
def test_a_text_model_starts_in_the_fastest_way_that_can(
    asked: PreTrainedConfig,
    options: dict[str, Any],
    how: str,
    native_step: str,
    tmp_path: Path,
    empty_cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "oaiserve")
    save(make_model(asked), tmp_path)
    with started(tmp_path, **OPTIONS, **options) as engine:
        assert engine.features["native_step"] == native_step
    assert started_how(caplog) == how


def test_a_gguf_file_starts_from_its_description_with_and_without_native_code(
    tmp_path: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "oaiserve")
    path = file_of(config("llama", **WIDE | {"vocab_size": len(TOKENS)}), tmp_path, tokenizer=TOKENIZER)
    for options in ({}, {"compile": False}):
        caplog.clear()
        assert len(answer(path, **OPTIONS, **options)[0]) == 12
        assert started_how(caplog) == DESCRIBED


@pytest.mark.parametrize("task", ["embed", "score"])
def test_a_model_that_needs_a_plugin_is_refused_without_it_in_one_sentence(task: str, tmp_path: Path) -> None:
    save(make_model(FAMILIES["llama"]), tmp_path)
    sentence = (
        f"'{tmp_path}' cannot be served for --task {task}: that needs the plug-in 'pooling', which is not loaded."
    )
    with pytest.raises(StartupError) as caught:
        start_model(tmp_path, EngineOptions(task=task), StartTimes(), lambda: None, new_world())
    assert str(caught.value) == sentence


class Refusing:
    """A way of a plug-in that accepts one task, and cannot start anything."""

    name = "as a plug-in does"

    def accepts(self, request: StartRequest) -> str | None:
        return None if request.task == "score" else "it has no scores"

    def start(self, request: StartRequest) -> ServedModel:
        raise StartupError(f"no start of {request.source.path.name}")


def test_a_way_of_a_plugin_is_asked_first(tmp_path: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "oaiserve")
    folder = tmp_path / "model"
    save(make_model(FAMILIES["llama"]), folder)
    with pytest.raises(StartupError, match="^no start of model$"):
        start_model(
            folder, EngineOptions(task="score"), StartTimes(), lambda: None, new_world(), ways=lambda: [Refusing()]
        )
    with started(folder, **OPTIONS, ways=lambda: [Refusing()]):
        assert started_how(caplog) == f"{DESCRIBED} (not as a plug-in does: it has no scores)"


class ElsewhereOnGpu:
    """The way of the plug-in `cuda`, for a model that its family does not describe."""

    name = ON_GPU

    def accepts(self, request: StartRequest) -> str | None:
        return None

    def start(self, request: StartRequest) -> ServedModel:
        raise Declined("models of this type have no description")


@pytest.mark.parametrize("ways", [[], [ElsewhereOnGpu]], ids=["without the plug-in", "declined"])
def test_transformers_code_runs_on_a_gpu_without_a_way_to_start_there_which_the_log_says(
    ways: list[Any],
    tmp_path: Path,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(described, "is_on_cpu", lambda options: False)
    save(make_model(FAMILIES["llama"]), tmp_path)
    with started(tmp_path, **OPTIONS, ways=lambda: [way() for way in ways]) as engine:
        assert FOREIGN in engine.features.values()
    expected = (
        f"Transformers' own code computes '{tmp_path}' on the GPU, which is slower: kernels for it need the plug-in "
        "'cuda', which is not loaded"
    )
    assert [message for message in caplog.messages if "Transformers" in message] == ([] if ways else [expected])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_there_is_refused_without_the_plugin_for_it(tmp_path: Path) -> None:
    save(make_model(FAMILIES["llama"]), tmp_path)
    with pytest.raises(StartupError, match="^--device cuda: torch sees no CUDA device here; "):
        start_model(tmp_path, EngineOptions(device="cuda"), StartTimes(), lambda: None, new_world())


def test_a_tower_is_loaded_by_what_a_plugin_brings_and_the_log_says_that_none_does(
    tmp_path: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = file_of(config("llama", **WIDE | {"vocab_size": len(TOKENS)}), tmp_path, tokenizer=TOKENIZER)
    mmproj = tmp_path / "tower.gguf"
    mmproj.touch()
    asked = []

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "oaiserve.engine.start.plan"]

    def load_media(request: StartRequest, file: Path | None) -> None:
        asked.append((request.source.path, file))

    with started(path, **OPTIONS, mmproj=mmproj, load_media=load_media) as engine:
        assert engine.media == frozenset()
    assert asked == [(path, mmproj)]
    assert warnings() == []
    with started(path, **OPTIONS, mmproj=mmproj) as engine:
        assert engine.media == frozenset()
    assert warnings() == [
        f"Images and sounds of '{path}' are not read: that needs the plug-in 'media', which is not loaded"
    ]


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8"),
        ({"quantize": "int8"}, "--quantize int8"),
        ({"exact": True}, "--exact"),
    ],
)
def test_an_option_that_only_the_native_step_obeys_is_not_ignored(
    options: dict[str, Any], flag: str, tmp_path: Path, empty_cache: Path
) -> None:
    save(make_model(UNKNOWN), tmp_path)
    with pytest.raises(StartupError, match=f"^{flag} needs the native step, which cannot be used: .*'nanochat'"):
        answer(tmp_path, **OPTIONS, **options)
    if flag == "--exact":  # the others refuse --no-compile themselves
        save(make_model(FAMILIES["llama"]), tmp_path)
        with pytest.raises(StartupError, match=f"^{flag} needs the native step, .*: --no-compile is given"):
            answer(tmp_path, **OPTIONS, **options, compile=False)


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CXX", "g++-99", "the compiler g++-99 that CXX names was not found"),
        ("CXX", "false", "false failed: no message"),
        ("PATH", "/nowhere", "no C++ compiler was found (install g++)"),
        (
            "OAISERVE_CACHE",
            "/dev/null/cache",
            "/dev/null/cache/native cannot be written: Not a directory (set OAISERVE_CACHE to another folder)",
        ),
    ],
)
def test_without_native_code_plain_pytorch_answers_after_one_warning(
    variable: str,
    value: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model(FAMILIES["llama"])
    save(model, tmp_path / "model")
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    assert answer(tmp_path / "model", **OPTIONS) == generate(model, [[5, 9, 3, 17]], 12)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("The model runs without native code, which is slower: ")
    assert warnings[0].endswith(reason)
    with pytest.raises(StartupError, match="^--quantize int8 needs the native step, which cannot be used: "):
        answer(tmp_path / "model", **OPTIONS, quantize="int8")


def test_a_start_compiles_native_code_and_the_next_one_finds_it(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(FAMILIES["llama"])
    save(model, tmp_path / "model")
    library = build.build(torch.float32)
    compiled = tmp_path / "compiled"
    compiler = tmp_path / "copying-g++"
    compiler.write_text(
        "#!/bin/sh\nfor out; do :; done\n"
        'case " $* " in *" --version "*) ;; *" -c "*) touch "$out" ;; '
        f'*) echo >> {compiled}; cp {library} "$out" ;; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "other cache"))
    for _ in range(2):
        with started(tmp_path / "model", **OPTIONS) as engine:
            assert engine.features["native_step"] == NATIVE
        assert compiled.read_text() == "\n"


@pytest.mark.parametrize(
    ("stated", "options", "expected"),
    [
        ({"dtype": "bfloat16"}, {}, "bfloat16"),
        ({"torch_dtype": "float16"}, {}, "float16"),  # as older versions wrote it
        ({"quantization_config": {"quant_method": "awq"}, "dtype": "float16"}, {}, "bfloat16"),
        ({"dtype": "float32"}, {"quantize": "int8"}, "bfloat16"),
        ({}, {}, None),
        ([], {}, None),
    ],
)
def test_the_dtype_of_native_code_follows_from_config_json(
    stated: Any, options: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert _stored_dtype(find_model(tmp_path), EngineOptions(**options)) == expected


@pytest.mark.parametrize(
    ("options", "stored", "expected"),
    [
        ({}, "bfloat16", [torch.bfloat16]),
        ({}, "float16", [torch.float32]),  # a CPU computes these in float32
        ({"dtype": "float32"}, "bfloat16", [torch.float32]),
        ({"compile": False}, "bfloat16", []),
        ({"device": "cuda"}, "bfloat16", []),
        ({"task": "embed"}, "bfloat16", []),
        ({}, None, []),
    ],
)
def test_only_what_the_native_step_will_need_is_compiled(
    options: dict[str, Any], stored: str | None, expected: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[torch.dtype] = []
    monkeypatch.setattr(build, "build_beside", compiled.append)
    compile_early(EngineOptions(**options), stored)
    assert compiled == expected


@pytest.mark.parametrize("stored", ["bfloat16", None])
def test_options_that_a_cpu_cannot_obey_are_refused_early_whatever_the_files_say(stored: str | None) -> None:
    options = EngineOptions(device="cpu", kv_cache_memory=Bytes("900000GiB"))
    with pytest.raises(StartupError, match="--kv-cache-memory is 900000GiB, but only "):
        compile_early(options, stored)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_model_len": 10_000_000}, "--max-model-len is 10000000"),
        ({"kv_cache_memory": Bytes("900000GiB")}, "--kv-cache-memory is 900000GiB, but only "),
        ({"quantize": "int8"}, "--quantize int8 is for weights that are not quantized yet"),
    ],
)
def test_options_that_the_header_rules_out_are_refused_before_anything_is_compiled(
    options: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[torch.dtype] = []
    monkeypatch.setattr(build, "build_beside", compiled.append)
    path = file_of(config("llama", **WIDE | {"vocab_size": len(TOKENS)}), tmp_path, tokenizer=TOKENIZER)
    with pytest.raises(StartupError, match=re.escape(says)):
        start_model(path, EngineOptions(device="cpu", **options), StartTimes(), lambda: None, new_world())
    assert compiled == []


def test_weights_that_are_quantized_already_are_refused_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[torch.dtype] = []
    monkeypatch.setattr(build, "build_beside", compiled.append)
    save(make_model(FAMILIES["llama"]), tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(stated | {"quantization_config": quantization}))
    with pytest.raises(StartupError, match="--quantize int8 is for weights that are not quantized yet"):
        start_model(tmp_path, EngineOptions(device="cpu", quantize="int8"), StartTimes(), lambda: None, new_world())
    assert compiled == []


def test_the_tokenizer_is_made_while_native_code_for_a_gguf_file_is_compiled(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = new_world()
    made: list[Tokenizer] = []
    seen: list[bool] = []
    load = Tokenizer.of

    def compile_until_made() -> None:
        seen.append(world.wait_for(lambda: made, 10))

    def make(*arguments: Any, **options: Any) -> Tokenizer:
        made.append(load(*arguments, **options))
        return made[0]

    monkeypatch.setattr(build, "build_beside", lambda dtype: world.begin(compile_until_made))
    monkeypatch.setattr(Tokenizer, "of", make)
    path = file_of(config("llama", **WIDE | {"vocab_size": len(TOKENS)}), tmp_path, tokenizer=TOKENIZER)
    start_model(path, EngineOptions(**OPTIONS), StartTimes(), lambda: None, world)
    assert seen == [True]


def test_parts_of_a_start_are_timed_and_leave_time_to_import_more(tmp_path: Path, empty_cache: Path) -> None:
    save(make_model(FAMILIES["llama"]), tmp_path)
    times = StartTimes()
    called: list[str] = []
    answer(tmp_path, **OPTIONS, times=times, meanwhile=lambda: called.append("meanwhile"))
    assert called == ["meanwhile"]
    parts = ["import of torch", "import of the native step", "weights", "tokenizer"]
    assert [name for name in parts if name in str(times)] == parts


def test_garbage_is_frozen_only_after_an_import_of_transformers(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server collects its garbage once, and then looks only at what the load leaves."""
    calls: list[str] = []
    collector = SimpleNamespace(isenabled=lambda: False, freeze=lambda: calls.append("freeze"))
    monkeypatch.setattr("oaiserve.engine.start.request.gc", collector)
    for small, expected in ((FAMILIES["llama"], []), (UNKNOWN, ["freeze"])):
        folder = tmp_path / small.model_type
        answer(save(make_model(small), folder), **OPTIONS)
        assert calls == expected
