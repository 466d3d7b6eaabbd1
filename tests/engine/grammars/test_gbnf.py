import pytest

from oaiserve.engine.grammars.gbnf import MOST_RULES, as_lark
from oaiserve.engine.grammars.refusal import Refused


def test_rules_become_terminals_as_far_as_they_refer_to_no_rule() -> None:
    grammar = """
        # A list of numbers.
        root ::= "[" (item ("," item)*)? "]"
        item ::= number | root
        number ::= [0-9]+ ("." digits{1,3})?
        digits ::= [0-9]
    """
    assert as_lark(grammar).splitlines() == [
        "start: r0",
        r"r0: /\u{5b}/ ( r1 ( /\u{2c}/ r1 )* )? /\u{5d}/",
        "r1: T2 | r0",
        r"T2: /[0-9]/+ ( /\u{2e}/ T3{1,3} )?",
        "T3: /[0-9]/",
    ]


@pytest.mark.parametrize(
    ("written", "regex"),
    [
        (r'"\n\"\\"', r"\u{a}\u{22}\u{5c}"),
        (r'"\x41\u00e9\U0001F600"', r"A\u{e9}\u{1f600}"),
        (r"[^a-c\]-]", r"[^a-c\u{5d}-\u{5d}\u{2d}-\u{2d}]"),
        ("[+-]", r"[\u{2b}-\u{2b}\u{2d}-\u{2d}]"),
        (".", "(?s:.)"),
    ],
)
def test_strings_and_classes_become_regexes(written: str, regex: str) -> None:
    assert as_lark(f"root ::= {written}").splitlines()[1] == f"T0: /{regex}/"


@pytest.mark.parametrize("empty", ['root ::= ""', 'root ::= "a" |', "root ::="])
def test_an_alternative_may_be_empty(empty: str) -> None:
    assert '""' in as_lark(empty)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("", "has no rule 'root'"),
        ('a ::= "b"', "has no rule 'root'"),
        ("root ::= a", "refers to 'a', which it does not define"),
        ('root ::= "a" root ::= "b"', "defines the rule 'root' twice"),
        ("hello", "where a rule should begin"),
        ('root ::= "a', "cannot be read from '\"a' on, in line 1"),
        ('root ::= "a"\n\n  <x>', "in line 3"),
        (r'root ::= "\q"', r"'\q', which is no escape"),
        (r'root ::= "\ud800"', "which is no character"),
        ("root ::= [z-a]", "wrong way round"),
        ("root ::= []", "an empty class"),
        ("root ::= (", "a '(' without a ')'"),
        ('root ::= "a")', "a ')' without a '('"),
        ("root ::= * root", "in a place where it means nothing"),
        ('root ::= "a"{3,2}', "counts may be up to"),
        ('root ::= "a"{100000}', "counts may be up to"),
        ("root ::= " + "(" * 20_000, "groups within each other"),
        ("\n".join(f'r{i} ::= "a"' for i in range(MOST_RULES + 1)), f"more than {MOST_RULES} rules"),
    ],
)
def test_what_is_no_grammar_is_refused(grammar: str, says: str) -> None:
    with pytest.raises(Refused) as refused:
        as_lark(grammar)
    assert says in refused.value.reason
