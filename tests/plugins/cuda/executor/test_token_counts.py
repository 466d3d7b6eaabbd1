"""The counts of tokens on the device follow the sequences, and the host sends no id twice."""

from collections import Counter
from typing import Any

import pytest
import torch

from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.plugins.cuda.executor import token_counts
from oaiserve.plugins.cuda.executor.block_tables import BlockTables
from oaiserve.plugins.cuda.executor.token_counts import DeviceCounts
from tests.engine.model.steps import CPU, sequence_of

VOCAB = 50
PROMPT = [4, 5, 4, 6]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of integers that are copied to the device."""
    sizes: list[int] = []
    copy = token_counts.on_device

    def counted(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        tensor = copy(values, device, dtype)
        if dtype == torch.int64:
            sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(token_counts, "on_device", counted)
    return sizes


class Rows:
    def __init__(self) -> None:
        self.tables = BlockTables(4, 8, 4, CPU)
        self.counts = DeviceCounts(self.tables, VOCAB)

    def launch(self, *chunks: Chunk) -> list[int]:
        """Return the rows of a step's draws, to which the device then adds the id 9."""
        self.tables.update(Step([*chunks]))
        rows = self.counts.rows_of([draw for chunk in chunks for draw in chunk.draws()])
        for row in rows:
            if row >= 0:
                self.counts.penalties(torch.tensor([0])).counts[row, 9] += 2
        return rows

    def check(self, sequence: Sequence) -> None:
        """Check the counts of a sequence whose ids the host has all."""
        counts = self.counts.penalties(torch.tensor([0])).counts[self.tables.row_of(sequence)].tolist()
        times = Counter(sequence.generated_ids)
        in_prompt = {*PROMPT} if sequence.params.repetition_penalty != 1.0 else set()
        assert counts == [2 * times[token_id] + (token_id in in_prompt) for token_id in range(VOCAB)]


def penalised(**params: Any) -> Sequence:
    return sequence_of(PROMPT, range(8), device_counts=True, **(params or {"repetition_penalty": 1.2}))


def last(sequence: Sequence, draft: tuple[int, ...] = ()) -> Chunk:
    start = len(sequence.token_ids) - 1
    return Chunk(sequence, start, 1 + len(draft), 1 + len(draft), draft)


@pytest.mark.parametrize("params", [{}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}], ids=str)
def test_ids_are_sent_once_before_the_first_draw(params: dict[str, Any], sent: list[int]) -> None:
    one = penalised(**params)
    other = sequence_of([7], [8], device_counts=True)
    assert not one.needs_ids
    rows = Rows()
    assert rows.launch(Chunk(one, 0, 4), last(other))[1] == -1
    one.token_ids.append(9)
    rows.check(one)
    num_sent = len(sent)
    for _ in range(3):
        rows.launch(last(one), last(other))
        one.token_ids.append(9)
        rows.check(one)
    assert len(sent) == num_sent


def test_accepted_tokens_of_a_draft_are_sent_alone(sent: list[int]) -> None:
    one = penalised()
    rows = Rows()
    rows.launch(Chunk(one, 0, 4))
    one.token_ids.append(9)
    (row, *others) = rows.launch(last(one, (9, 11, 12)))
    assert row >= 0
    assert others == [-1] * 3, "the host edits the logits of draws after a draft"
    one.token_ids += [9, 11, 11]
    sent.clear()
    rows.launch(last(one))
    assert sent == [2]  # a place and an amount
    one.token_ids.append(9)
    rows.check(one)


def test_counts_are_made_again_if_a_launch_failed_or_the_row_is_another_sequences() -> None:
    one = penalised()
    rows = Rows()
    rows.launch(Chunk(one, 0, 4))
    rows.launch(Chunk(one, 0, 4))
    one.token_ids.append(9)
    rows.check(one)
    others = [penalised() for _ in range(4)]
    rows.launch(*(Chunk(other, 0, 4) for other in others))
    rows.launch(last(one))
    one.token_ids.append(9)
    rows.check(one)


@pytest.mark.parametrize("rules", [(), (object(),)], ids=["none", "rules"])
def test_the_host_applies_penalties_before_the_rules_of_plug_ins(rules: tuple[Any, ...]) -> None:
    one = sequence_of(PROMPT, [0], device_counts=True, repetition_penalty=1.2, rules=rules)
    assert one.is_counted == (not rules)
    assert one.needs_ids == one.has_edits == bool(rules)
