"""Published config.json files are read as transformers reads them, and nothing that they state declines their models.

The files are in published_configs/, whose README says where each comes from.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from oaiserve.engine.decoder.context_length import context_length
from oaiserve.engine.decoder.describe import describe
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.keys import refuse_ignored, unknown
from oaiserve.engine.decoder.model_spec import model_spec
from oaiserve.engine.decoder.settings import is_wrapper, settings_of
from oaiserve.engine.decoder.sources.hub import HubTensors
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.decoder.sources.wrapped_names import own_name
from oaiserve.engine.model import model_config
from oaiserve.engine.model.transformers_files.wrapper import text_config
from tests.engine.decoder.test_settings import ROWS, TABLE, differences, of_class

# Files of Kimi Linear state a scaling of rotary embeddings, which its class doesn't have.
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
FOLDER = Path(__file__).with_name("published_configs")
FILES: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def _text_type(file: dict[str, Any]) -> str:
    """Return the model type of the text model."""
    name: str = file["model_type"]
    return TABLE["wrappers"][name]["text"] if is_wrapper(file) else name


CONFIGS = {name: file for name, file in FILES.items() if _text_type(file) in ROWS}
DECLINED = {"embeddinggemma-300m": "tokens see those behind"}
DESCRIBED = [
    name for name, file in CONFIGS.items() if settings_of(file)["model_type"] in FAMILIES and name not in DECLINED
]
_LAYERS = 8  # These include all kinds of layers of all files.
_LISTS_BY_LAYER = ("attn_type_list", "layer_types")
# The keys that a start logs as unknown.
UNKNOWN = {
    **dict.fromkeys(("deepseek-v2-lite-chat", "deepseek-v2.5"), "aux_loss_alpha scoring_func seq_aux"),
    "deepseek-v3": "scoring_func",
    "exaone-4.5-33b": "mtp_loss_scaling_factor mtp_share_layers",
    "gemma-2-27b": "sliding_window_size",
    "gpt-oss-20b": "experts_per_token initial_context_length",
    "gpt2": "n_ctx",
    "hunyuan-mt-7b": "attention_head_dim use_rotary_pos_emb",
    "kimi-linear-48b-a3b-instruct": "use_grouped_topk",
    "lfm2.5-vl-1.6b": (
        "block_dim block_norm_eps block_use_swiglu block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init "
        "use_pos_enc"
    ),
    "minimax-m2.7": "attn_type_list num_mtp_modules qk_norm_type scoring_func use_mtp use_routing_bias",
    "nemotron-h-56b-base-8k": "attention_head_dim",
    **dict.fromkeys(("qwen3.5-27b", "qwen3.5-35b-a3b"), "attn_output_gate full_attention_interval mamba_ssm_dtype"),
    "smollm2-135m-instruct": "is_llama_config transformers.js_config",
    **dict.fromkeys(("starcoder2-7b", "starcoder2-15b"), "mlp_type norm_type"),
}


class _Shapes(TensorFiles):
    """Tensors that have shapes and no numbers, except for single numbers, which are 1."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return torch.ones(tensor.shape) if tensor.numel() == 1 else tensor


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_are_those_of_the_class(name: str) -> None:
    expected = _text_of_class(CONFIGS[name])
    settings = settings_of(CONFIGS[name])
    assert differences(expected, settings) == {}
    assert str(expected.dtype).removeprefix("torch.") == str(settings["dtype"])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_longest_sequence_is_that_of_the_class(name: str) -> None:
    file = CONFIGS[name]
    text = _text_of_class(file)
    text.attention_chunk_size = None  # It limits the length only without a description.
    assert context_length(settings_of(file)) == model_config.context_length(text)


