import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders

from oaiserve.engine.text.detokenize import Detokenizer, StopMatcher, StopStrings, TokenTable
from tests.engine.text.tokenizers_for_tests import byte_level, metaspace, sentencepiece, wordpiece

TABLES = {build.__name__: TokenTable(build()) for build in (byte_level, sentencepiece, metaspace, wordpiece)}
BYTE_LEVEL, SENTENCEPIECE, METASPACE, WORDPIECE = TABLES.values()
every_kind = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
kinds_with_bytes = pytest.mark.parametrize("table", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])


def ids_of(table: TokenTable, max_size: int = 30) -> st.SearchStrategy[list[int]]:
    """Draw any ids, up to two beyond the vocabulary: a model may have more rows than its tokenizer has tokens."""
    return st.lists(st.integers(0, table.backend.get_vocab_size() + 1), max_size=max_size)


def start(table: TokenTable, prompt_ids: list[int] | None = None, skip: bool = True) -> Detokenizer:
    return table.detokenizer(prompt_ids or [], skip_special_tokens=skip)


def pieces(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


def text_of(detokenizer: Detokenizer, token_ids: list[int]) -> str:
    return "".join(pieces(detokenizer, token_ids))


def decode(table: TokenTable, token_ids: list[int], skip: bool = True) -> str:
    """Return the tokenizer's own text, but one U+FFFD per broken character, not per byte, for sentencepiece."""
    if table is not SENTENCEPIECE:
        return table.backend.decode(token_ids, skip_special_tokens=skip)
    tokens = [table.backend.id_to_token(i) for i in token_ids if not (skip and i in table.special_ids)]
    data = b"".join(
        bytes.fromhex(token[3:5]) if token.startswith("<0x") else token.replace("▁", " ").encode()
        for token in tokens
        if token is not None
    )
    return data.decode(errors="replace").removeprefix(" ")


def ids(table: TokenTable, text: str) -> list[int]:
    return table.backend.encode(text, add_special_tokens=False).ids


# -- the text of tokens


@every_kind
def test_special_tokens_can_be_seen_one_by_one(table: TokenTable) -> None:
    first, *others = sorted(table.special_ids)
    detokenizer = table.detokenizer([], skip_special_tokens=True, visible_ids=frozenset({first}))
    assert text_of(detokenizer, [first, *others]).strip() == table.backend.id_to_token(first)


@every_kind
@given(data=st.data(), skip=st.booleans())
def test_the_pieces_joined_are_the_decoded_text(table: TokenTable, data: st.DataObject, skip: bool) -> None:
    token_ids = data.draw(ids_of(table))
    assert text_of(start(table, skip=skip), token_ids) == decode(table, token_ids, skip)


@given(text=st.text(alphabet="helo wé€🙂�", max_size=20))
def test_whole_text_through_sentencepiece_is_that_of_the_rust_decoder(text: str) -> None:
    token_ids = ids(SENTENCEPIECE, text)
    assert text_of(start(SENTENCEPIECE), token_ids) == SENTENCEPIECE.backend.decode(token_ids)


@every_kind
@given(data=st.data(), skip=st.booleans())
def test_with_a_prompt_the_text_is_what_the_tokens_add_to_it(
    table: TokenTable, data: st.DataObject, skip: bool
) -> None:
    size = table.backend.get_vocab_size()
    prompt_ids = data.draw(st.lists(st.integers(0, size - 1), max_size=8))
    prompt = decode(table, prompt_ids, skip)
    if prompt.endswith("\ufffd"):
        prompt_ids += ids(table, "hello")
        prompt = decode(table, prompt_ids, skip)
    token_ids = data.draw(ids_of(table))
    added = decode(table, prompt_ids + token_ids, skip)[len(prompt) :]
    assert text_of(start(table, prompt_ids, skip), token_ids) == added


@kinds_with_bytes
@given(text=st.text(min_size=1, max_size=8))
def test_a_character_of_single_byte_tokens_is_returned_whole(table: TokenTable, text: str) -> None:
    byte_ids = [table.backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    if table is BYTE_LEVEL:
        by_byte = {table.bytes_of(i): i for i in range(256)}
        byte_ids = [by_byte[bytes([byte])] for byte in text.encode()]
    sent = [piece for piece in pieces(start(table, ids(table, "hello")), byte_ids) if piece]
    assert sent == list(text)


EURO = ids(BYTE_LEVEL, "€")
HELLO = ids(SENTENCEPIECE, "hello")
BOS = 1
BROKEN = [SENTENCEPIECE.backend.token_to_id(token) for token in ("<0xE2>", "<0x82>", "<0x41>")]


@pytest.mark.parametrize(
    ("table", "prompt", "skip", "token_ids", "expected"),
    [
        (SENTENCEPIECE, [], True, BROKEN, ["", "", "\ufffdA", ""]),  # they can no longer become a character
        (BYTE_LEVEL, [], True, EURO[:1], ["", "\ufffd"]),  # as broken only at the end
        (BYTE_LEVEL, EURO[:1], True, EURO[1:], ["€", ""]),  # The prompt has begun this character.
        (SENTENCEPIECE, [], True, HELLO[:1], ["h", ""]),  # without the leading space, but after a prompt
        (SENTENCEPIECE, HELLO, True, HELLO[:1], [" h", ""]),
        (SENTENCEPIECE, [BOS], True, HELLO[:1], ["h", ""]),
        (SENTENCEPIECE, [BOS], False, HELLO[:1], [" h", ""]),
        (BYTE_LEVEL, [], True, ids(BYTE_LEVEL, "hello<|im_end|>"), ["hello", "", ""]),
        (BYTE_LEVEL, [], False, ids(BYTE_LEVEL, "hello<|im_end|>"), ["hello", "<|im_end|>", ""]),
        (BYTE_LEVEL, [], True, ids(BYTE_LEVEL, "naïve € token"), ["naïve € token", ""]),  # beyond the byte alphabet
    ],
)
def test_the_pieces_are_those_of_whole_characters(
    table: TokenTable, prompt: list[int], skip: bool, token_ids: list[int], expected: list[str]
) -> None:
    assert pieces(start(table, prompt, skip), token_ids) == expected


def test_the_decoder_is_recognised_by_its_form() -> None:
    assert [table.has_bytes for table in TABLES.values()] == [True, True, True, False]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip("_", 1, 0)]),
    ],
)
def test_text_of_any_other_decoder_comes_from_the_decoder_itself(decoder: object) -> None:
    backend = sentencepiece()
    backend.decoder = decoder
    token_ids = backend.encode("hello world").ids
    assert not TokenTable(backend).has_bytes
    assert text_of(start(TokenTable(backend)), token_ids) == backend.decode(token_ids)


