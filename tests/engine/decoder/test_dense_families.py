"""What settings that no pinned model has change in the descriptions of dense families, or have them refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oaiserve.engine.decoder.description import Attention, Decoder, Matrix, NotKnown
from tests.models.decoders import random_model
from tests.models.described import decoder_in
from tests.models.fingerprints import text_of
from tests.models.small_configs import config_of

_OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64}
_FOR_EACH_HEAD = "weights of (its|their) own for each head"


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("cohere", {"use_qk_norm": True}, rf"norm 'model\.layers\.0\.self_attn\.q_norm' has {_FOR_EACH_HEAD}"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "its tokens see those behind them"),
        ("llama", {"hidden_act": "mish"}, "its activation is mish"),
        ("olmo", {"clip_qkv": 8.0}, "it limits queries, keys and values"),
        ("opt", {**_OPT, "do_layer_norm_before": False}, "it norms the hidden state itself"),
        ("opt", {**_OPT, "word_embed_proj_dim": 32}, "it projects its embedding"),
        ("opt", {**_OPT, "_remove_final_layer_norm": True}, "it has no norm behind its layers"),
        ("opt", {**_OPT, "layer_norm_elementwise_affine": False}, "its norms have no weights"),
        ("stablelm", {"qk_layernorm": True}, _FOR_EACH_HEAD),
    ],
)
def test_a_family_refuses_what_a_description_cannot_say(
    model_type: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(NotKnown, match=reason):
        described(tmp_path, model_type, **changes)


def test_embeddings_of_fewer_positions_than_a_sequence_may_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotKnown, match="embeddings of 128 positions, and its sequences 129"):
        described(tmp_path, "gpt2", length=129)


@pytest.mark.parametrize(
    ("changes", "scalings"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, [1 / 4, 1 / 8, 1 / 12]),
        ({"scale_attn_weights": False}, [1.0, 1.0, 1.0]),
    ],
)
def test_settings_of_gpt2_scale_its_scores(changes: dict[str, Any], scalings: list[float], tmp_path: Path) -> None:
    description = [one.parameters.scaling for one in attention_of(described(tmp_path, "gpt2", **changes))]
    assert description == pytest.approx(scalings, rel=1e-12)


@pytest.mark.parametrize(("model_type", "softcap"), [("gemma2", 2.0), ("vaultgemma", 2.0), ("gemma3_text", None)])
def test_gemma3_does_not_limit_scores_whatever_its_settings_say(
    model_type: str, softcap: float | None, tmp_path: Path
) -> None:
    decoder = described(tmp_path, model_type, attn_logit_softcapping=2.0)
    assert {one.parameters.softcap for one in attention_of(decoder)} == {softcap}


def test_gpt_bigcode_with_keys_for_each_head_sorts_rows_by_head(tmp_path: Path) -> None:
    model = random_model(config_of("gpt_bigcode", multi_query=False))
    model.save_pretrained(tmp_path)
    stored = model.transformer.h[0].attn.c_attn.weight.detach().view(4, 3, 16, 64)  # by head: query, key, value
    result = attention_of(decoder_in(tmp_path, length=128))[0]
    (matrix,) = matrices_of(result)
    assert result.shape.kv_heads == 4
    assert torch.equal(torch.as_tensor(matrix.weight), stored.transpose(0, 1).reshape(192, 64))


def test_layers_of_granite_have_rotary_tables_of_their_own(tmp_path: Path) -> None:
    decoder = described(tmp_path, "granite_swa", layer_rope_theta=[0, 10000.0, 500.0])
    tables = [one.rotary for one in attention_of(decoder)]
    assert tables[0] is None
    angles = [torch.atan2(table.sines[1, 1], table.cosines[1, 1]) for table in tables if table is not None]
    assert [float(angle) for angle in angles] == pytest.approx([10000.0 ** (-1 / 8), 500.0 ** (-1 / 8)])


@pytest.mark.parametrize(
    ("model_type", "changes", "windows", "rotates"),
    [
        ("exaone4", {"sliding_window": None}, [None] * 5, "11111"),
        ("exaone4", {"sliding_window": 6}, [6, 6, 6, None, 6], "11101"),
        ("cohere2", {"sliding_window": 6}, [6, 6, 6, None, 6], "11101"),
        ("smollm3", {"sliding_window": 6}, [None] * 5, "11101"),
        ("smollm3", {"sliding_window": 6, "use_sliding_window": True}, [None, None, None, 6, None], "11101"),
        ("gemma3_text", {"sliding_window": 6}, [6] * 5, "11111"),
        ("olmo3", {"sliding_window": 6}, [6, 6, 6, None, 6], "11111"),
    ],
)
def test_layers_have_windows_and_rotate_by_the_rules_of_their_family(
    model_type: str, changes: dict[str, Any], windows: list[int | None], rotates: str, tmp_path: Path
) -> None:
    description = attention_of(described(tmp_path, model_type, num_hidden_layers=5, **changes))
    assert [one.parameters.sliding_window for one in description] == windows
    assert [one.rotary is not None for one in description] == [digit == "1" for digit in rotates]


def test_a_tied_head_keeps_its_bias(tmp_path: Path) -> None:
    decoder = described(tmp_path, "phi", tie_word_embeddings=True)
    assert decoder.head.weight is decoder.embedding
    assert decoder.head.bias is not None


@pytest.mark.parametrize(
    ("model_type", "old", "new", "without_effect"),
    [
        ("gpt2", "transformer.", "", ["h.0.attn.bias", "h.2.attn.masked_bias", "lm_head.weight"]),
        ("gpt_neox", "lm_head.", "embed_out.", ["gpt_neox.layers.0.attention.bias"]),
        ("gpt_neox", "attention.dense.", "attention.dense.", ["gpt_neox.layers.1.attention.rotary_emb.inv_freq"]),
        ("llama", "model.", "", ["layers.0.self_attn.rotary_emb.inv_freq"]),
        ("opt", "model.decoder.", "decoder.", ["lm_head.weight"]),
    ],
)
def test_files_of_all_ages_are_read(
    model_type: str, old: str, new: str, without_effect: list[str], tmp_path: Path
) -> None:
    changes = _OPT if model_type == "opt" else {}
    expected = text_of(described(tmp_path, model_type, **changes))
    file = tmp_path / "model.safetensors"
    tensors = {name.replace(old, new): tensor.clone() for name, tensor in load_file(file).items()}
    tensors |= {name: torch.ones(97, 64) for name in without_effect}
    if "lm_head.weight" in without_effect:
        embedding = next(name for name in tensors if name.endswith(("wte.weight", "embed_tokens.weight")))
        tensors["lm_head.weight"] = tensors[embedding].clone()
    save_file(tensors, file)
    assert text_of(decoder_in(tmp_path, length=128)) == expected


def described(folder: Path, model_type: str, length: int = 128, **changes: Any) -> Decoder:
    random_model(config_of(model_type, **changes)).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))  # `config_of` leaves out what is None
    return decoder_in(folder, length=length)


def attention_of(decoder: Decoder) -> list[Attention]:
    return [layer.attention for layer in decoder.layers if layer.attention is not None]


def matrices_of(attention: Attention) -> list[Matrix]:
    assert isinstance(attention.qkv, list)
    return attention.qkv
