import logging
from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest

from oaiserve.engine.grammars.grammar import CompiledGrammar
from oaiserve.engine.request import (
    ChatPrompt,
    Grammar,
    Prompt,
    Request,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    TooManyTokens,
)
from oaiserve.engine.tokenize import GrammarCompiled, Tokenized, TokenizeFailed, TokenizeStage, TokenizeStarted
from oaiserve.engine.types.media import MediaFile, MediaKind, Medium, Prepared, PromptMedia
from oaiserve.errors import APIError, ContextLengthExceeded, InternalError, InvalidRequest, Unavailable
from oaiserve.http.fair_turns import LARGE_BYTES
from tests.engine.doubles import Gate, new_world
from tests.world.loop import World
from tests.world.runtime import WorldQueue

COMPILE_SECONDS = 0.001
HELLO = {"role": "user", "content": "hello"}


def gate_in(world: World) -> Gate:
    gate = Gate()
    gate.live_in(world)
    return gate


class Encoder:
    """A tokenizer with one token per character or message, which stops at each "|".

    It keeps its prompts and the words between the stops, and waits while `gate` is unset.
    """

    def __init__(self, world: World) -> None:
        self.prompts: list[Prompt] = []
        self.words: list[str] = []
        self.gate = gate_in(world)
        self.gate.set()

    def encode_in_pieces(self, prompt: Prompt, most_tokens: int, expand: object) -> Generator[None, None, list[int]]:
        self.gate.wait()
        self.prompts.append(prompt)
        match prompt:
            case TokenPrompt():
                token_ids = list(prompt.token_ids)
            case TextPrompt(text="panic"):
                raise BaseException("a panic in the encoder")
            case TextPrompt(text="endless"):
                raise TooManyTokens(77, is_exact=False)
            case TextPrompt():
                token_ids = []
                for number, word in enumerate(prompt.text.split("|")):
                    if number:
                        yield
                    self.words.append(word)
                    token_ids += [ord(char) % 100 for char in word]
            case ChatPrompt():
                token_ids = [0] * len(prompt.messages)
        if len(token_ids) > most_tokens:
            raise TooManyTokens(len(token_ids), is_exact=True)
        return token_ids

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        self.gate.wait()
        return [[ord(char) for char in word] for word in words]


class Stage:
    def __init__(self, **options: Any) -> None:
        self.world = new_world()
        self.encoder = Encoder(self.world)
        self.started: list[TokenizeStarted] = []
        self.compiled: list[Grammar] = []
        self.ready: list[GrammarCompiled] = []
        self.posted: WorldQueue[Tokenized | TokenizeFailed] = self.world.queue()
        options = {"max_model_len": 10, "vocab_size": 100, "num_workers": 1, "runtime": self.world, **options}
        self.stage = TokenizeStage(cast(Any, self.encoder), self._compile, self._post, **options)

    def _compile(self, grammar: Grammar, client: str) -> CompiledGrammar:
        """A compiled grammar only passes through here, so its text stands for it. It waits while `gate` is unset."""
        self.encoder.gate.wait()
        self.world.sleep(COMPILE_SECONDS)
        self.compiled.append(grammar)
        if grammar.text == "broken":
            raise InvalidRequest("This grammar is broken.", param=grammar.param)
        return cast(CompiledGrammar, grammar.text)

    def _post(self, posted: TokenizeStarted | GrammarCompiled | Tokenized | TokenizeFailed) -> None:
        if isinstance(posted, TokenizeStarted):
            self.started.append(posted)
        elif isinstance(posted, GrammarCompiled):
            self.ready.append(posted)
        else:
            self.posted.put(posted)

    def result(self) -> Tokenized | TokenizeFailed:
        return self.posted.get()

    def run(self, *prompts: Prompt, **params: Any) -> Tokenized | TokenizeFailed:
        self.stage.submit(Request("r", prompts, SamplingParams(**params)))
        return self.result()

    def error(self, *prompts: Prompt, **params: Any) -> APIError:
        failed = self.run(*prompts, **params)
        return failed.error

    def is_accepted(self, *prompts: Prompt, **params: Any) -> bool:
        return isinstance(self.run(*prompts, **params), Tokenized)


@contextmanager
def running(**options: Any) -> Iterator[Stage]:
    stage = Stage(**options)
    try:
        yield stage
    finally:
        stage.encoder.gate.set()
        stage.stage.stop()


def request(request_id: str, text: str = "abc", client: str = "") -> Request:
    return Request(request_id, (TextPrompt(text),), client=client)


class Held:
    """Work that holds the only worker until it is let go, so that what is added meanwhile waits for sure."""

    def __init__(self, stage: Stage, client: str = "holds") -> None:
        self.begun = gate_in(stage.world)
        self.go = gate_in(stage.world)
        stage.stage.run(self._work(), client=client, num_bytes=0)

    def _work(self) -> Generator[None, None, None]:
        yield from ()
        self.begun.set()
        self.go.wait()

    def __enter__(self) -> None:
        self.begun.wait()

    def __exit__(self, *_: object) -> None:
        self.go.set()


