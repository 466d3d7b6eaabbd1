"""A configuration says in which dtype a model is served."""

import pytest
import torch
from transformers import LlamaConfig

from oaiserve.engine.model.model_config import select_dtype


@pytest.mark.parametrize(
    ("asked", "config_dtype", "device", "capability", "taken"),
    [
        ("auto", "float32", "cuda", (9, 0), torch.bfloat16),
        ("auto", None, "cuda", (9, 0), torch.bfloat16),  # GPT-2 of the Hub has none, and is in float32
        ("auto", "float32", "cuda", (7, 5), torch.float16),
        ("auto", "float16", "cuda", (9, 0), torch.float16),
        ("auto", "float32", "cpu", (0, 0), torch.float32),
        ("auto", "float16", "cpu", (0, 0), torch.float32),
        ("float32", "float32", "cuda", (9, 0), torch.float32),
    ],
)
def test_a_gpu_computes_models_in_float32_on_its_tensor_cores(
    asked: str,
    config_dtype: str | None,
    device: str,
    capability: tuple[int, int],
    taken: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    config = LlamaConfig(dtype=config_dtype)
    assert select_dtype(asked, config, torch.device(device), is_gguf=False, for_tensor_cores=True) is taken
