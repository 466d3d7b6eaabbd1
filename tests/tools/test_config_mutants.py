"""The tool finds the outcome of each mutant of a config.json."""

from dataclasses import replace
from typing import Any

import pytest

from oaiserve.engine.decoder.facts import Facts, llama
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.settings import Settings
from tools.config_mutants import BY_TENSORS, DECLINED, DIFFERENT, EQUAL, NEUTRAL, UNREFUSED, Original, try_mutant
from tools.config_values import REMOVED

FOREIGN, CONTRADICTED, LEFT_OVER, MISSING, SIZES, TYPE, VALUE = DECLINED


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Original]:
    return {name: Original(name, tmp_path_factory.mktemp(name)) for name in ("bamba", "llama", "qwen2_vl_text")}


@pytest.mark.parametrize(
    ("name", "changes", "outcomes"),
    [
        ("bamba", {"mamba_conv_bias": False}, [CONTRADICTED, EQUAL]),
        ("llama", {"attention_bias": False}, [CONTRADICTED, EQUAL]),  # with the original's weights, and with its own
        ("llama", {"head_dim": 32}, [SIZES, EQUAL]),
        ("llama", {"hidden_act": "quick_gelu"}, [VALUE]),
        ("llama", {"hidden_act": "unheard"}, [VALUE]),
        ("llama", {"initializer_range": REMOVED}, [NEUTRAL]),
        ("llama", {"intermediate_size": 64}, [BY_TENSORS, EQUAL]),
        ("llama", {"num_hidden_layers": 2}, [LEFT_OVER, EQUAL]),
        ("llama", {"num_hidden_layers": 4}, [MISSING, EQUAL]),
        ("llama", {"rms_norm_eps": 0.1}, [EQUAL]),
        ("llama", {"use_cache": None}, [UNREFUSED]),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}, [EQUAL]),
        ("llama", {"sliding_window": 6}, [FOREIGN]),
        ("llama", {"vocab_size": 98}, [SIZES, EQUAL]),
        ("qwen2_vl_text", {"rms_norm_eps": 0.1}, [EQUAL]),
    ],
)
def test_outcomes_of_mutants(
    name: str, changes: dict[str, Any], outcomes: list[str], originals: dict[str, Original]
) -> None:
    assert [outcome for outcome, _ in try_mutant(originals[name], changes)] == outcomes


def test_a_family_that_ignores_a_key_is_found(originals: dict[str, Original], monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(settings: Settings) -> Facts:
        of_llama = llama(settings)
        return replace(of_llama, norm=replace(of_llama.norm, epsilon=1e-6))

    monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], facts=facts))
    assert [outcome for outcome, _ in try_mutant(originals["llama"], {"rms_norm_eps": 0.1})] == [DIFFERENT]
