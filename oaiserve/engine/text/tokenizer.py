"""The tokenizer of the model: text and messages become token ids, and ids become text.

This module must not depend on HTTP, torch, the scheduler, or the maximum length of a prompt.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.load_errors import reported
from oaiserve.checkpoints.setting_types import settings_named
from oaiserve.engine.request import (
    ChatPrompt,
    FilledPrompt,
    GapPrompt,
    PairPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    TooManyTokens,
)
from oaiserve.engine.text.builtin_templates import advice
from oaiserve.engine.text.chat_template import ChatTemplate
from oaiserve.engine.text.detokenize import TokenTable
from oaiserve.engine.text.encoding_rules import PIECE_CHARACTERS, EncodingRules
from oaiserve.engine.text.fill import fill_tokens
from oaiserve.engine.text.gguf.tokenizer import load_gguf_tokenizer
from oaiserve.engine.text.prompt_texts import text_parts
from oaiserve.engine.text.special_tokens import PlainEncoding, SpecialTexts, control_tokens
from oaiserve.engine.text.stored_tokenizer import (
    StoredTokenizer,
    recall_tokenizer,
    remember_tokenizer,
    stored,
    tokenizer_subject,
)
from oaiserve.engine.text.template_text import by_template, joined, outside, plain
from oaiserve.engine.text.tokenizer_files import load_tokenizer
from oaiserve.engine.types.logprobs import text_of
from oaiserve.errors import InvalidRequest, StartupError, invalid
from oaiserve.http.fair_turns import at_once
from oaiserve.runtime import Runtime
from oaiserve.storage.start_cache import AFTER_SECONDS, NotRemembered
from oaiserve.storage.start_warnings import collected_warnings

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as RustTokenizer

log = logging.getLogger(__name__)


Expand = Callable[[str], str]  # may raise InvalidRequest
_PLACES = re.compile(r"\{(\w+)\}")  # placeholders in a FilledPrompt
_ANCHOR = "☺"  # No token begins with it and is longer.
_MOST_ADDED = 500  # characters of an added token; published models have at most a few dozen
UNCUT_CHARACTERS = 2**16  # characters that take about 30 milliseconds to encode


class Tokenizer:
    """Turns text and messages into token ids. It never changes, so any number of threads may share it."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        """Wrap a transformers tokenizer, or a stored one.

        `chat_template` is Jinja source instead of the model's own. Raises StartupError if the tokenizer is not a Rust
        one, or if the template is not valid.
        """
        if not isinstance(tokenizer, StoredTokenizer):
            tokenizer = stored(tokenizer)
        if chat_template is not None:
            tokenizer = replace(tokenizer, chat_template=chat_template)
        self.stored: StoredTokenizer = tokenizer
        self.backend: RustTokenizer = tokenizer.backend_tokenizer
        # `tokenizer(text)` would set these on each call, which fails while another thread encodes.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = tokenizer.split_special_tokens
        self.vocab_size = tokenizer.length
        self.eos_token_ids = frozenset(tokenizer.eos_token_ids)
        self.eos_token_id: int | None = next(iter(tokenizer.eos_token_ids), None)
        self._table = TokenTable(self.backend)
        self.special_ids = self._table.special_ids
        added = self.backend.get_added_tokens_decoder()
        _refuse_long(added.values())
        self.special_token_ids = {added[token_id].content: token_id for token_id in self.special_ids}
        template = tokenizer.chat_template
        special_tokens = tokenizer.special_tokens_map
        self.chat_template = ChatTemplate(template, special_tokens, tokenizer.response_template) if template else None
        source = "" if self.chat_template is None else self.chat_template.source
        self._control_ids = control_tokens(self.backend, source, splits_special=tokenizer.split_special_tokens)
        rewrites = _rewrites(self.backend) and any(added[each].normalized for each in self._control_ids.values())
        normalize = self.backend.normalizer.normalize_str if rewrites else None
        self._special_texts = SpecialTexts(self._control_ids, normalize)
        if self.chat_template is not None:
            self._warn_of_lost_tokens(self.chat_template.sample)
        self.fill = fill_tokens(self.backend, tokenizer.fill_texts)
        self._rules = EncodingRules(self.backend)
        self._affixes = self._find_affixes()

    def _warn_of_lost_tokens(self, sample: str) -> None:
        """Log the control tokens that the template composes in such a way that their origin is lost."""
        both = (self._special_texts.written(text) for text in (by_template(plain(sample)), sample))
        shown, written = ({token for _, token in parts if token} for parts in both)
        if lost := sorted(shown - written):
            log.warning(
                "The chat template composes %s of parts whose origin cannot be followed, so they are encoded as text. "
                "Write them whole in the template, and give it with --chat-template.",
                ", ".join(lost),
            )

    @cached_property
    def _plain_encoding(self) -> PlainEncoding:
        return PlainEncoding(self.backend, self.vocab_size, self._control_ids, self._special_texts)

    @property
    def why_no_chat(self) -> str:
        """Return sentences that explain how to use a model without a chat template, and how to give it one."""
        can = "The model has no chat template, so it only continues texts, by /v1/completions."
        return f"{can} {advice(self.backend.token_to_id)}."

    @cached_property
    def _gap_texts(self) -> SpecialTexts:
        return SpecialTexts(() if self.fill is None else {*self._control_ids, *self.fill.texts})

    @classmethod
    def from_pretrained(
        cls,
        path: Path | str,
        chat_template: str | None = None,
        *,
        recheck: bool = False,
        runtime: Runtime | None = None,
    ) -> Tokenizer:
        """Load a tokenizer from a folder or a GGUF file. Raises StartupError if there is no usable one."""
        return cls.of(Checkpoint.at(Path(path)), chat_template, recheck=recheck, runtime=runtime)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        chat_template: str | None = None,
        *,
        recheck: bool = False,
        runtime: Runtime | None = None,
    ) -> Tokenizer:
        """Load the tokenizer of a checkpoint. Raises StartupError if there is no usable one.

        With `runtime`, a tokenizer of local files is written to the start cache once this start is complete.
        `recheck` ignores a cached one.
        """
        path = checkpoint.path
        if not path.exists():
            raise StartupError(f"There is no model at '{path}': it must be a folder or a GGUF file.")
        with reported(f"Could not load a tokenizer from '{path}'"), settings_named(path):
            subject = tokenizer_subject(checkpoint)
            tokenizer: StoredTokenizer | None = None
            if subject is not None and not recheck:
                try:
                    tokenizer = recall_tokenizer(subject)
                except NotRemembered as reason:
                    log.debug("The tokenizer is made again: %s", reason)
            if tokenizer is not None:
                return cls(tokenizer, chat_template)
            with collected_warnings() as warnings:
                made = load_gguf_tokenizer(checkpoint.head) if path.suffix == ".gguf" else load_tokenizer(path)
            usable = cls(made, chat_template)
            if subject is not None and runtime is not None:
                runtime.later("remember", AFTER_SECONDS, partial(remember_tokenizer, subject, made, warnings))
            return usable

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. Raises InvalidRequest if it cannot be encoded."""
        return at_once(self.encode_in_pieces(prompt))

    def encode_in_pieces(
        self, prompt: Prompt, most_tokens: int | None = None, expand: Expand | None = None
    ) -> Generator[None, None, list[int]]:
        """Encode a prompt in turns: one for each piece of a long text, and one for the template. Return the token ids.
        `expand` inserts the texts of images into that of the template.

        Raises InvalidRequest if the prompt cannot be encoded, and TooManyTokens as soon as there are certainly more
        than `most_tokens`.
        """
        match prompt:
            case TokenPrompt():
                if most_tokens is not None and len(prompt.token_ids) > most_tokens:
                    raise TooManyTokens(len(prompt.token_ids), is_exact=True)
                return list(prompt.token_ids)
            case TextPrompt(text, special, param, int(room)):
                return (yield from self._encode_start(text, special, param, room))
            case TextPrompt(text, special, param):
                return (yield from self._encode_text(text, special, param, most_tokens))
            case GapPrompt():
                return (yield from self._encode_gap(prompt, most_tokens))
            case FilledPrompt(template, texts, param):
                parts = _PLACES.split(template)  # alternates between texts of the template and names
                for number, part in enumerate(parts):
                    if number % 2 == 0:
                        parts[number] = by_template(part)
                    else:
                        parts[number] = texts[part] if part in texts else by_template(f"{{{part}}}")
                text = joined(parts)
                return (yield from self._encode_rendered(text, False, param, most_tokens))
            case PairPrompt():
                return self.encode_pair(prompt, most_tokens)[0]
            case ChatPrompt():
                if self.chat_template is None:
                    raise InvalidRequest(self.why_no_chat, param=prompt.param, code="no_chat_template")
                text = self.chat_template.render(prompt, self._special_texts)
                text = text if expand is None else expand(text)
                if len(text) > PIECE_CHARACTERS:
                    yield
                return (yield from self._encode_rendered(text, prompt.add_special_tokens, prompt.param, most_tokens))

    def encode_pair(self, prompt: PairPrompt, most_tokens: int | None = None) -> tuple[list[int], int]:
        """Return the token ids of two texts, and the index where the second one begins, for models with token types.
        Raises the errors of `encode_in_pieces`."""
        _check_characters(prompt.first, prompt.param)
        _check_characters(prompt.second, prompt.param)
        try:
            first, second = self.backend.encode_batch([prompt.first, prompt.second], add_special_tokens=False)
            if prompt.most_tokens is not None:
                room = max(0, prompt.most_tokens - self.backend.num_special_tokens_to_add(True))
                shorter = min(len(first.ids), len(second.ids), room // 2)
                first.truncate(min(len(first.ids), max(shorter, room - len(second.ids))))
                second.truncate(min(len(second.ids), room - len(first.ids)))
            pair = self.backend.post_process(first, second, True)
        except Exception as error:  # The Rust encoder raises Exception itself for all its errors.
            raise invalid(prompt.param, f"the model's tokenizer cannot encode it: {error}") from error
        if most_tokens is not None and len(pair.ids) > most_tokens:
            raise TooManyTokens(len(pair.ids), is_exact=True)
        types = pair.type_ids
        return pair.ids, types.index(1) if 1 in types else len(types)

    def _encode_gap(self, prompt: GapPrompt, most_tokens: int | None) -> Generator[None, None, list[int]]:
        assert self.fill is not None  # Otherwise the route refuses the prompt.
        start, _ = self._around(prompt.add_special_tokens)
        prefix = prompt.prefix
        if isinstance(prefix, str):
            prefix = yield from self._encode_side(prefix, prompt.param, most_tokens)
        suffix = yield from self._encode_side(prompt.suffix, "suffix", most_tokens, continues=True)
        token_ids = self.fill.joined(start, prefix, suffix)
        if most_tokens is not None and len(token_ids) > most_tokens:
            raise TooManyTokens(len(token_ids), is_exact=True)
        return token_ids

    def _encode_side(
        self, text: str, param: str, most_tokens: int | None, *, continues: bool = False
    ) -> Generator[None, None, list[int]]:
        """Return the token ids of a text on one side of a gap, with its control tokens as text.

        A text that `continues` another one does not get the space that sentencepiece adds before each text.
        """
        token_ids: list[int] = []
        adds_space = self._table.strip_start > 0 or self._table.drop_first_spaces
        anchor_ids = self._encode(_ANCHOR, False, param) if adds_space else []
        for piece in filter(None, self._gap_texts.pieces(text)):
            is_anchored = adds_space and (continues or bool(token_ids))
            side_ids = yield from self._encode_text(_ANCHOR * is_anchored + piece, False, param, most_tokens)
            token_ids += side_ids[len(anchor_ids) * is_anchored :]
        return token_ids

    def text_parts(self, prompt: Prompt, token_ids: Sequence[int]) -> Iterator[str]:
        """Yield the part of a prompt's text that each token stands for; "" for the special tokens around it.

        Joined, the parts are the text of a text prompt, or the text before a gap; for other prompts, they are the texts
        of the tokens.
        """
        text = None
        shown = slice(0, len(token_ids))
        if isinstance(prompt, TextPrompt):
            text = prompt.text
            before, after = self._around(prompt.add_special_tokens)
            shown = slice(len(before), len(token_ids) - len(after))
        elif isinstance(prompt, GapPrompt):
            text = prompt.prefix if isinstance(prompt.prefix, str) else None
            assert self.fill is not None  # Without it, the prompt couldn't have been encoded.
            shown = self.fill.prefix_of(token_ids)
        yield from repeat("", shown.start)
        yield from text_parts(self._table, token_ids[shown], text, lambda: self.starts(text or ""))
        yield from repeat("", len(token_ids) - shown.stop)

    def rendered(self, prompt: ChatPrompt) -> tuple[str, list[tuple[int, int]]]:
        """Return the text that the chat template renders for a prompt without media, and the beginning and end of each
        part that comes from outside. Raises InvalidRequest if the template rejects the prompt."""
        assert self.chat_template is not None  # Otherwise the prompt would have no token ids.
        text = self.chat_template.render(prompt, self._special_texts)
        return plain(text), [*outside(text)]

    def first_tokens(self, text: str, num_tokens: int, param: str) -> str:
        """Return a text cut after its first `num_tokens` tokens. Raises InvalidRequest."""
        _check_characters(text, param)
        return text[: next(islice(self.starts(text), num_tokens, None), None)]

    def starts(self, text: str) -> Iterator[int]:
        """Yield where each token of a text starts, not counting special tokens around them."""
        at = 0
        for piece in self._rules.pieces(text):
            at = text.index(piece, at)  # A space between pieces may be missing.
            encoding = self.backend.encode_batch([piece], add_special_tokens=False)[0]
            yield from (at + start for start, _ in encoding.offsets)
            at += len(piece)

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word, both at the start of a text and after another word.

        Raises InvalidRequest for a word without tokens, or one that can't be encoded.
        """
        encoded: list[list[int]] = []
        for word in words:
            bare = word.lstrip(" ")
            alone = self._encode(bare, False, "bad_words")
            if not alone:
                raise invalid("bad_words", f"{word[:40]!r} has no tokens of its own, so it cannot be kept out")
            encoded += [alone, self._encode(f" {bare}", False, "bad_words")]
        return encoded

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of one of the server's own texts, in which special tokens count as tokens."""
        return self._encode(text, False, "reasoning")

    def _encode_rendered(
        self, text: str, add_special_tokens: bool, param: str, most_tokens: int | None
    ) -> Generator[None, None, list[int]]:
        """Return the token ids of a rendered text, with control tokens only where the template wrote them."""
        if not self._special_texts.is_forged(text):
            return (yield from self._encode_text(plain(text), add_special_tokens, param, most_tokens))
        before, after = self._around(add_special_tokens)
        encoding = self._plain_encoding
        if most_tokens is None:
            room = None
        else:
            room = most_tokens - len(before) - len(after)
        written, forms = encoding.forms(text)
        for form in forms:
            token_ids = yield from self._encode_text(form, False, param, room, encoding.backend)
            if encoding.control_ids.isdisjoint(token_ids):
                break
        return [*before, *encoding.restored(token_ids, written), *after]

    def _encode_text(
        self,
        text: str,
        add_special_tokens: bool,
        param: str,
        most_tokens: int | None,
        backend: RustTokenizer | None = None,
    ) -> Generator[None, None, list[int]]:
        backend = backend or self.backend
        if len(text) <= PIECE_CHARACTERS or (add_special_tokens and self._affixes is None):
            token_ids = self._encode(text, add_special_tokens, param, backend)
        else:
            _check_characters(text, param)  # All of the text is checked, since a cut may be next to any character.
            before, after = self._around(add_special_tokens)
            # An array, because a list would take nine times the memory while the other pieces are encoded.
            so_far = array("i", before)
            for number, piece in enumerate(self._rules.pieces(text, backend)):
                if most_tokens is not None and len(so_far) > most_tokens:
                    raise TooManyTokens(len(so_far), is_exact=False)
                if number:
                    yield
                if most_tokens is not None and len(piece) > UNCUT_CHARACTERS:
                    yield from self._check_uncut(piece, param, most_tokens, backend)
                so_far.extend(self._encode(piece, False, param, backend))
            token_ids = [*so_far, *after]
        if most_tokens is not None and len(token_ids) > most_tokens:
            raise TooManyTokens(len(token_ids), is_exact=True)
        return token_ids

    def _check_uncut(
        self, text: str, param: str, most_tokens: int, backend: RustTokenizer
    ) -> Generator[None, None, None]:
        """Raise TooManyTokens for a text without safe cuts if it is certainly too long.

        It encodes arbitrary pieces, one per turn, because the whole text might take seconds. Cutting adds less than
        half of the tokens, so the text is too long if the pieces have more than 1.5 times the limit.
        """
        num_tokens = 0
        for start in range(0, len(text), UNCUT_CHARACTERS):
            num_tokens += len(self._encode(text[start : start + UNCUT_CHARACTERS], False, param, backend))
            if 2 * num_tokens > 3 * most_tokens:
                raise TooManyTokens(most_tokens + 1, is_exact=False)
            yield

    def _encode_start(
        self, text: str, add_special_tokens: bool, param: str, most_tokens: int
    ) -> Generator[None, None, list[int]]:
        """Return the token ids of a text, cut to `most_tokens` including its special tokens, which are kept."""
        before, after = self._around(add_special_tokens)
        if add_special_tokens and self._affixes is None:
            raise invalid(
                "truncate_prompt_tokens", "this tokenizer puts special tokens within texts, so they cannot be cut"
            )
        room = most_tokens - len(before) - len(after)
        if room < 1:
            least = f"{len(before) + len(after)}, the special tokens that this model adds"
            raise invalid("truncate_prompt_tokens", f"must be > {least}, got {most_tokens}")
        _check_characters(text, param)
        so_far = array("i")
        for number, piece in enumerate(self._rules.pieces(text)):
            if len(so_far) >= room:
                break
            if number:
                yield
            so_far.extend(self._encode(piece, False, param))
        return [*before, *so_far[:room], *after]

    def _around(self, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after a text, as far as they are known."""
        if add_special_tokens and self._affixes is not None:
            return self._affixes
        return [], []

    def _find_affixes(self) -> tuple[list[int], list[int]] | None:
        """Return the special tokens before and after a text, or None if there are some elsewhere."""
        try:
            bare, whole = (self._encode("a b", is_whole, "") for is_whole in (False, True))
        except InvalidRequest:
            return None
        for num_before in range(len(whole) - len(bare) + 1):
            num_both = num_before + len(bare)
            if whole[num_before:num_both] == bare:
                return whole[:num_before], whole[num_both:]
        return None

    def _encode(
        self, text: str, add_special_tokens: bool, param: str, backend: RustTokenizer | None = None
    ) -> list[int]:
        _check_characters(text, param)
        try:
            # Only the backend's batch methods release the GIL. This one also skips offsets.
            return (backend or self.backend).encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except Exception as error:  # The Rust encoder raises Exception itself for all its errors.
            raise invalid(param, f"the model's tokenizer cannot encode it: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._table.decode(token_ids)

    def token_texts(self, token_ids: Sequence[int]) -> Iterator[str]:
        """Yield the text that each token adds to the text before it, and the names of special tokens."""
        return text_parts(self._table, token_ids, None, lambda: iter(()))

    def token_text(self, token_id: int) -> str:
        """Return the text of a token on its own, see `lone_texts`."""
        return text_of(self._table.bytes_alone(token_id))

    def bytes_alone(self, token_id: int) -> bytes:
        """Return the bytes of a token on its own, which may be a part of a character."""
        return self._table.bytes_alone(token_id)

    def lone_texts(self, token_ids: Iterable[int]) -> list[str]:
        """Return the text of each token on its own: with its leading space, and U+FFFD for part of a character."""
        return [*map(self.token_text, token_ids)]


def _refuse_long(added: Iterable[AddedToken]) -> None:
    """Raise StartupError if an added token is so long that the search for it in texts would take too long."""
    length = max((len(token.content) for token in added), default=0)
    if length > _MOST_ADDED:
        raise StartupError(
            f"The tokenizer has an added token of {length} characters, and one may have at most {_MOST_ADDED}."
        )


def _rewrites(backend: RustTokenizer) -> bool:
    """Return whether the normalizer changes more than spaces, for example full-width letters."""
    letters = "<\uff1cAé\u212a"
    return backend.normalizer is not None and backend.normalizer.normalize_str(letters).strip("▁ ") != letters


def _check_characters(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair (U+{ord(text[error.start]):04X}), which is no character"
        raise invalid(param, f"it has {half}. Send valid Unicode text") from error
