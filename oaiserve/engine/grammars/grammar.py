"""Grammars: the tokens allowed next, so that an answer obeys its request's constraint.

llguidance compiles a grammar once for all requests with the same one. Each choice gets a matcher, which receives its
tokens one by one. This module must not depend on HTTP, torch, the scheduler or how tokens are drawn.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate
from threading import Lock
from time import monotonic_ns, thread_time_ns
from typing import TYPE_CHECKING

import llguidance

from oaiserve.engine.grammars.grammar_tokens import MOST_FORCED_CHARACTERS, Mask, Tokens
from oaiserve.engine.grammars.notations import NO_FORCING, Translated, translate, with_prefix
from oaiserve.engine.grammars.refusal import Refused
from oaiserve.engine.request import Grammar, GrammarKind
from oaiserve.engine.text.detokenize import TokenTable
from oaiserve.errors import invalid

if TYPE_CHECKING:
    import tokenizers

MOST_KEPT = 64  # compiled grammars, and refusals
MOST_KEPT_BYTES = 256 * 2**20  # memory, estimated from the length of the texts
MOST_SEARCH_NS = 200_000_000  # limit for locating an error
# How many tokens of a text before the answer are read between two checks of the time, and the time that such a check
# grants: a token usually takes about 1 us.
BEGUN_TOGETHER = 8
BEGUN_NS = 40_000
# The engine thread's time for a grammar per token of an answer, and how far all answers of a client together may exceed
# it. Masks for JSON schemas take 0.05 to 2 ms.
TOKEN_NS = 5_000_000
MOST_LATER_NS = TOKEN_NS  # The engine thread itself compiles a layout that takes less time than this.
LONG_TEXT = 4_000  # The layouts of a schema with more characters take longer, and are compiled in parallel.
MOST_EXCESS_NS = 250_000_000
SECONDS_OF_EXCESS = 25  # time until a client's allowance is full again
MOST_CLIENTS = 1024  # clients whose excess is stored
MOST_QUOTED = 200  # characters of a library's message

_Key = tuple[GrammarKind, str, str, bool, bool]  # fields of `Grammar`, of which the second is the text
_AFTER_BRACKET = re.compile(rb"[\[{]+[^\[{]")


class GrammarViolation(Exception):
    """The grammar does not allow a drawn token, which is a bug of the server."""


class GrammarGivenUp(Exception):
    """The grammar allows no further token, or the next ones take too long to compute."""


@dataclass(slots=True, eq=False)
class _Original:
    """The original matchers of a grammar. Copies share their states and their limit."""

    matcher: llguidance.LLMatcher
    # Returns the matcher for JSON on one line. If compiling it is quick, it is only compiled when a model first chooses
    # that layout. `matcher` allows both layouts.
    in_one_line: Callable[[], llguidance.LLMatcher] | None = None
    is_spent: bool = False  # One of the copies has failed, so others may fail as well.
    left_out: Sequence[str] = ()  # omitted keywords, which llguidance cannot obey; "" stands for a whole schema


@dataclass(slots=True)
class Excess:
    """The CPU time in excess of TOKEN_NS per token, summed over all answers of a client. It decreases with time."""

    ns: int = 0
    at_ns: int = 0

    def add(self, ns: int) -> None:
        """Add a token's excess, which may be negative. Raises GrammarGivenUp."""
        now_ns = monotonic_ns()
        given_back_ns = (now_ns - self.at_ns) * MOST_EXCESS_NS // (SECONDS_OF_EXCESS * 10**9)
        self.ns = max(0, self.ns - given_back_ns + ns)
        self.at_ns = now_ns
        if ns > 0 and self.ns > MOST_EXCESS_NS:  # A token that stays within its time is never refused.
            limits = f"{TOKEN_NS // 1_000_000} ms a token, and {MOST_EXCESS_NS // 1_000_000} ms beyond that"
            raise GrammarGivenUp(f"to find which tokens may come next takes too long (limits: {limits})")