def pieces(words: list[str], log: list[str]) -> Generator[None, None, str]:
    for number, word in enumerate(words):
        if number:
            yield
        log.append(word)
    return "".join(words)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_each_prompt_is_encoded_once_and_in_order(num_workers: int) -> None:
    prompts = (TextPrompt("ab"), TokenPrompt([7, 8, 9]), ChatPrompt([HELLO]))
    with running(num_workers=num_workers) as stage:
        tokenized = stage.run(*prompts, n=4)
        assert tokenized.token_ids == [[97, 98], [7, 8, 9], [0]]
        assert tokenized.num_prompt_tokens == 6
        assert tokenized.grammar is None
        assert stage.encoder.prompts == [*prompts]


def test_bad_words_come_with_the_prompts_but_for_those_the_model_has_no_ids_for() -> None:
    with running(vocab_size=100) as stage:
        tokenized = stage.run(TextPrompt("abc"), bad_words=("ab", "xy", "c"))
    assert tokenized.bad_words == [[97, 98], [99]]


@pytest.mark.parametrize(
    ("num_tokens", "params", "fits"),
    [
        (9, {}, True),
        (10, {}, False),  # one token has to be drawn
        (9, {"max_tokens": 5}, True),
        (10, {"max_tokens": 5}, False),
        (10, {"max_tokens": 0}, True),  # only scored
        (11, {"max_tokens": 0}, False),
    ],
)
def test_a_prompt_leaves_room_for_a_token_unless_it_is_only_scored(num_tokens: int, params: Any, fits: bool) -> None:
    with running(max_model_len=10) as stage:
        result = stage.run(TextPrompt("x" * num_tokens), **params)
    assert isinstance(result, Tokenized) == fits
    if isinstance(result, TokenizeFailed):
        error = result.error
        assert isinstance(error, ContextLengthExceeded)
        assert (error.param, error.status) == ("prompt", 400)
        # What it held would keep the prompt.
        assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)


def test_the_error_of_a_prompt_without_room_names_its_length_and_its_field() -> None:
    with running(max_model_len=10) as stage:
        error = stage.error(TextPrompt("x" * 16), max_tokens=5)
        assert stage.error(ChatPrompt([HELLO] * 10)).param == "messages"
    assert "your prompt resulted in 16 tokens" in error.message


@pytest.mark.parametrize("token_id", [-1, 100])
@pytest.mark.parametrize("param", ["logit_bias", "stop_token_ids", "allowed_token_ids", "prompt"])
def test_ids_must_be_in_the_models_vocabulary(param: str, token_id: int) -> None:
    def asked(token_id: int) -> tuple[TokenPrompt, dict[str, Any]]:
        ids = (5, token_id)
        if param == "prompt":
            return TokenPrompt(ids), {}
        return TokenPrompt([5]), {param: dict.fromkeys(ids, 1.0) if param == "logit_bias" else ids}

    with running(vocab_size=100) as stage:
        prompt, params = asked(token_id)
        error = stage.error(TextPrompt("abc"), prompt, **params)
        prompt, params = asked(99)
        assert stage.is_accepted(prompt, **params)
    assert isinstance(error, InvalidRequest)
    assert f"token id {token_id} is outside the model's vocabulary. Ids of this model's" in error.message
    assert error.message.endswith("are from 0 to 99.")
    assert error.param == param


def test_a_worker_survives_a_panic_of_the_encoder(caplog: pytest.LogCaptureFixture) -> None:
    with running() as stage, caplog.at_level(logging.ERROR):
        error = stage.error(TextPrompt("panic"))
        assert stage.is_accepted(TextPrompt("abc"))
    assert isinstance(error, InternalError)
    assert "a panic in the encoder" in caplog.text


@pytest.mark.parametrize("num_workers", [1, 3])
def test_stop_ends_the_threads_and_posts_every_request_once(num_workers: int) -> None:
    stage = Stage(num_workers=num_workers)
    for i in range(50):
        stage.stage.submit(request(str(i)))
    stage.stage.stop()
    results = [stage.posted.get_nowait() for _ in range(50)]
    assert stage.posted.empty()
    assert sorted(int(result.request.request_id) for result in results) == list(range(50))
    assert all(isinstance(result, Tokenized) or isinstance(result.error, Unavailable) for result in results)
    assert not any(worker.is_alive for worker in stage.world.workers)


def test_a_request_submitted_after_the_stop_fails() -> None:
    with running() as stage:
        stage.stage.stop()
        assert isinstance(stage.error(TextPrompt("abc")), Unavailable)
        assert stage.stage.num_waiting == 0


