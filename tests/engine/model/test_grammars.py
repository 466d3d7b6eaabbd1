"""Greedy answers under a grammar are those of a plain loop over the model: mask, argmax, push."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oaiserve.config import EngineOptions
from oaiserve.engine import results
from oaiserve.engine.engine import Engine
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.request import Failed, Grammar, Request, SamplingParams, TokenPrompt
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import InvalidRequest
from tests.engine.doubles import Inbox
from tests.engine.grammars.plain import allowed_ids
from tests.engine.model.runners import eager_runner
from tests.models.decoders import FAMILIES, byte_tokenizer, random_model

EOS = 40  # the token "I", which is no text therefore
PROMPTS = [[5, 9, 3, 17, 60], [90, 4, 4], [7] * 6, [11, 40, 12], [80]]
GRAMMARS = [
    Grammar("regex", "[A-Z]{2,5}-[0-9]{4}-hello[a-z]*"),
    Grammar("choice", '["IMPOSSIBLE", "ABCABC", "ABCDEF", "xyzxyzxyz"]'),
    Grammar("json_schema", '{"type": "object", "properties": {"ab": {"type": "integer"}}, "required": ["ab"]}'),
]


def make_engine(*, overlap: bool) -> tuple[Engine, PreTrainedModel, Tokenizer]:
    model = random_model(copy.deepcopy(FAMILIES["llama"]))  # a model changes its config
    loaded, tokenizer = prepare(model), Tokenizer(byte_tokenizer())
    runner = eager_runner(loaded, num_blocks=200, block_size=4)
    runner.is_asynchronous = overlap
    engine = Engine(
        ServedModel(
            tokenizer=tokenizer,
            runner=runner,
            num_blocks=200,
            max_model_len=64,
            vocab_size=loaded.vocab_size,
            eos_token_ids=frozenset([EOS]),
        ),
        EngineOptions(block_size=4, max_running=8, max_step_tokens=24),
    )
    return engine, loaded.model, tokenizer


@torch.inference_mode()
def plain_answer(model: PreTrainedModel, grammars: Grammars, prompt: list[int], grammar: Grammar) -> list[int]:
    matcher, ids = grammars.compile(grammar).matcher(), list(prompt)
    words = np.zeros(-(-model.config.vocab_size // 32), np.uint32)
    while len(ids) < len(prompt) + 24 and not matcher.is_complete:
        logits = model(torch.tensor([ids])).logits[0, -1].float()
        matcher.fill_mask(words)
        allowed = allowed_ids(words)
        token_id = allowed[int(logits[allowed].argmax())]
        ids.append(token_id)
        if token_id == EOS:
            break
        matcher.push(token_id)
    return ids[len(prompt) :]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_greedy_answers_are_those_of_mask_and_argmax(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FEW_TOKENS", 100)
    engine, _, tokenizer = make_engine(overlap=overlap)
    plain_model = random_model(copy.deepcopy(FAMILIES["llama"]))  # a model changes its config
    grammars = Grammars(tokenizer.backend, vocab_size=engine.vocab_size, eos_token_ids=frozenset([EOS]))
    requests = [
        Request(
            f"{i} {kind.kind}", (TokenPrompt(prompt),), SamplingParams(max_tokens=24, temperature=0.0, grammar=kind)
        )
        for i, prompt in enumerate(PROMPTS)
        for kind in GRAMMARS
    ]
    inbox = Inbox()
    with engine:
        for asked in requests:
            engine.submit(asked, inbox)
        ended = inbox.wait_terminal(*(asked.request_id for asked in requests))
        found: dict[str, list[int]] = {asked.request_id: [] for asked in requests}
    for event in (event for events in inbox.hand_overs for event in events):
        if hasattr(event, "token_ids") and hasattr(event, "finish_reason"):
            found[event.request_id] += event.token_ids
    expected = {
        asked.request_id: plain_answer(plain_model, grammars, prompt, asked.params.grammar)  # type: ignore[arg-type]
        for asked in requests
        for prompt in [list(asked.prompts[0].token_ids)]  # type: ignore[union-attr]
    }
    assert found == expected
    assert sum(event.account.num_forced_tokens for event in ended.values()) > 20


def test_a_mask_and_other_parameters_that_leave_no_token_end_the_request_only() -> None:
    engine, _, _ = make_engine(overlap=False)
    grammar = Grammar("regex", "[a-c]+")
    with engine:
        free, wrong = (
            list(
                engine.stream(
                    Request("r", (TokenPrompt([5, 9]),), SamplingParams(max_tokens=5, grammar=grammar, **others))  # type: ignore[arg-type]
                )
            )
            for others in ({}, {"allowed_token_ids": (5, 6)})
        )
        assert engine.failure is None
    assert not isinstance(free[-1], Failed)
    assert isinstance(wrong[-1], Failed)
    assert isinstance(wrong[-1].error, InvalidRequest)
    assert (wrong[-1].error.param, "'response_format', 'allowed_token_ids'" in str(wrong[-1].error)) == (
        "response_format",
        True,
    )