_Outcome = Future[_Original | Refused]


class Grammars:
    """The grammars of one model. Any thread may compile."""

    def __init__(self, backend: tokenizers.Tokenizer, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`vocab_size` is the number of the model's ids: the tokenizer may have fewer or more."""
        self._backend = backend
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._excess_of = lru_cache(MOST_CLIENTS)(lambda _client: Excess())
        self._lock_of_tokens = Lock()
        self._lock = Lock()  # guards all fields below
        self._kept: OrderedDict[_Key, _Outcome] = OrderedDict()  # most recently used last
        self._kept_bytes = 0

    def prepared(self) -> Tokens | None:
        """Return the tokens of the model; None if its answers cannot obey a grammar.

        The first call prepares them, which takes a fraction of a second. For half of it, no other thread runs Python
        code.
        """
        with self._lock_of_tokens:
            return self._tokens

    @cached_property
    def _tokens(self) -> Tokens | None:
        table = TokenTable(self._backend)
        eos = sorted(token_id for token_id in self._eos_token_ids if token_id < self._vocab_size)
        # Without the true bytes of its tokens, or without an end token, no answer can follow a grammar.
        if table.has_bytes and eos:
            return Tokens(table, self._vocab_size, eos)
        return None

    def compile(self, grammar: Grammar, client: str = "") -> CompiledGrammar:
        """Compile a grammar for a client, or find an equal compiled one. Raises InvalidRequest with `grammar.param`.

        This may take many milliseconds. If another thread is compiling the same one, it waits.
        """
        begin_ns = monotonic_ns()
        tokens = self.prepared()
        if tokens is None:
            reason = "this model's tokenizer has no exact bytes for its tokens, or no end-of-sequence token"
            raise invalid(grammar.param, f"{reason}, so answers cannot be held to a grammar")
        key = (grammar.kind, grammar.text, grammar.prefix, grammar.in_one_line, grammar.is_lenient)
        future, was_cached = self._find(key)
        if not was_cached:
            try:
                future.set_result(_original(tokens, grammar))
            except Refused as refused:
                future.set_result(Refused(refused.reason))  # a new error: the old one's traceback keeps the text alive
            except BaseException as error:  # a bug, or a panic in Rust: other threads may wait for it
                future.set_exception(error)
        outcome = future.result()
        if isinstance(outcome, Refused):
            raise invalid(grammar.param, outcome.reason)
        return CompiledGrammar(outcome, tokens, self._excess_of(client), monotonic_ns() - begin_ns, was_cached)

    def _find(self, key: _Key) -> tuple[_Outcome, bool]:
        """Return the outcome of compiling, and whether some caller has begun it already. If not, this caller must do
        it."""
        with self._lock:
            if (future := self._kept.pop(key, None)) is not None and not _is_spent(future):
                self._kept[key] = future
                return future, True
            if future is None:
                self._kept_bytes += _estimated_bytes(key)
            future = self._kept[key] = Future()
            while len(self._kept) > MOST_KEPT or (self._kept_bytes > MOST_KEPT_BYTES and len(self._kept) > 1):
                oldest, _ = self._kept.popitem(last=False)
                self._kept_bytes -= _estimated_bytes(oldest)
            return future, False


def _is_spent(future: _Outcome) -> bool:
    if not future.done():
        return False
    return future.exception() is not None or getattr(future.result(), "is_spent", False)


def _original(tokens: Tokens, grammar: Grammar) -> _Original:
    translating = partial(
        translate, grammar.kind, grammar.text, in_one_line=grammar.in_one_line, is_lenient=grammar.is_lenient
    )
    translated = translating()
    try:
        return _compiled(tokens, translated, grammar.prefix, names_place=not translated.may_leave_out)
    except Refused:
        if not translated.may_leave_out:
            raise
    translated = translating(error_of=lambda text: _matcher(tokens, text).get_error())
    return replace(_compiled(tokens, translated, grammar.prefix), left_out=translated.left_out)


def _compiled(tokens: Tokens, translated: Translated, prefix: str, *, names_place: bool = True) -> _Original:
    """Compile a grammar. With `names_place`, a refusal names the innermost subschema that fails with the same kind of
    error.

    llguidance doesn't name it, and finding it takes time.
    """
    in_one_line = cache(partial(_matcher, tokens, translated.text, prefix))
    if translated.in_lines:
        began_ns = thread_time_ns()
        with ThreadPoolExecutor(1, "grammars") as beside:  # Starts a thread only if work is submitted.
            if len(translated.text) > LONG_TEXT:
                beside.submit(in_one_line)  # llguidance compiles without the interpreter's lock.
            matcher = _matcher(tokens, translated.in_lines, prefix)
        if not matcher.is_error():
            if thread_time_ns() - began_ns > MOST_LATER_NS:
                in_one_line()  # If the engine thread compiled it later, others would wait.
            return _Original(matcher, in_one_line)
    matcher = in_one_line()
    if not (error := matcher.get_error()):
        return _Original(matcher)
    if translated.narrower is not None:
        return _compiled(tokens, translated.narrower(), prefix, names_place=names_place)
    if not names_place:
        raise Refused(_explained(error))
    deadline_ns = monotonic_ns() + MOST_SEARCH_NS
    for subschema, place in translated.subschemas:
        if monotonic_ns() > deadline_ns:
            break
        if _matcher(tokens, subschema).get_error().startswith(error.partition(":")[0]):
            raise Refused(f"{_explained(error)} at {place}")
    raise Refused(_explained(error))


def _matcher(tokens: Tokens, text: str, prefix: str = "") -> llguidance.LLMatcher:
    if prefix:
        text = with_prefix(text, prefix)
    matcher = llguidance.LLMatcher(tokens.tokenizer, text, log_level=0, limits=_LIMITS)
    # Computing the first mask belongs to compiling: it takes longer than others, and reveals errors.
    matcher.compute_bitmask()
    return matcher


# The limits of time and memory for a grammar and for a mask. A choice ends if its mask exceeds them.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=25_000,
    max_items_in_row=10_000,  # an object takes four for each property that may come next
    max_lexer_states=25_000,  # up to half a KiB each
    max_grammar_size=500_000,
    verbose_errors=False,
)