# -- turns


def test_a_prompt_of_many_pieces_and_prompts_of_others_take_turns() -> None:
    with running() as stage:
        with Held(stage):
            stage.stage.submit(request("long", "a|b|c|d", client="one"))
            stage.stage.submit(request("short", "x", client="two"))
            stage.stage.submit(request("other", "y|z", client="three"))
        results = [stage.result().request.request_id for _ in range(3)]
    assert stage.encoder.words == [*"axybzcd"]
    assert results == ["short", "other", "long"]


def test_the_prompts_of_one_request_are_a_piece_each_and_posted_once() -> None:
    many = Request("many", tuple(TextPrompt(char) for char in "abc"), client="one")
    with running() as stage:
        with Held(stage):
            stage.stage.submit(many)
            stage.stage.submit(request("next", "y|y", client="one"))
            stage.stage.submit(request("short", "x", client="two"))
        short, tokenized, _ = (stage.result() for _ in range(3))
        assert stage.encoder.words == [*"axbcyy"]
        assert (short.request.request_id, tokenized.token_ids) == ("short", [[97], [98], [99]])
    assert [started.request.request_id for started in stage.started] == ["many", "short", "next"]


def test_a_request_that_is_aborted_between_two_pieces_is_encoded_no_further() -> None:
    with running() as stage:
        with Held(stage):
            stage.stage.submit(request("long", "a|b|c", client="one"))
            between = Held(stage, client="two")
        with between:
            stage.stage.abort("long")
        assert stage.result() == Tokenized(stage.started[0].request, [])
    assert stage.encoder.words == ["a"]


def test_an_abort_ends_the_newer_of_two_requests_with_one_id() -> None:
    """A request that has been aborted may wait for its turn still, when its caller uses the id again."""
    with running() as stage:
        with Held(stage):
            stage.stage.submit(request("r", "old"))
            stage.stage.abort("r")
            stage.stage.submit(request("r", "new"))
        results = [stage.result(), stage.result()]
    assert stage.encoder.words == ["new"]
    assert [bool(result.token_ids) for result in results if isinstance(result, Tokenized)] == [False, True]


def test_a_stop_fails_what_is_between_two_pieces() -> None:
    with running() as stage:
        stage.encoder.gate = gate_in(stage.world)
        stage.stage.submit(request("long", "a|b"))
        stage.world.wait_for(lambda: stage.started)  # The first piece waits for the gate.
        stage.world.begin(stage.stage.stop)
        stage.world.settle()
        stage.stage.submit(request("next"))
        assert stage.result().request.request_id == "next"  # A stage that has not been stopped would let it wait.
        stage.encoder.gate.set()
        failed = stage.result()
    assert (failed.request.request_id, type(failed.error)) == ("long", Unavailable)
    assert stage.encoder.words == ["a"]
    assert stage.posted.empty()


