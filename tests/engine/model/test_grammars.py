"""Greedy answers under a grammar are those of a plain loop over the model: mask, argmax, push."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oaiserve.engine import results
from oaiserve.engine.engine import Engine
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import Failed, Grammar, Request, SamplingParams, TokenPrompt
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import InvalidRequest
from tests.engine.answers import collect
from tests.engine.grammars.plain import allowed_ids, plain_answer
from tests.engine.model.runners import eager_runner, make_engine
from tests.models.decoders import FAMILIES, byte_tokenizer, random_model

EOS = 40  # the token "I", which is no text therefore
PROMPTS = [[5, 9, 3, 17, 60], [90, 4, 4], [7] * 6, [11, 40, 12], [80]]
GRAMMARS = [
    Grammar("regex", "[A-Z]{2,5}-[0-9]{4}-hello[a-z]*"),
    Grammar("choice", '["IMPOSSIBLE", "ABCABC", "ABCDEF", "xyzxyzxyz"]'),
    Grammar("json_schema", '{"type": "object", "properties": {"ab": {"type": "integer"}}, "required": ["ab"]}'),
]


def eager_engine(loaded: LoadedModel, *, overlap: bool) -> Engine:
    runner = eager_runner(loaded, num_blocks=200, block_size=4)
    runner.is_asynchronous = overlap
    sizes = {"block_size": 4, "max_running": 8, "max_step_tokens": 24}
    return make_engine(loaded, runner, 200, max_model_len=64, eos=EOS, **sizes)


@torch.inference_mode()
def best_of(model: PreTrainedModel, ids: list[int], mask: np.ndarray) -> int:
    """Return the id with the highest logit of those that a mask allows."""
    logits, allowed = model(torch.tensor([ids])).logits[0, -1].float(), allowed_ids(mask)
    return allowed[int(logits[allowed].argmax())]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_greedy_answers_are_those_of_mask_and_argmax(
    loaded: LoadedModel, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FEW_TOKENS", 100)
    engine, plain_model = eager_engine(loaded, overlap=overlap), random_model(FAMILIES["llama"])
    grammars = Grammars(
        Tokenizer(byte_tokenizer()).backend, vocab_size=engine.vocab_size, eos_token_ids=frozenset([EOS])
    )
    requests = [
        Request(
            f"{i} {kind.kind}", (TokenPrompt(prompt),), SamplingParams(max_tokens=24, temperature=0.0, grammar=kind)
        )
        for i, prompt in enumerate(PROMPTS)
        for kind in GRAMMARS
    ]
    with engine:
        found = collect(engine, requests)
    for asked in requests:
        matcher, prompt = grammars.compile(asked.params.grammar).matcher(), list(asked.prompts[0].token_ids)
        draw = partial(best_of, plain_model)
        expected, _ = plain_answer(matcher, prompt, asked.params, draw, eos=EOS, vocab_size=97)
        assert found.token_ids[asked.request_id, 0] == expected
    assert found.total("num_forced_tokens") > 20


def test_a_mask_and_other_parameters_that_leave_no_token_end_the_request_only(loaded: LoadedModel) -> None:
    engine = eager_engine(loaded, overlap=False)
    grammar = Grammar("regex", "[a-c]+")
    with engine:
        free, wrong = (
            list(
                engine.stream(
                    Request("r", (TokenPrompt([5, 9]),), SamplingParams(max_tokens=5, grammar=grammar, **others))
                )
            )
            for others in ({}, {"allowed_token_ids": (5, 6)})
        )
        assert engine.failure is None
    assert not isinstance(free[-1], Failed)
    assert isinstance(wrong[-1].error, InvalidRequest)
    assert wrong[-1].error.param == "response_format"
    assert "'response_format', 'allowed_token_ids'" in str(wrong[-1].error)