@pytest.mark.parametrize("name", DESCRIBED)
def test_layers_have_windows_and_rotation_as_in_the_class(name: str) -> None:
    expected = _text_of_class(CONFIGS[name])
    settings = settings_of(CONFIGS[name])
    facts = FAMILIES[settings["model_type"]].facts(settings)
    kinds = getattr(expected, "layer_types", None) or ["sliding_attention"] * expected.num_hidden_layers
    window = getattr(expected, "sliding_window", None)
    assert facts.windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)
    is_rotated = [bool(one) for one in getattr(expected, "no_rope_layers", None) or [1] * len(kinds)]
    if expected.model_type == "exaone4":
        is_rotated = [kind == "sliding_attention" for kind in kinds]
    if getattr(expected, "rope_parameters", None) is None:
        is_rotated = [False] * len(kinds)
    attend = [number for number, kind in enumerate(kinds) if kind.endswith("_attention") and kind != "linear_attention"]
    assert [facts.rotates[number] for number in attend] == [is_rotated[number] for number in attend]


@pytest.mark.parametrize("name", DESCRIBED)
def test_nothing_in_the_file_declines_the_description(name: str) -> None:
    file = _cut(CONFIGS[name])
    settings = settings_of(file)
    family = FAMILIES[settings["model_type"]]
    tensors = HubTensors(
        _Shapes(_tensors_of(file)),
        family.names,
        torch.bfloat16,
        is_transposed=family.is_transposed,
        has_transposed_experts=family.has_transposed_experts,
    )
    decoder = describe(tensors, settings, family, length=64)
    refuse_ignored(settings)
    spec = model_spec(settings, decoder, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert len(decoder.layers) == _text_of_class(file).num_hidden_layers
    assert spec.vocab_size == _text_of_class(file).vocab_size
    assert " ".join(unknown(settings)) == UNKNOWN.get(name, "")


@pytest.mark.parametrize("name", DECLINED)
def test_a_file_of_another_kind_of_model_declines_the_description(name: str) -> None:
    settings = settings_of(CONFIGS[name])
    with pytest.raises(NotKnown, match=DECLINED[name]):
        FAMILIES[settings["model_type"]].facts(settings)


def test_the_readme_has_a_row_for_each_file() -> None:
    rows = [line.split("|") for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert sorted(row[1].strip().strip("`") for row in rows) == sorted(FILES)


def _text_of_class(file: dict[str, Any]) -> PreTrainedConfig:
    """Return the class's configuration of the text model."""
    config = of_class(file)
    if not is_wrapper(file):
        return config
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    if getattr(text, "rope_parameters", None):
        text.standardize_rope_params()
    served = text_config(config)
    assert served is not None
    for key in ("dtype", "tie_word_embeddings"):  # The wrapper may state these.
        setattr(text, key, getattr(served, key))
    # What the wrapper states comes before a default of the text model's class, as in transformers' generate().
    stated = file.get("text_config", {}).get("eos_token_id") or file.get("eos_token_id")
    text.eos_token_id = stated or served.eos_token_id
    return text


def _cut(file: dict[str, Any]) -> dict[str, Any]:
    """Return a file with fewer layers."""
    cut = deepcopy(file)
    for part in (cut, cut.get("text_config", {})):
        for key in ("num_hidden_layers", "n_layer"):
            if key in part:
                part[key] = min(part[key], _LAYERS)
        for key in _LISTS_BY_LAYER:
            if key in part:
                part[key] = part[key][:_LAYERS]
        of_delta_nets = part.get("linear_attn_config", {})
        for key in ("full_attn_layers", "kda_layers"):  # numbers of layers, from 1 on
            if key in of_delta_nets:
                of_delta_nets[key] = [number for number in of_delta_nets[key] if number <= _LAYERS]
    return cut


def _tensors_of(file: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors as in the model's files, by the names of its text model."""
    config = of_class(file)
    of_wrapper = is_wrapper(file)
    with torch.device("meta"):
        if of_wrapper:
            model = getattr(transformers, file["architectures"][0])(config)
        else:
            model = AutoModelForCausalLM.from_config(config)
    untied = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    tensors = revert_weight_conversion(model, untied)
    names = {name: own_name(name) if of_wrapper else name for name in tensors}
    return {own: tensors[name] for name, own in names.items() if own is not None}