def test_a_prompt_that_was_not_encoded_to_its_end_has_at_least_so_many_tokens() -> None:
    with running() as stage:
        error = stage.error(TextPrompt("endless"), max_tokens=3)
    assert isinstance(error, ContextLengthExceeded)
    assert error.message.startswith(
        "This model's maximum context length is 10 tokens. However, your prompt resulted in at least 77 tokens"
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_other_work_returns_its_result_or_its_error(num_workers: int) -> None:
    def fails(error: BaseException) -> Generator[None, None, None]:
        yield
        raise error

    with running(num_workers=num_workers) as stage:
        assert stage.stage.run(pieces([*"ab"], []), client="", num_bytes=1).result() == "ab"
        with pytest.raises(InvalidRequest, match="wrong"):
            stage.stage.run(fails(InvalidRequest("wrong")), client="", num_bytes=1).result()
        with pytest.raises(InternalError):
            stage.stage.run(fails(BaseException("a panic")), client="", num_bytes=1).result()
        assert stage.is_accepted(TextPrompt("abc"))
    with pytest.raises(Unavailable):
        stage.stage.run(pieces([*"ab"], []), client="", num_bytes=1).result()


def test_other_work_that_nobody_wants_any_more_ends_between_its_pieces() -> None:
    log: list[str] = []
    with running() as stage:
        with Held(stage):
            future = stage.stage.run(pieces([*"abc"], log), client="", num_bytes=1)
            assert future.cancel()
        assert stage.is_accepted(TextPrompt("abc"))
    assert log == []


def test_the_end_of_all_that_is_taken_is_told_once_however_it_comes() -> None:
    ended: list[str] = []
    with running() as stage:
        with Held(stage):
            work = stage.stage.run(pieces(["a"], []), client="", num_bytes=1, on_end=lambda: ended.append("kept"))
            dropped = stage.stage.run(pieces(["a"], []), client="", num_bytes=1, on_end=lambda: ended.append("dropped"))
            stage.stage.submit(request("tokenized"), on_end=lambda: ended.append("tokenized"))
            stage.stage.submit(request("aborted"), on_end=lambda: ended.append("aborted"))
            stage.stage.submit(request("failed", "a" * 100), on_end=lambda: ended.append("failed"))
            stage.stage.abort("aborted")
            dropped.cancel()
            assert ended == []
            assert stage.stage.num_waiting == 5
        work.result()
        for _ in range(3):
            stage.result()
        assert sorted(ended) == ["aborted", "dropped", "failed", "kept", "tokenized"]
        assert stage.stage.num_waiting == 0
    stage.stage.submit(request("too late"), on_end=lambda: ended.append("too late"))
    assert ended[-1] == "too late"


def test_the_grammar_of_a_request_is_compiled_once_whatever_the_number_of_its_prompts() -> None:
    with running() as stage:
        result = stage.run(TextPrompt("ab"), TextPrompt("cd"), grammar=Grammar("regex", "a+"))
    assert (result.grammar, len(result.token_ids), len(stage.compiled)) == ("a+", 2, 1)


def test_a_grammar_that_cannot_be_compiled_is_refused_before_a_prompt_is_encoded() -> None:
    with running() as stage:
        error = stage.error(TextPrompt("ab"), grammar=Grammar("regex", "broken", param="structured_outputs"))
    assert (error.status, error.param) == (400, "structured_outputs")
    assert (stage.encoder.prompts, stage.ready) == ([], [])


def test_a_compiled_grammar_is_told_with_its_time_also_if_a_prompt_is_refused_then() -> None:
    with running(max_model_len=2) as stage:
        error = stage.error(TextPrompt("abc"), grammar=Grammar("regex", "a+"))
    assert isinstance(error, ContextLengthExceeded)
    (started,) = stage.started
    (ready,) = stage.ready
    assert (ready.at_ns - started.at_ns, ready.request, ready.grammar) == (1_000_000, started.request, "a+")


def test_a_request_that_is_aborted_while_its_grammar_compiles_is_not_encoded() -> None:
    with running() as stage:
        stage.encoder.gate = gate_in(stage.world)
        params = SamplingParams(grammar=Grammar("regex", "a+"))
        stage.stage.submit(Request("r", (TextPrompt("ab"),), params))
        stage.stage.abort("r")
        stage.encoder.gate.set()
        result = stage.result()
    assert result == Tokenized(Request("r", (TextPrompt("ab"),), params), [])
    assert stage.encoder.prompts == []


@pytest.mark.parametrize("prompt", [TextPrompt(""), TokenPrompt([])])
def test_a_prompt_without_tokens_is_refused(prompt: Prompt) -> None:
    with running() as stage:
        assert "has no tokens" in stage.error(prompt).message


class HeldMedia:
    """A reader of media that waits until it is let go."""

    placeholders: Mapping[MediaKind, str] = {"image": "<image>"}

    def __init__(self) -> None:
        self.begun = Gate()
        self.go = Gate()
        self.prepared: list[MediaFile] = []

    def checked(self, files: Sequence[MediaFile]) -> list[MediaFile]:
        return list(files)

    def prepare(self, file: MediaFile, salt: str, *, only_text: bool = False) -> Prepared:
        self.begun.set()
        self.go.wait()
        self.prepared.append(file)
        return Prepared(Medium("image", b"key", 1), "<image>")

    def placed(self, token_ids: list[int], prepared: Sequence[Prepared]) -> PromptMedia:
        return PromptMedia(tuple(one.medium for one in prepared), array("i", [0]))


def test_texts_never_wait_for_images_and_images_of_aborted_requests_are_not_decoded() -> None:
    media = HeldMedia()
    with running(media=media, num_workers=2) as stage:
        media.begun.live_in(stage.world)
        media.go.live_in(stage.world)
        for number, num_bytes in enumerate([0, LARGE_BYTES + 1, 0, LARGE_BYTES + 1]):
            prompt = ChatPrompt([HELLO], media=(MediaFile("image", b"%d" % number),) * 2)
            stage.stage.submit(Request(f"image {number}", (prompt,), client=str(number), num_bytes=num_bytes))
            media.begun.wait()
        for num_bytes in (0, LARGE_BYTES + 1):
            stage.stage.submit(Request("text", (TextPrompt("abc"),), client="neighbour", num_bytes=num_bytes))
            assert stage.result().request.request_id == "text"
        assert media.prepared == []
        for number in range(1, 4):
            stage.stage.abort(f"image {number}")
        media.go.set()
        results = [stage.result() for _ in range(4)]
    assert {each.request.request_id for each in results if isinstance(each, Tokenized) and each.token_ids} == {
        "image 0"
    }
    assert [file.content for file in media.prepared] == [b"0", b"0"]
