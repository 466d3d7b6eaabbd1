"""Native code is compiled beside the first parts of a start, in the dtype that the start will need."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu import build
from oaiserve.engine.start.plan import _saved_dtype, compile_early

DECODER = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**DECODER, "dtype": "bfloat16"}, "bfloat16"),
        ({**DECODER, "torch_dtype": "float16"}, "float16"),  # as older versions wrote it
        (DECODER, None),
        ({"architectures": ["BertModel"], "dtype": "float32"}, None),
        ([], None),
    ],
)
def test_the_dtype_is_that_of_a_decoders_config(config: Any, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _saved_dtype(tmp_path) == expected
    assert _saved_dtype(tmp_path / "model.gguf") is None  # which has no config file


@pytest.mark.parametrize(
    ("options", "saved", "expected"),
    [
        ({}, "bfloat16", [torch.bfloat16]),
        ({}, "float16", [torch.float32]),  # which a CPU computes in
        ({"dtype": "float32"}, "bfloat16", [torch.float32]),
        ({"compile": False}, "bfloat16", []),
        ({"device": "cuda"}, "bfloat16", []),
        ({"task": "embed"}, "bfloat16", []),
    ],
)
def test_only_what_the_native_step_will_need_is_compiled(
    options: dict[str, Any], saved: str, expected: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[torch.dtype] = []
    monkeypatch.setattr(build, "build_beside", compiled.append)
    compile_early(EngineOptions(**options), saved)
    assert compiled == expected
