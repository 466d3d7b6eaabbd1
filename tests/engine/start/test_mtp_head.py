"""A checkpoint's own layer for multi-token prediction guesses what its definition says, and changes no answer."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from oaiserve.engine.drafting.draft_model import DraftModel
from oaiserve.engine.step import Step
from oaiserve.errors import StartupError
from tests.engine.answers import collect
from tests.engine.drafting.test_draft_model import Busy
from tests.engine.model.cpu.small_models import FAMILIES, config, make_model
from tests.engine.model.engine_runs import some_requests
from tests.engine.model.runners import greedy
from tests.engine.remembered import save
from tests.engine.start.draft_engines import WAYS, ask, with_drafts

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("empty_cache")]
VOCAB, WIDTH = 256, 64


class Mtp:
    """A model of a family with such a layer of random weights, written to a folder, and the layer as transformers'."""

    def __init__(self, family: str, folder: Path) -> None:
        own = deepcopy(FAMILIES[family])
        own.vocab_size, own.num_nextn_predict_layers = VOCAB, 1
        self.folder = save(make_model(own), folder)
        last = deepcopy(own)
        last.num_hidden_layers, last.first_k_dense_replace, last._attn_implementation = 1, 0, "eager"
        torch.manual_seed(5)
        self.layer: PreTrainedModel = make_model(last).eval()
        self.added = {
            "enorm.weight": torch.rand(WIDTH) + 0.5,
            "hnorm.weight": torch.rand(WIDTH) + 0.5,
            "eh_proj.weight": torch.randn(WIDTH, 2 * WIDTH) / WIDTH**0.5,
        }
        self.layer.save_pretrained(folder / "layer")
        named = {"model.norm.weight": "shared_head.norm.weight", "lm_head.weight": "shared_head.head.weight"}
        named["model.embed_tokens.weight"] = "embed_tokens.weight"
        place = f"model.layers.{own.num_hidden_layers}."
        tensors = load_file(folder / "layer" / "model.safetensors")
        tensors = {named.get(one, one.removeprefix("model.layers.0.")): tensor for one, tensor in tensors.items()}
        file = self.folder / "model.safetensors"
        save_file(load_file(file) | {place + one: tensor for one, tensor in (tensors | self.added).items()}, file)
        self.model = AutoModelForCausalLM.from_pretrained(self.folder)

    def guesses(self, token_ids: list[int], count: int) -> list[int]:
        """Return the greedy guesses at the tokens behind these."""
        hidden = self.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0, :-1]
        found: list[int] = []
        outputs: list[torch.Tensor] = []
        hook = self.layer.model.layers[0].register_forward_hook(
            lambda _, __, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
        while len(found) < count:
            embedded = self.model.get_input_embeddings()(torch.tensor(token_ids[1:] + found))
            both = [self._norm("enorm", embedded), self._norm("hnorm", hidden)]
            fused = torch.cat(both, -1) @ self.added["eh_proj.weight"].T
            found.append(int(self.layer(inputs_embeds=fused[None]).logits[0, -1].argmax()))
            hidden = torch.cat([hidden, outputs[-1].view(-1, WIDTH)[-1:]])
        hook.remove()
        return found

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (WIDTH,), self.added[f"{name}.weight"], self.layer.config.rms_norm_eps)


@pytest.fixture(scope="module", params=["glm4_moe", "deepseek_v3"])
def mtp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mtp:
    return Mtp(request.param, tmp_path_factory.mktemp("models") / "model")


@torch.inference_mode()
def test_it_guesses_what_its_definition_says(mtp: Mtp, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[list[int], list[int]]] = []
    write = DraftModel.write

    def noted(self: DraftModel, step: Step) -> None:
        write(self, step)
        written.extend((one.sequence.token_ids.copy(), [*one.draft]) for one in step.chunks if one.draft)

    monkeypatch.setattr(DraftModel, "write", noted)
    with with_drafts(mtp.folder, "mtp", dtype="float32") as engine:
        monkeypatch.setattr(engine._loop._stepper._drafts, "_look_up", lambda *_: None)
        ask(engine, greedy(24))
    assert len({draft[0] for _, draft in written}) > 5
    for known, draft in written:
        assert draft == mtp.guesses(known, len(draft))


def test_answers_are_the_same(mtp: Mtp, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, sizes = some_requests(2)[:40], {"max_running": 6, "dtype": "float32"}
    with with_drafts(mtp.folder, **sizes) as engine:
        expected = collect(engine, requests)
    with with_drafts(mtp.folder, "mtp", **sizes) as engine:
        drafts = engine._loop._stepper._drafts = Busy(engine._loop._stepper._drafts.model)
        monkeypatch.setattr(drafts, "_look_up", lambda *_: None)
        found = collect(engine, requests)
    found.check(expected, error=0)
    assert found.total("num_model_draft_tokens") > 50


def test_a_later_start_gives_the_same_answers(mtp: Mtp) -> None:
    answers: list[Any] = []
    for _ in range(2):
        with with_drafts(mtp.folder, "mtp") as engine:
            answers.append(ask(engine, WAYS["greedy"])[0])
    assert answers[0] == answers[1]


def test_a_model_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    plain = save(make_model(config("llama", vocab_size=VOCAB)), tmp_path / "plain")
    with pytest.raises(StartupError, match=r"no layer for multi-token prediction .* model.layers.\d+.eh_proj.weight"):
        with_drafts(plain, "mtp")
