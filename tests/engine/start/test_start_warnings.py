"""What a start warns of about a model's files, every later start warns of, too."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig

from oaiserve.checkpoints.checkpoint import INDEX
from oaiserve.checkpoints.soundness import warn_of_other_weights
from oaiserve.checkpoints.source import find_model
from oaiserve.storage.start_cache import recall, remember, subject
from oaiserve.storage.start_warnings import Warned, collected_warnings, repeat
from tests.engine.remembered import OPTIONS, save, started
from tests.engine.text.tokenizers_for_tests import CHATML
from tests.models.decoders import FAMILIES, byte_tokenizer, random_model
from tests.models.in_blocks import TOKENIZER, TOKENS, config, file_of

SPLITS = "The file does not say how its tokenizer splits texts"


def warnings_of_a_start(path: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING), started(path, **OPTIONS, max_model_len=128):
        pass
    return sorted(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("change", "warning"),
    [
        ({}, SPLITS),
        ({"pre": "default"}, SPLITS),
        ({"pre": "gpt-2", "eos_token_id": 999_999}, "tokenizer.ggml.eos_token_id in model.gguf is 999999, but must be"),
        ({"pre": "gpt-2", "bos_token_id": 300}, "tokenizer.ggml.bos_token_id in model.gguf is 300, but must be"),
        (
            {"pre": "gpt-2", "padding_token_id": 2**32 - 2},
            "tokenizer.ggml.padding_token_id in model.gguf is 4294967294",
        ),
        ({"pre": "gpt-2", "eot_token_id": "end"}, "tokenizer.ggml.eot_token_id in model.gguf is end, but must be"),
    ],
)
def test_each_start_of_a_gguf_file_warns_of_the_same(
    change: dict[str, Any], warning: str, tmp_path: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = config("llama", hidden_size=64, intermediate_size=96, vocab_size=len(TOKENS))
    path = file_of(small, tmp_path, tokenizer={**TOKENIZER, "chat_template": CHATML, **change})
    first = warnings_of_a_start(path, caplog)
    assert sum(warning in message for message in first) == 1, first
    for _ in range(2):
        assert warnings_of_a_start(path, caplog) == first


def beside_an_index(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))


def with_ends(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 70_000, None, -1]}))


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (beside_an_index, "The weights are read from model.safetensors, as transformers does, and not from the files"),
        (with_ends, "eos_token_id in generation_config.json is 70000, but must be the id of a token, from 0 to"),
    ],
)
def test_each_start_of_a_folder_warns_of_the_same(
    change: Callable[[Path], None], warning: str, tmp_path: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = FAMILIES["llama"].to_dict() | {"vocab_size": len(byte_tokenizer())}
    folder = save(random_model(LlamaConfig(**sizes)), tmp_path / "model")
    assert warnings_of_a_start(folder, caplog) == warnings_of_a_start(folder, caplog)
    sound = warnings_of_a_start(folder, caplog)
    change(folder)
    for _ in range(2):
        changed = warnings_of_a_start(folder, caplog)
        assert [message for message in changed if message not in sound] == [
            message for message in changed if warning in message
        ]
        assert sum(warning in message for message in changed) == 1


@pytest.mark.compiler
def test_a_model_whose_only_end_is_not_in_its_vocabulary_is_said_not_to_end(
    tmp_path: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = [*TOKENS[:-1], "<plain>"]
    tokenizer = {**TOKENIZER, "tokens": tokens, "pre": "gpt-2", "eos_token_id": 999_999}
    path = file_of(
        config("llama", hidden_size=64, intermediate_size=96, vocab_size=len(tokens)), tmp_path, tokenizer=tokenizer
    )
    (warning,) = (message for message in warnings_of_a_start(path, caplog) if "eos_token_id" in message)
    assert warning.endswith(
        ": it is ignored, and no other token ends an answer, so each goes on to its limit of tokens"
    )


def test_an_index_that_names_the_file_itself_is_no_reason_to_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(random_model(FAMILIES["llama"]), tmp_path / "model")
    (folder / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")})
    )
    warn_of_other_weights(find_model(folder))
    assert caplog.messages == []


def test_warnings_of_a_library_that_keeps_its_lines_to_itself_are_collected_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = logging.getLogger("transformers.some_part")
    with collected_warnings() as warnings:
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        library.warning("one of %d", 1)
        library.info("not a warning")
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", False)
        library.error("two")
        logging.getLogger("oaiserve.part").warning("three")
    library.warning("after the block")
    assert warnings == [
        Warned("transformers.some_part", logging.WARNING, "one of 1"),
        Warned("transformers.some_part", logging.ERROR, "two"),
        Warned("oaiserve.part", logging.WARNING, "three"),
    ]


def test_a_record_has_the_warnings_that_it_was_written_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OAISERVE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "file.gguf"
    path.write_bytes(b"content")
    about = subject("kind", path, (), options={}, packages=())
    warned = [Warned("oaiserve.part", logging.WARNING, "100 % of it")]
    remember(about, dict, b"", warned)
    assert recall(about).warnings == warned
    repeat(recall(about).warnings)
    assert caplog.record_tuples == [("oaiserve.part", logging.WARNING, "100 % of it")]
