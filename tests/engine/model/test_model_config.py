"""A configuration says whether a model can be served, and in which dtype."""

import pytest
import torch
from transformers import AutoConfig, BertConfig, LlamaConfig, PreTrainedConfig, T5Config

from oaiserve.engine.model.model_config import refuse_unless_decoder_only, select_dtype
from oaiserve.errors import StartupError


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(architectures=["T5ForConditionalGeneration"]), "encoder-decoder"),
        (BertConfig(architectures=["BertForMaskedLM"]), "its architecture is BertForMaskedLM"),
        (AutoConfig.for_model("recurrent_gemma"), "neither a plain KV cache nor a state of a known kind"),
    ],
    ids=["t5", "bert", "recurrent_gemma"],
)
def test_a_config_of_another_kind_of_model_is_refused(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        refuse_unless_decoder_only(config, "the model")


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
