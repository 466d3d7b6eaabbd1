"""A draft head guesses what it was trained to guess, from the model's own hidden states, and changes no answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from oaiserve.engine.drafting.draft_model import DraftModel
from oaiserve.engine.step import Step
from oaiserve.errors import StartupError
from tests.engine.answers import collect
from tests.engine.drafting.test_draft_model import Busy
from tests.engine.model.cpu.small_models import config, make_model
from tests.engine.model.engine_runs import some_requests
from tests.engine.model.runners import greedy
from tests.engine.remembered import save
from tests.engine.start.draft_engines import ask, with_drafts

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("empty_cache")]
VOCAB, LAYERS, DRAFT_VOCAB = 256, 8, 96
WIDTH, INNER, HEADS, KV_HEADS, DIM = 64, 96, 4, 2, 16
EPSILON = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model(config("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS))
    return save(made, tmp_path_factory.mktemp("models") / "model")


class Head:
    """A head with random weights, written to a folder, and its guesses computed as its form is defined."""

    def __init__(self, folder: Path, *, dialect: str = "midlayer.", **settings: Any) -> None:
        torch.manual_seed(3)
        layer = {
            "hidden_norm": (WIDTH,),
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
            "self_attn.q_proj": (HEADS * DIM, 2 * WIDTH),
            "self_attn.k_proj": (KV_HEADS * DIM, 2 * WIDTH),
            "self_attn.v_proj": (KV_HEADS * DIM, 2 * WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * DIM),
            "mlp.gate_proj": (INNER, WIDTH),
            "mlp.up_proj": (INNER, WIDTH),
            "mlp.down_proj": (WIDTH, INNER),
        }
        shapes = {"fc": (WIDTH, 3 * WIDTH), "norm": (WIDTH,), "lm_head": (DRAFT_VOCAB, WIDTH), **layer}
        if settings.pop("has_embedding", False):
            shapes["embed_tokens"] = (VOCAB, WIDTH)
        self.tensors = {
            name: torch.randn(shape) * (2 / shape[-1]) ** 0.5 + (len(shape) == 1) for name, shape in shapes.items()
        }
        self.ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        self.layers = settings.get("eagle_aux_hidden_state_layer_ids", (2, LAYERS // 2, LAYERS - 3))
        self.norms_residual = settings.get("norm_before_residual", False)
        self.folder = folder
        folder.mkdir()
        files = {f"{dialect if name in layer else ''}{name}.weight": one for name, one in self.tensors.items()}
        save_file(files | {"d2t": self.ids - torch.arange(DRAFT_VOCAB)}, folder / "model.safetensors")
        sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "head_dim": DIM}
        sizes |= {"num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "rms_norm_eps": EPSILON}
        sizes |= {"vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB, "max_position_embeddings": 128}
        self.config = LlamaConfig(**sizes)
        own = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **sizes, **settings}
        (folder / "config.json").write_text(json.dumps(own))

    def guesses(
        self, model: PreTrainedModel, token_ids: list[int], count: int, allowed: Sequence[int] | None
    ) -> list[int]:
        """Return the greedy guesses at the tokens behind these."""
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0, :-1] for layer in self.layers], -1)
        hidden = features @ self.tensors["fc"].T
        found: list[int] = []
        embedding = self.tensors.get("embed_tokens", model.get_input_embeddings().weight)
        while len(found) < count:
            out = self._layer(embedding[torch.tensor(token_ids[1:] + found)], hidden)
            logits = self._norm("norm", out[-1]) @ self.tensors["lm_head"].T
            if allowed is not None:
                logits[~torch.isin(self.ids, torch.tensor(allowed))] = -torch.inf
            found.append(int(self.ids[logits.argmax()]))
            hidden = torch.cat([hidden, out[-1:]])
        return found

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.tensors[name], EPSILON)

    def _layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        normed = self._norm("hidden_norm", hidden)
        x = torch.cat([self._norm("input_layernorm", embedded), normed], -1)
        q, k, v = (
            (x @ self.tensors[f"self_attn.{kind}_proj"].T).unflatten(-1, (-1, DIM)).transpose(0, 1)[None]
            for kind in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(self.config)(x, torch.arange(len(x))[None]))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        out = (normed if self.norms_residual else hidden) + mixed @ self.tensors["self_attn.o_proj"].T
        y = self._norm("post_attention_layernorm", out)
        inner = F.silu(y @ self.tensors["mlp.gate_proj"].T) * (y @ self.tensors["mlp.up_proj"].T)
        return out + inner @ self.tensors["mlp.down_proj"].T


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"dialect": "layers.0.", "norm_before_residual": True, "has_embedding": True},
        {"eagle_aux_hidden_state_layer_ids": [0, 3, LAYERS - 1]},
    ],
    ids=["common", "speculators", "own layers"],
)
@torch.inference_mode()
def test_it_guesses_what_its_form_says(
    model: Path, form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind prompts, behind guesses that came true or did not, and behind a prompt from the prefix cache."""
    head, expected = Head(tmp_path / "head", **form), AutoModelForCausalLM.from_pretrained(model)
    written: list[tuple[list[int], list[int] | None, list[int]]] = []
    write = DraftModel.write

    def noted(self: DraftModel, step: Step) -> None:
        write(self, step)
        for chunk in step.chunks:
            if chunk.draft:
                one = chunk.sequence
                written.append((one.token_ids.copy(), one.params.allowed_token_ids, [*chunk.draft]))

    monkeypatch.setattr(DraftModel, "write", noted)
    few = tuple(head.ids[:3].tolist())  # of which a guess often comes true
    with with_drafts(model, head.folder, dtype="float32") as engine:
        monkeypatch.setattr(engine._loop._stepper._drafts, "_look_up", lambda *_: None)
        ask(engine, greedy(24))
        _, num_drafted, num_accepted = ask(engine, greedy(24, allowed_token_ids=few))
    assert 5 < num_accepted < num_drafted
    assert len({draft[0] for _, _, draft in written}) > 5
    for known, allowed, draft in written:
        assert draft == head.guesses(expected, known, len(draft), allowed)


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"kv_blocks": 7}], ids=str)
def test_answers_are_the_same(
    model: Path, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and seeded, with penalties, bad words, grammars, log-probabilities, stops, choices and preemptions."""
    requests, sizes = some_requests(2)[:60], {"max_running": 6, "dtype": "float32", **options}
    with with_drafts(model, **sizes) as engine:
        expected = collect(engine, requests)
    with with_drafts(model, Head(tmp_path / "head").folder, **sizes) as engine:
        drafts = engine._loop._stepper._drafts = Busy(engine._loop._stepper._drafts.model)
        monkeypatch.setattr(drafts, "_look_up", lambda *_: None)
        found = collect(engine, requests)
    found.check(expected, error=0)
    assert (found.num_preemptions > 0) == ("kv_blocks" in options)
    assert found.total("num_model_draft_tokens") > 100


def test_what_the_model_keeps_for_it_counts_in_the_memory_that_is_asked_for(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kv_blocks": None, "kv_cache_memory": 2**21, "dtype": "float32"}
    alone = with_drafts(model, **options).snapshot().blocks_total
    both = with_drafts(model, Head(tmp_path / "head").folder, **options).snapshot().blocks_total
    of_layer = 2 * KV_HEADS * DIM
    assert both == alone * LAYERS * of_layer // ((LAYERS + 1) * of_layer + WIDTH)


def test_a_head_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    head = Head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[1, 2, LAYERS])
    with pytest.raises(StartupError, match=r"before the layers \(1, 2, 8\), and the model has 8"):
        with_drafts(model, head.folder)
    narrow = save(make_model(config("llama", vocab_size=VOCAB, hidden_size=32)), tmp_path / "narrow")
    with pytest.raises(
        StartupError, match=r"reads 192 numbers of a token, and the model's three hidden states have 96"
    ):
        with_drafts(narrow, head.folder)
    few = save(make_model(config("llama", vocab_size=128, num_hidden_layers=LAYERS)), tmp_path / "few", 128)
    with pytest.raises(StartupError, match="it has ids that the model lacks"):
        with_drafts(few, head.folder)
    (head.folder / "model.safetensors").unlink()
    save_file({"fc.weight": head.tensors["fc"]}, head.folder / "model.safetensors")
    with pytest.raises(StartupError, match="has no norm.weight"):
        with_drafts(model, head.folder)
