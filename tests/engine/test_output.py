"""The output of a choice."""

from oaiserve.engine.output import ChoiceOutput
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.text.detokenize import StopStrings, TokenTable
from tests.engine.doubles import EOS, TOKENIZER
from tests.growth import is_linear


def test_tokens_without_text_take_linear_time() -> None:
    table = TokenTable(TOKENIZER.backend)
    assert EOS in table.special_ids  # It is not shown.

    def push(size: int) -> None:
        sequence = Sequence("r", 0, [1], SamplingParams(ignore_eos=True), max_len=size + 10)
        output = ChoiceOutput(sequence, table, StopStrings([]), eos_token_ids=frozenset([EOS]), stream_interval=1)
        for _ in range(size):
            output.push(EOS, None)
            assert output.take() is None

    assert is_linear(push, 2000)