def _estimated_bytes(key: _Key) -> int:
    return 2**16 + 64 * len(key[1])


def _explained(error: str) -> str:
    if error.startswith("NoExtensionBias"):
        return "no text can satisfy it"
    # A failed assertion of llguidance, or messages about its limits, which clients can't change.
    if any(part in error for part in ("symbols.len()", "limits.", "limit for this grammar")):
        return "the grammar is too large"
    # The message quotes lines around the mistake. The last of them may be the one that the server has added.
    lines = [line for line in error.replace("<non-verbose/>", "").splitlines() if not line.endswith(NO_FORCING)]
    return " ".join(" ".join(lines).split())[:MOST_QUOTED].rstrip(".")


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar ready for any number of choices. It is not picklable."""

    _original: _Original
    _tokens: Tokens
    _excess: Excess
    compile_ns: int  # time that this request waited for it
    was_cached: bool  # It was compiled before, for another request.

    @property
    def left_out(self) -> Sequence[str]:
        """Return the keywords of a lenient schema that turned out impossible to obey only when it was compiled; ""
        stands for a whole schema."""
        return self._original.left_out

    def matcher(self) -> Matcher:
        return Matcher(self._original, self._tokens, self._excess)


class Matcher:
    """Matches the tokens of one choice. One thread at a time may use it, and it is not picklable."""

    def __init__(self, original: _Original, tokens: Tokens, excess: Excess) -> None:
        self._original = original
        self._excess = excess
        self._unpaid_ns = 0  # time of everything except masks; charged to the next mask
        self.mask_ns = 0  # CPU time of the last mask
        self._matcher = original.matcher.deep_copy()
        self._may_break_lines = original.in_one_line is not None
        self._last_byte = b""
        # The ids so far, until the model has chosen between JSON on one line and on several.
        self._ids_before_layout: list[int] | None = [] if self._may_break_lines else None
        self._tokens = tokens
        self.is_complete = False
        """Nothing but the end can follow: the choice ends now, without an end-of-sequence token."""

    def copy(self) -> Matcher:
        """Return a matcher at the same position, for another choice."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other._ids_before_layout = None if self._ids_before_layout is None else [*self._ids_before_layout]
        return other

    def fill_mask(self, words: Mask) -> None:
        """Write the mask of the ids allowed next: bit `i % 32` of word `i // 32` is for id `i`.

        The bits of the end-of-sequence ids are set exactly where the grammar may end, those of other special tokens
        never. Raises GrammarGivenUp.
        """
        began_ns = thread_time_ns()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            self.mask_ns = thread_time_ns() - began_ns
        self._check(GrammarGivenUp)
        self._tokens.remove_joined(words, self._matcher, in_lines=self._may_break_lines)
        if self._may_break_lines:
            self._tokens.line_breaks.remove(words, self._matcher, self._last_byte)
        self._pay(thread_time_ns() - began_ns - TOKEN_NS)

    def fill_free(self, words: Mask) -> None:
        words[:] = self._tokens.all_ids.view(words.dtype)

    def unfit_ends(self, text: bytes, closing: bytes) -> list[int]:
        """Return the ids whose tokens, after `text`, complete `closing` and continue with something that the grammar
        doesn't allow at its beginning."""
        ends = self._tokens.with_more(text, closing)
        return [token_id for token_id, rest in ends if self._matcher.validate_tokens(rest) < len(rest)]

    def _pay(self, excess_ns: int) -> None:
        excess_ns = excess_ns + self._unpaid_ns
        self._unpaid_ns = 0
        self.mask_ns = TOKEN_NS + excess_ns
        self._excess.add(excess_ns)

    def forced_ids(self) -> list[int]:
        """Return the next ids that are forced, because each is the only one in its mask. The search stops when it gets
        expensive."""
        began_ns = thread_time_ns()
        forced_ids = self._matcher.compute_ff_tokens()
        self._unpaid_ns += thread_time_ns() - began_ns
        if self._may_break_lines and self._tokens.line_breaks.may_follow(self._matcher, forced_ids):
            forced_ids = forced_ids[:-1]  # Models join the last token with the text after it, as in '":' and '{\n'.
        # Only the beginning of a long text was tokenized, and the tokens near the cut may differ from those of the
        # whole.
        ends = accumulate(len(self._tokens.tokens[token_id]) for token_id in forced_ids)
        return [token_id for token_id, end in zip(forced_ids, ends, strict=True) if end <= MOST_FORCED_CHARACTERS // 2]

    def num_possible(self, token_ids: list[int]) -> int:
        """Return the number of these ids that may come next, in order."""
        if self.mask_ns > TOKEN_NS // 2 or self._ids_before_layout is not None:
            return 0  # Each further token takes more time than the one before it, or may choose the layout.
        began_ns = thread_time_ns()
        number = self._matcher.validate_tokens(token_ids)
        self._unpaid_ns += thread_time_ns() - began_ns
        return number

    def fill_masks_behind(self, token_ids: Sequence[int], rows: Mask) -> None:
        """Fill a row after each of these allowed tokens, as `fill_mask` would.

        Rows after the end, after a failed mask, or after the time of one token is used up stay unchanged, so a draft
        takes at most that time and one more mask. Raises GrammarGivenUp.
        """
        began_ns = thread_time_ns()
        ahead = self._matcher.deep_copy()  # If a mask after these tokens fails, this matcher isn't affected.
        for words, token_id in zip(rows, token_ids, strict=True):
            ahead.consume_token(token_id)
            if ahead.is_stopped():
                break
            ahead.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if ahead.is_error():
                words[:] = 0
            else:
                self._tokens.remove_joined(words, ahead, in_lines=self._may_break_lines)
                if self._may_break_lines:
                    self._tokens.line_breaks.remove(words, ahead, self._tokens.tokens[token_id][-1:])
            if ahead.is_error() or thread_time_ns() - began_ns > TOKEN_NS:
                break
        self._pay(thread_time_ns() - began_ns - TOKEN_NS)

    def push(self, token_id: int) -> None:
        """Append this token. Raises GrammarViolation if it may not come next."""
        began_ns = thread_time_ns()
        self._matcher.consume_token(token_id)
        self._hold_layout([token_id])
        self._unpaid_ns += thread_time_ns() - began_ns
        self._check(GrammarViolation)

    def begin(self, text: bytes) -> None:
        """Begin with this text, starting at the last token before the answer. Raises GrammarViolation and
        GrammarGivenUp."""
        if not self.begins(text):
            raise GrammarViolation("no allowed text begins with what came with the last token before the answer")

    def _hold_layout(self, token_ids: list[int]) -> None:
        """Keep JSON on one line from here on, unless the model breaks the line after its first bracket."""
        if self._may_break_lines and token_ids:
            self._last_byte = self._tokens.tokens[token_ids[-1]][-1:]
        if self._ids_before_layout is None or self._original.in_one_line is None:
            return
        self._ids_before_layout += token_ids
        written = self._ids_before_layout
        match = _AFTER_BRACKET.search(b"".join(self._tokens.tokens[token_id] for token_id in written))
        if match is None:
            return
        self._ids_before_layout = None
        if match[0].endswith(b"\n"):
            return
        in_one_line = self._original.in_one_line().deep_copy()
        if in_one_line.validate_tokens(written) == len(written):
            in_one_line.consume_tokens(written)
            self._matcher = in_one_line
            self._may_break_lines = False

    def begins(self, text: bytes) -> bool:
        """Return whether an allowed text can begin with this text. If so, the matcher has begun with it; otherwise the
        matcher cannot be used again. Raises GrammarGivenUp."""
        due_ns = thread_time_ns() + TOKEN_NS
        # The grammar reads bytes, so it doesn't matter which tokens they come in.
        token_ids = self._tokens.ids_of_text(text)
        for start in range(0, len(token_ids), BEGUN_TOGETHER):
            some = token_ids[start : start + BEGUN_TOGETHER]
            if self._matcher.validate_tokens(some) < len(some):
                return False
            self._matcher.consume_tokens(some)
            self._check(GrammarViolation)
            due_ns += BEGUN_NS
            if (now_ns := thread_time_ns()) > due_ns:
                self._excess.add(now_ns - due_ns)
                due_ns = now_ns
        self._hold_layout(token_ids)
        self._check(GrammarViolation)
        return True

    @property
    def may_end(self) -> bool:
        """Return whether the text so far is complete, even if more may follow."""
        return self._matcher.is_accepting()

    def num_before_end(self, token_ids: list[int]) -> int:
        """Return how many of these tokens the grammar allows in sequence until the text may end."""
        number = self.num_possible(token_ids)
        ahead = self._matcher.deep_copy()
        for place in range(number):
            ahead.consume_token(token_ids[place])
            if ahead.is_accepting():
                return place
        return number

    def _check(self, error: type[GrammarViolation | GrammarGivenUp]) -> None:
        if self._matcher.is_error():
            self._original.is_spent = True
            message = self._matcher.get_error()
            # An allowed token may exceed a limit of llguidance, for example within a name of 28,000 characters.
            raise (GrammarGivenUp if "too many" in message else error)(_explained(message))
        self.is_complete = self._matcher.is_stopped()
