"""The output of a choice."""

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.request import SamplingParams, TokenChunk
from oaiserve.engine.requests.output import ChoiceOutput
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.text.detokenize import StopStrings, TokenTable
from tests.engine.doubles import EOS, TOKENIZER


@given(
    token_ids=st.lists(st.integers(0, TOKENIZER.backend.get_vocab_size()), min_size=1),
    interval=st.integers(0, 3),
    stops=st.sampled_from(([], ["a"])),
    ignore_eos=st.booleans(),
    stop_ids=st.sampled_from((frozenset(), frozenset([5]))),
)
def test_plain_tokens_make_the_same_chunks_as_others(
    token_ids: list[int], interval: int, stops: list[str], ignore_eos: bool, stop_ids: frozenset[int]
) -> None:
    def chunks(*, may_be_plain: bool) -> list[TokenChunk | None]:
        params = SamplingParams(ignore_eos=ignore_eos)
        sequence = Sequence("r", 0, [1], params, max_len=1 + len(token_ids), stop_ids=stop_ids)
        table = TokenTable(TOKENIZER.backend)
        own = {"eos_token_ids": frozenset([EOS]), "stream_interval": interval}
        output = ChoiceOutput(sequence, table, StopStrings(stops), **own)
        found = []
        for token_id in token_ids:
            if output.finish_reason is not None:
                break
            if may_be_plain and output.is_plain(token_id):
                found.append(output.push_plain(token_id))
            else:
                output.push(token_id, None)
                found.append(output.take())
        return found

    assert chunks(may_be_plain=True) == chunks(may_be_plain=False)
