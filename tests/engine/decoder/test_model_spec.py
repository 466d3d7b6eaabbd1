"""What serving needs to know of a model follows from its settings and its description, as test_families.py compares."""

from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.engine.decoder.model_spec import model_spec, stored_dtype
from oaiserve.engine.decoder.settings import settings_of
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
