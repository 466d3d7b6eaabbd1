"""What serving needs to know of a model follows from its settings and its description, as test_families.py compares."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.engine.decoder.model_spec import model_spec, stored_dtype
from oaiserve.engine.decoder.settings import settings_of
from oaiserve.engine.decoder.spec import KVShape
from tests.engine.decoder.test_dense_families import described


@pytest.mark.parametrize(
    ("stated", "dtype"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),  # as older files call it
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, torch.bfloat16),
        ({"dtype": "auto"}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_the_stored_dtype_is_what_a_file_states(stated: dict[str, str], dtype: torch.dtype) -> None:
    assert stored_dtype(settings_of({"model_type": "llama", **stated})) == dtype


@pytest.mark.parametrize(
    ("of_model", "of_generation", "ids"),
    [
        (2, {}, {2}),
        (None, {}, set()),
        ([2, 7], {"eos_token_id": 9}, {2, 7, 9}),
        (2, {"eos_token_id": [2, 3]}, {2, 3}),
        (-1, {}, set()),
    ],
)
def test_an_answer_ends_with_the_ids_of_the_model_or_its_generation_settings(
    of_model: Any, of_generation: dict[str, Any], ids: set[int], tmp_path: Path
) -> None:
    settings = settings_of({"model_type": "llama", "eos_token_id": of_model})
    decoder = described(tmp_path, "llama")
    spec = model_spec(settings, decoder, dtype=torch.float32, device=torch.device("cpu"), generation=of_generation)
    assert spec.eos_token_ids == ids
    assert spec.name == "llama"  # The file names no architecture.


DOCS = Path(__file__).parents[3] / "docs" / "performance.md"
PUBLISHED = Path(__file__).with_name("published_configs")
WITH_LATENT_VECTORS: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": json.loads((PUBLISHED / "deepseek-v2-lite-chat.json").read_text()),
    "GLM-4.7-Flash": {"model_type": "glm4_moe_lite"},  # It has the defaults of its type.
    "DeepSeek-V3": json.loads((PUBLISHED / "deepseek-v3.json").read_text()),
}


@pytest.mark.parametrize("model", WITH_LATENT_VECTORS)
def test_the_documented_bytes_of_latent_vectors_are_those_of_a_cache(model: str) -> None:
    own = settings_of(WITH_LATENT_VECTORS[model])
    heads = own["num_attention_heads"]
    plain = KVShape(heads, own["qk_nope_head_dim"] + own["qk_rope_head_dim"], own["v_head_dim"])
    shapes = replace(plain, latent_dim=own["kv_lora_rank"] + own["qk_rope_head_dim"]), plain
    of_token = [own["num_hidden_layers"] * shape.num_bytes(torch.bfloat16) for shape in shapes]
    row = "".join(f" {number:,} |" for number in of_token)
    assert f"\n| {model} |{row}\n" in DOCS.read_text()
