"""Expressions of adapters match the names that PEFT's would, and take linear time."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.checkpoints.name_patterns import BadPattern, Name, NamePattern, Steps, TooMuchWork
from tools.attack.functions.linear import is_linear

LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "mlp.experts.3.w1", "mlp.shared_expert_gate")
NAMES = (
    *(f"model.layers.{number}.{layer}" for number in (0, 1, 10, 21) for layer in LAYERS),
    *(f"decoder.layers.{number}.{layer}" for number in (0, 11) for layer in LAYERS),
    *("transformer.h.11.attn.c_attn", "lm_head", "model.embed_tokens", "q_proj", "xq_proj", "modelXlayersX0Xq_proj"),
)  # fmt: skip
# As in adapters on the hub, and in PEFT's documentation and tests.
EXPRESSIONS = (
    *("q_proj", "self_attn.q_proj", "model.layers.10.self_attn.q_proj", "layers.1.self_attn.q_proj", "c_attn"),
    *(r"^model.layers.0.self_attn.k_proj", r"^q_proj", r"model\.layers\.1\.mlp\.down_proj", r".*\.q_proj", ".*q_proj"),
    *(r"layers\.\d+\.mlp\..*", r"layers.[0-9].self_attn.*", r".*\.layers\.(0|1)\..*", r"layers\.(?:1[0-9]|2[0-3])\..+"),
    *("(q|k)_proj", ".*(q_proj|down_proj)$", r"(self_attn\.)?q_proj", r"experts\.\d{1,3}\.w[123]"),
    *(r"h\.1{2}\.attn\.\w+", "model.layers.0.q_proj"),
    *("model.*layers.*proj", r"[^.]+_proj", ".*", "", "^", "$", "x?q_proj", "a|q_proj|", r"\w+?\.w1"),
)  # fmt: skip


def matches(expression: str, name: str) -> bool:
    return NamePattern(expression).matches(Name(name, Steps()))


def matches_in_peft(expression: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({expression})$", name) is not None  # peft.utils.other.get_pattern_key


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_match_the_names_that_they_match_in_peft(expression: str) -> None:
    matched = [name for name in NAMES if matches(expression, name)]
    assert matched == [name for name in NAMES if matches_in_peft(expression, name)]
    assert matched or expression in ("^", "$", "")


atoms = st.sampled_from(["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "[0-9]", "q_", "^", "$"])
quantifiers = st.sampled_from(["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{0,}", "{1,}"])
items = st.builds(lambda atom, quantifier: atom + (quantifier if atom not in "^$" else ""), atoms, quantifiers)
expressions = st.recursive(
    st.lists(items, max_size=4).map("".join),
    lambda inner: st.builds("({}|{}){}{}".format, inner, inner, st.sampled_from(["", "?", "??"]), inner),
    max_leaves=6,
)


@settings(max_examples=300)
@given(expressions, st.text("ab.01q_-", max_size=12))
def test_any_supported_expression_matches_what_it_matches_in_peft(expression: str, name: str) -> None:
    assert matches(expression, name) == matches_in_peft(expression, name)


@pytest.mark.parametrize(
    "expression", ["(a+)+", "(ab){2}", r"(a)\1", "(?=a)", "(?i:a)", r"\ba", "a*+", "a{101}", "(" * 30 + ")" * 30]
)
def test_expressions_that_cannot_be_matched_in_linear_time_are_refused(expression: str) -> None:
    with pytest.raises(BadPattern, match="is not supported"):
        NamePattern(expression)


@pytest.mark.parametrize("expression", [".*a.*a.*a", ".*" * 100 + "x", "(a|.*)?" * 60, r"[^b]+\w*\d?" * 40, "a?" * 200])
def test_time_is_linear_in_the_name(expression: str) -> None:
    pattern = NamePattern(expression)
    assert is_linear(lambda size: pattern.matches(Name("a." * size + "m", Steps())), 500)


def test_work_has_a_limit() -> None:
    name = Name("a." * 200 + "m", Steps(most=100))
    with pytest.raises(TooMuchWork):
        NamePattern(".*a" * 100).matches(name)
