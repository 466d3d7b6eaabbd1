"""A mask that leaves no token beside other parameters of its request ends that request only."""

from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.request import Failed, Grammar, Request, SamplingParams, TokenPrompt
from oaiserve.errors import InvalidRequest
from tests.engine.model.runners import IN_SMALL_BLOCKS, eager_runner, make_engine

EOS = 40  # the token "I", which is no text therefore


def test_a_mask_and_other_parameters_that_leave_no_token_end_the_request_only(loaded: LoadedModel) -> None:
    runner = eager_runner(loaded, num_blocks=200, block_size=4)
    engine = make_engine(loaded, runner, 200, eos=EOS, **IN_SMALL_BLOCKS)
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
