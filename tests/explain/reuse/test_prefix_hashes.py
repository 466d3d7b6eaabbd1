"""The number of tokens that two prompts have in common, from hashes of their prefixes."""

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.explain.reuse.prefix_hashes import num_common, prefix_hashes

tokens = st.lists(st.integers(0, 200_000), max_size=40)


def plainly_common(first: list[int], second: list[int]) -> int:
    number = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            return number
        number += 1
    return number


@given(tokens, tokens, tokens)
def test_it_is_that_of_a_comparison_token_by_token(begin: list[int], first: list[int], second: list[int]) -> None:
    assert num_common(prefix_hashes(begin + first), prefix_hashes(begin + second)) == plainly_common(
        begin + first, begin + second
    )


def test_swapped_tokens_are_told_apart() -> None:
    assert num_common(prefix_hashes([1, 2, 3, 4]), prefix_hashes([1, 3, 2, 4])) == 1


def test_an_empty_prompt_has_nothing_in_common() -> None:
    assert num_common(prefix_hashes([]), prefix_hashes([1])) == 0