def test_without_byte_rules_half_characters_are_held_back_too_and_endless_broken_bytes_are_not() -> None:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("\0", 0, 0)])
    table = TokenTable(backend)
    assert not table.has_bytes
    assert pieces(start(table), ids(table, "é€h")) == ["é", "", "€", "h", ""]
    broken = next(i for i in range(256) if BYTE_LEVEL.bytes_of(i) == b"\xff")
    assert text_of(start(table), [broken] * 100) == "\ufffd" * 100


@pytest.mark.parametrize(
    ("table", "text", "data"),
    [
        (BYTE_LEVEL, "€", b"\xe2\x82"),  # the first of two parts of a character
        (BYTE_LEVEL, " w", b" w"),
        (SENTENCEPIECE, "h", b" h"),
        (WORDPIECE, "hello", b"hello"),
    ],
)
def test_a_token_on_its_own_has_its_true_bytes_and_its_leading_space(table: TokenTable, text: str, data: bytes) -> None:
    assert table.bytes_alone(ids(table, text)[0]) == data
    assert table.bytes_alone(100_000) == b""


# -- stop strings

few_letters = st.text(alphabet="ab<", max_size=12)
some_stops = st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=4)


def cut_at_earliest(text: str, stops: list[str], include: bool = False, first_end: int = 0) -> tuple[str, str | None]:
    """Cut a text in the plain way: at the first end from `first_end` on at which a stop completes."""
    for end in range(first_end, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def run(matcher: StopMatcher, texts: list[str]) -> tuple[str, str | None]:
    sent = ""
    for text in texts:
        new, stop = matcher.push(text)
        sent += new
        if stop is not None:
            return sent, stop
    return sent + matcher.finish(), None


@given(texts=st.lists(few_letters, max_size=6), stops=some_stops, include=st.booleans())
@example(texts=["ab"], stops=["b", "ab"], include=False)
@example(texts=["a", "ab", "b<"], stops=["abb<", "b<", "bb"], include=False)
def test_stops_cut_the_text_where_the_first_one_completes(texts: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(StopStrings(stops, include_in_output=include))
    assert run(matcher, texts) == cut_at_earliest("".join(texts), stops, include)


@given(text=st.text(alphabet="ab<", max_size=30), stops=some_stops)
def test_text_is_held_back_only_while_it_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    sent = ""
    seen = ""
    for char in text:
        new, stop = matcher.push(char)
        if stop is not None:
            break
        sent = sent + new
        seen = seen + char
        held = seen[len(sent) :]
        ends = [seen[i:] for i in range(len(seen) + 1)]
        assert held == next(end for end in ends if end == "" or any(s.startswith(end) for s in stops))
        assert len(held) <= max(map(len, stops), default=1) - 1


@given(before=few_letters, after=st.lists(few_letters, max_size=4), stops=some_stops)
def test_a_stop_counts_if_it_completes_once_matching_is_enabled(
    before: str, after: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(StopStrings(stops))
    sent, _ = matcher.push(before, enabled=False)
    rest, stop = run(matcher, after)
    assert (sent + rest, stop) == cut_at_earliest(before + "".join(after), stops, first_end=len(before) + 1)


def test_one_set_of_stops_serves_many_choices() -> None:
    stops = StopStrings(["END"])
    first = StopMatcher(stops)
    second = StopMatcher(stops)
    assert first.push("an E") == ("an ", None)
    assert second.push("ND") == ("ND", None)
    assert first.push("ND of it") == ("", "END")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])
