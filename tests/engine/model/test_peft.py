"""Answers with an adapter that PEFT has saved are those that PEFT gives."""

from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.checkpoints.adapters import read_adapter
from oaiserve.engine.model.adapters import load_adapter
from tests.engine.executors.native.small_models import FAMILIES as NATIVE_FAMILIES
from tests.engine.model.runners import PROMPTS, decode, eager_runner
from tests.models.decoders import FAMILIES, generate, random_model
from tests.models.described import described

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own warnings

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "all layers": ("llama", {"r": 8, "lora_alpha": 20, "target_modules": "all-linear"}),
    "rslora": ("qwen3", {"r": 16, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "up_proj"]}),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "rank_pattern": {"v_proj": 3, r"layers.\d+.mlp.down_proj": 5},
            "alpha_pattern": {"v_proj": 9, "model.layers.1.self_attn.q_proj": 2},
        },
    ),
    "the highest rank": ("llama", {"r": 256, "lora_alpha": 32, "target_modules": ["v_proj", "down_proj"]}),
    "rslora with patterns": (
        "llama",
        {
            "target_modules": ["o_proj", "gate_proj"],
            "use_rslora": True,
            "rank_pattern": {"gate_proj": 9},
            "alpha_pattern": {"gate_proj": 3},
            "layers_to_transform": [1],
        },
    ),
    "gates and experts that are shared": (
        "qwen2_moe",
        {"target_modules": ["shared_expert_gate", "shared_expert.down_proj", "k_proj"]},
    ),
    "transposed weights": ("gpt2", {"r": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_answers_are_those_of_peft(case: str, tmp_path: Path) -> None:
    family, config = CONFIGS[case]
    model = random_model((NATIVE_FAMILIES | FAMILIES)[family])
    loaded = described(model)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # This matrix is zero before a training.
                parameter.normal_(std=0.5)
    adapted.save_pretrained(tmp_path)
    runner = eager_runner(loaded, num_blocks=32, block_size=16)
    files = read_adapter(tmp_path)
    runner.add_adapter(1, load_adapter("peft", files, loaded.decoder.adaptable(), loaded.dtype, loaded.device))
    found = decode(runner, PROMPTS, [1, 1, 0, 1], 6)
    for prompt, number, answer in zip(PROMPTS, [1, 1, 0, 1], found, strict=True):
        if number:
            assert answer == generate(adapted, [prompt], 6)[0]
        else:
            with adapted.disable_adapter():
                assert answer == generate(adapted, [prompt], 6)[0]
