import inspect
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from oaiserve.engine.request import ChatPrompt, Prompt, Request, SamplingParams, TextPrompt, TokenPrompt
from oaiserve.engine.tokenize import Tokenized, TokenizeFailed, Tokenizer, TokenizeStage, TokenizeStarted
from oaiserve.errors import (
    APIError,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    StartupError,
    Unavailable,
)
from tests.engine.tokenizers_for_tests import CHATML, byte_level, metaspace, sentencepiece, wordpiece


def wrap(backend: Backend, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template)


BYTE_LEVEL, SENTENCEPIECE = Tokenizer(wrap(byte_level())), Tokenizer(wrap(sentencepiece()))
HELLO = {"role": "user", "content": "hello"}
ALTERNATING = (  # no system message but the first, strictly user and assistant in turns
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "<{{ m.role }}:{{ m.content }}>{% endfor %}"
)
PARTS = "{% for m in messages %}<{{ m.role }}:{% for part in m.content %}{{ part.text }}|{% endfor %}>{% endfor %}"
STRING_OR_PARTS = (
    "{% for m in messages %}<{{ m.role }}:"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}>{% endfor %}"
)


def render(template: str, *messages: dict[str, Any], **options: Any) -> str:
    chat_template = Tokenizer(wrap(byte_level(), template)).chat_template
    assert chat_template is not None
    return chat_template.render(ChatPrompt(messages, **options))


# -- text


@pytest.mark.parametrize("build", [byte_level, sentencepiece, metaspace, wordpiece])
@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("text", ["hello world", " two words, é€🙂\n", "hello<|im_end|></s>[SEP]"])
def test_text_becomes_the_ids_that_transformers_gives(
    build: Callable[[], Backend], add_special_tokens: bool, text: str
) -> None:
    expected = wrap(build())(text, add_special_tokens=add_special_tokens).input_ids
    assert Tokenizer(wrap(build())).encode(TextPrompt(text, add_special_tokens)) == expected


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_apply() -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert len(Tokenizer(wrap(backend)).encode(TextPrompt("xyz"))) == 3


def test_many_threads_share_a_tokenizer() -> None:
    expected = BYTE_LEVEL.encode(TextPrompt("hello world " * 50))
    results: SimpleQueue[list[int]] = SimpleQueue()
    threads = [
        threading.Thread(
            target=lambda: [results.put(BYTE_LEVEL.encode(TextPrompt("hello world " * 50))) for _ in range(20)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert [results.get(timeout=10) for _ in range(80)] == [expected] * 80


def test_an_empty_prompt_is_refused_unless_special_tokens_fill_it() -> None:
    assert SENTENCEPIECE.encode(TextPrompt("")) == [1]
    with pytest.raises(InvalidRequest, match="has no tokens") as caught:
        BYTE_LEVEL.encode(TextPrompt(""))
    assert caught.value.param == "prompt"


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"half of a surrogate pair \(U\+D83D\)") as caught:
        BYTE_LEVEL.encode(TextPrompt("smile \ud83d"))
    assert caught.value.param == "prompt"


def test_text_that_the_tokenizer_has_no_tokens_for_is_refused() -> None:
    backend = metaspace()
    backend.model.unk_token = "not in the vocabulary"
    with pytest.raises(InvalidRequest, match="cannot encode it"):
        Tokenizer(wrap(backend)).encode(TextPrompt("xyz"))


def test_token_ids_are_used_as_they_are() -> None:
    assert SENTENCEPIECE.encode(TokenPrompt((5, 7, 5))) == [5, 7, 5]
    with pytest.raises(InvalidRequest, match="has no tokens"):
        SENTENCEPIECE.encode(TokenPrompt([]))


def test_bad_words_are_encoded_with_and_without_a_space_before_them_and_without_special_tokens() -> None:
    encoded = BYTE_LEVEL.encode_bad_words(["w", "  hello", "he w"])
    texts = [[BYTE_LEVEL.token_text(token_id) for token_id in token_ids] for token_ids in encoded]
    assert texts == [["w"], [" w"], ["hello"], [" ", "hello"], ["he", " w"], [" ", "he", " w"]]
    assert 1 not in SENTENCEPIECE.encode_bad_words(["hello"])[0]


@pytest.mark.parametrize(("word", "reason"), [("  ", "'  ' has no tokens"), ("a\ud83d", "half of a surrogate pair")])
def test_a_bad_word_without_tokens_is_refused(word: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        BYTE_LEVEL.encode_bad_words(["fine", word])
    assert caught.value.param == "bad_words"


def test_a_tokenizer_without_rust_form_is_refused_at_the_start() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(StartupError, match="The tokenizer Slow has no Rust form"):
        Tokenizer(Slow())  # type: ignore[arg-type]


def test_a_tokenizer_loads_from_a_folder(tmp_path: Path) -> None:
    wrap(byte_level(), CHATML).save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(TextPrompt("hello")) == BYTE_LEVEL.encode(TextPrompt("hello"))
    assert tokenizer.chat_template is not None
    assert tokenizer.vocab_size == BYTE_LEVEL.vocab_size


def test_a_folder_without_a_tokenizer_stops_the_start_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="Could not load a tokenizer from") as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"There is no model at '.*model\.gguf'"):
        Tokenizer.from_pretrained(tmp_path / "model.gguf")


def test_decode_and_token_text_show_special_tokens_and_spaces() -> None:
    token_ids = BYTE_LEVEL.encode(TextPrompt("hello w<|im_end|>"))
    assert BYTE_LEVEL.decode(token_ids) == "hello w<|im_end|>"
    assert BYTE_LEVEL.decode(token_ids, skip_special_tokens=True) == "hello w"
    assert [BYTE_LEVEL.token_text(token_id) for token_id in token_ids] == ["hello", " w", "<|im_end|>"]


# -- chat


def test_messages_go_through_the_template_and_get_no_second_special_tokens() -> None:
    tokenizer = Tokenizer(wrap(sentencepiece(), "{{ '<s>' }}{{ messages[0]['content'] }}"))
    assert tokenizer.encode(ChatPrompt([HELLO])) == SENTENCEPIECE.encode(TextPrompt("hello"))


def test_chat_asks_for_an_answer_or_continues_the_last_message() -> None:
    answer = {"role": "assistant", "content": "well, "}
    assert render(CHATML, HELLO).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert render(CHATML, HELLO, add_generation_prompt=False).endswith("hello<|im_end|>\n")
    continued = render(CHATML, HELLO, answer, add_generation_prompt=False, continue_final_message=True)
    assert continued.endswith("<|im_start|>assistant\nwell, ")


def test_a_template_given_at_the_start_replaces_the_models_own() -> None:
    tokenizer = Tokenizer(wrap(byte_level(), CHATML), "{{ messages[0].content }}")
    assert tokenizer.encode(ChatPrompt([HELLO])) == tokenizer.encode(TextPrompt("hello"))


def test_without_a_template_chat_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        BYTE_LEVEL.encode(ChatPrompt([HELLO]))
    assert caught.value.param == "messages"


def test_a_template_that_is_no_jinja_stops_the_start() -> None:
    with pytest.raises(StartupError, match=r"not valid Jinja: .* \(line 1\)"):
        Tokenizer(wrap(byte_level(), "{% for m in %}"))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ALTERNATING, "Roles must alternate."),
        ("{{ messages[1].content }}", "list object has no element 1"),
        ("{{ 'text: ' + messages[0] }}", "can only concatenate str"),
    ],
)
def test_what_a_template_rejects_is_the_clients_error(template: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        render(template, {"role": "assistant", "content": "hello"})
    assert caught.value.param == "messages"


def test_content_parts_are_joined_for_a_template_of_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in render(CHATML, {"role": "user", "content": parts})


@pytest.mark.parametrize(("template", "expected"), [(PARTS, "<user:one|two|>"), (STRING_OR_PARTS, "<user:onetwo>")])
def test_content_parts_stay_parts_for_a_template_that_iterates_over_them(template: str, expected: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(template, {"role": "user", "content": parts}) == expected


def test_a_string_becomes_a_part_for_a_template_of_parts_only() -> None:
    assert render(PARTS, HELLO) == "<user:hello|>"
    assert render(STRING_OR_PARTS, HELLO) == "<user:hello>"


@pytest.mark.parametrize("template", [CHATML, PARTS])
def test_a_part_that_is_no_text_is_refused_by_its_type(template: str) -> None:
    with pytest.raises(InvalidRequest, match="'image_url'") as caught:
        render(template, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]})
    assert caught.value.param == "messages"


def test_developer_is_system_for_a_template_that_lacks_it() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert render(STRING_OR_PARTS, developer) == "<system:Be brief.>"
    assert render("{# 'developer' #}" + STRING_OR_PARTS, developer) == "<developer:Be brief.>"


def test_system_messages_are_merged_only_where_the_template_takes_one() -> None:
    messages = [{"role": "system", "content": "A"}, HELLO, {"role": "developer", "content": "B"}]
    assert render(ALTERNATING, *messages) == "[A\n\nB]<user:hello>"
    assert render(STRING_OR_PARTS, *messages) == "<system:A><user:hello><system:B>"


@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"city": "Rome"}', "Rome"), ("no json", "none"), ("[1]", "none"), ("", "none")]
)
def test_tool_arguments_are_parsed_where_they_are_an_object(arguments: str, expected: str) -> None:
    template = (
        "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a.city if a is mapping else 'none' }}"
        "{{ messages[0].content is defined }}"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    assert render(template, {"role": "assistant", "content": None, "tool_calls": [call]}) == f"{expected}False"


def test_the_clients_messages_are_not_changed() -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "A"}]}]
    render(CHATML, *messages)
    assert messages == [{"role": "developer", "content": [{"type": "text", "text": "A"}]}]


def test_template_variables_reach_the_template() -> None:
    template = "{{ messages[0].content }} {{ mood }} {{ tools[0].name }}"
    assert render(template, HELLO, template_kwargs={"mood": "calm", "tools": [{"name": "f"}]}) == "hello calm f"


@pytest.mark.parametrize(
    "name", ["messages", "tokenize", "chat_template", "add_generation_prompt", "conversation", "conversations", "self"]
)
def test_template_variables_cannot_stand_in_for_the_request(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'{name}' cannot be set") as caught:
        render(CHATML, HELLO, template_kwargs={name: True})
    assert caught.value.param == "chat_template_kwargs"


# Variables with the names of arguments, of what templates call, and of what Python and Jinja know themselves.
NAMES = st.sampled_from(
    [
        *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
        *("messages", "arguments", "args", "tojson", "raise_exception", "namespace", "loop", "caller", "range", "dict"),
        *("__class__", "strftime_now", "bos_token", "eos_token", "", "a b", "None", "context", "environment"),
    ]
)
DEPTHS = st.sampled_from([1, 100, 300, 900, 990, 1000, 50_000])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
DEEP = DEPTHS.map(lambda depth: reduce(lambda inner, _: {"a": inner}, range(min(depth, 1000)), "end"))
ARGUMENTS = st.one_of(
    st.text(),
    VALUES.map(json.dumps),
    DEPTHS.map(lambda depth: '{"a":' * depth + "1" + "}" * depth),
    st.sampled_from(['{"a": "\\ud800"}', '{"a": ' + "9" * 5000 + "}", '{"a": NaN}', '{"a": 1e999}']),
)
CURIOUS = (  # it uses all that it is given, and quotes it when it refuses
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}"
    "{% if call.function.arguments.a is string %}{{ raise_exception('no ' + call.function.arguments.a) }}{% endif %}"
    "{% endfor %}{{ m.name }}{{ m.content }}{% endfor %}{{ tools | tojson }}{{ documents }}{{ mood | tojson }}"
)
TEMPLATES = [Tokenizer(wrap(byte_level(), template)) for template in (CHATML, CURIOUS, ALTERNATING, STRING_OR_PARTS)]


@given(
    st.sampled_from(TEMPLATES),
    ARGUMENTS,
    st.dictionaries(NAMES | st.just("mood"), VALUES | DEEP, max_size=2),
    VALUES | DEEP,
    st.booleans(),
)
def test_whatever_a_template_gets_is_encoded_or_refused(
    tokenizer: Tokenizer, arguments: str, variables: dict[str, Any], odd: Any, ends_open: bool
) -> None:
    call = {"id": odd, "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [HELLO, {"role": "assistant", "content": "", "name": "é\x00", "tool_calls": [call, {"function": odd}]}]
    prompt = ChatPrompt(
        messages, template_kwargs=variables, add_generation_prompt=not ends_open, continue_final_message=ends_open
    )
    try:
        tokenizer.encode(prompt)
    except InvalidRequest as refused:
        body = refused.body(request_id="", trace_id="")
    else:
        return
    assert 0 < len(json.dumps(body, ensure_ascii=False).encode()) < 2000


def test_tool_arguments_that_are_nested_very_deeply_are_refused() -> None:
    call = {"function": {"name": "f", "arguments": "[" * 50_000 + "]" * 50_000}}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        render(CHATML, {"role": "assistant", "content": "", "tool_calls": [call]})


# -- the stage


class Encoder:
    """A tokenizer with one token per character or message. It keeps its prompts, and waits while `gate` is unset."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, prompt: Prompt) -> list[int]:
        self.gate.wait(10)
        self.prompts.append(prompt)
        match prompt:
            case TokenPrompt():
                return list(prompt.token_ids)
            case TextPrompt(text="panic"):
                raise BaseException("a panic in the encoder")
            case TextPrompt():
                return [ord(char) % 100 for char in prompt.text]
            case ChatPrompt():
                return [0] * len(prompt.messages)

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        self.gate.wait(10)
        return [[ord(char) for char in word] for word in words]


class Stage:
    def __init__(self, **options: Any) -> None:
        self.encoder = Encoder()
        self.started: list[TokenizeStarted] = []
        self.posted: SimpleQueue[Tokenized | TokenizeFailed] = SimpleQueue()
        options = {"max_model_len": 10, "vocab_size": 100, "num_workers": 1, **options}
        self.stage = TokenizeStage(self.encoder, self._post, **options)

    def _post(self, posted: TokenizeStarted | Tokenized | TokenizeFailed) -> None:
        if isinstance(posted, TokenizeStarted):
            self.started.append(posted)
        else:
            self.posted.put(posted)

    def result(self) -> Tokenized | TokenizeFailed:
        return self.posted.get(timeout=10)

    def run(self, *prompts: Prompt, **params: Any) -> Tokenized | TokenizeFailed:
        self.stage.submit(Request("r", prompts, SamplingParams(**params)))
        return self.result()

    def error(self, *prompts: Prompt, **params: Any) -> APIError:
        failed = self.run(*prompts, **params)
        assert isinstance(failed, TokenizeFailed)
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


def request(request_id: str, text: str = "abc") -> Request:
    return Request(request_id, (TextPrompt(text),))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_each_prompt_is_encoded_once_and_in_order(num_workers: int) -> None:
    prompts = (TextPrompt("ab"), TokenPrompt([7, 8, 9]), ChatPrompt([HELLO]))
    with running(num_workers=num_workers) as stage:
        tokenized = stage.run(*prompts, n=4)
        assert isinstance(tokenized, Tokenized)
        assert tokenized.token_ids == [[97, 98], [7, 8, 9], [0]]
        assert tokenized.num_prompt_tokens == 6
        assert stage.encoder.prompts == [*prompts]


def test_submit_encodes_nothing_on_the_callers_thread() -> None:
    with running() as stage:
        stage.encoder.gate.clear()
        for i in range(5):
            stage.stage.submit(request(str(i)))
        assert stage.encoder.prompts == []


def test_bad_words_come_with_the_prompts_but_for_those_the_model_has_no_ids_for() -> None:
    with running(vocab_size=100) as stage:
        tokenized = stage.run(TextPrompt("abc"), bad_words=("ab", "xy", "c"))
    assert isinstance(tokenized, Tokenized)
    assert tokenized.bad_words == [[97, 98], [99]]


def test_the_worker_stamps_when_it_begins_and_when_the_ids_are_known() -> None:
    with running(clock=iter([100, 250]).__next__) as stage:
        tokenized = stage.run(TextPrompt("abc"))
    assert isinstance(tokenized, Tokenized)
    assert stage.started == [TokenizeStarted(tokenized.request, 100)]
    assert tokenized.at_ns == 250


def test_a_request_that_cannot_be_tokenized_has_a_start_stamp_only() -> None:
    with running(clock=iter([100]).__next__) as stage:
        failed = stage.run(TextPrompt("abc"), logit_bias={100: 1.0})
    assert isinstance(failed, TokenizeFailed)
    assert stage.started == [TokenizeStarted(failed.request, 100)]


def test_the_prompt_must_leave_room_in_the_context() -> None:
    with running(max_model_len=10) as stage:
        assert stage.is_accepted(TextPrompt("x" * 9))
        error = stage.error(TextPrompt("x" * 10))
    assert isinstance(error, ContextLengthExceeded)
    assert (error.param, error.status) == ("prompt", 400)


def test_prompt_and_max_tokens_together_must_fit_the_context() -> None:
    with running(max_model_len=10) as stage:
        assert stage.is_accepted(TextPrompt("x" * 6), max_tokens=4)
        error = stage.error(TextPrompt("x" * 6), max_tokens=5)
    assert isinstance(error, ContextLengthExceeded)
    assert "you requested 11 tokens (6 in the prompt, 5 in the completion)" in error.message


def test_a_prompt_that_is_only_scored_may_fill_the_context() -> None:
    with running(max_model_len=10) as stage:
        assert stage.is_accepted(TextPrompt("x" * 10), max_tokens=0)
        assert not stage.is_accepted(TextPrompt("x" * 11), max_tokens=0)


def test_the_error_of_a_chat_that_is_too_long_names_the_messages() -> None:
    with running(max_model_len=2) as stage:
        assert stage.error(ChatPrompt([HELLO, HELLO])).param == "messages"


@pytest.mark.parametrize("token_id", [-1, 100])
@pytest.mark.parametrize(
    ("param", "as_value"),
    [
        ("logit_bias", lambda token_id: {5: 1.0, token_id: 1.0}),
        ("stop_token_ids", lambda token_id: (5, token_id)),
        ("allowed_token_ids", lambda token_id: (5, token_id)),
    ],
)
def test_ids_in_parameters_must_be_in_the_models_vocabulary(
    param: str, as_value: Callable[[int], Any], token_id: int
) -> None:
    with running(vocab_size=100) as stage:
        error = stage.error(TextPrompt("abc"), **{param: as_value(token_id)})
        assert stage.is_accepted(TextPrompt("abc"), **{param: as_value(99)})
    assert isinstance(error, InvalidRequest)
    assert (error.param, f"token id {token_id} is outside" in error.message) == (param, True)


@pytest.mark.parametrize("token_id", [-1, 100])
def test_ids_in_prompts_must_be_in_the_models_vocabulary(token_id: int) -> None:
    with running(vocab_size=100) as stage:
        error = stage.error(TextPrompt("abc"), TokenPrompt([5, token_id]))
    assert error.message.endswith(f"token id {token_id} is outside the model's vocabulary. Ids are from 0 to 99.")
    assert error.param == "prompt"


def test_a_worker_survives_a_panic_of_the_encoder(caplog: pytest.LogCaptureFixture) -> None:
    with running() as stage, caplog.at_level(logging.ERROR):
        error = stage.error(TextPrompt("panic"))
        assert stage.is_accepted(TextPrompt("abc"))
    assert isinstance(error, InternalError)
    assert "a panic in the encoder" in caplog.text


def test_a_request_aborted_while_it_waits_is_posted_but_not_encoded() -> None:
    with running() as stage:
        stage.encoder.gate.clear()
        for request_id in "first", "second", "third":
            stage.stage.submit(request(request_id))
        stage.stage.abort("second")
        stage.encoder.gate.set()
        results = {result.request.request_id: result for result in (stage.result(), stage.result(), stage.result())}
        assert len(stage.encoder.prompts) == 2
    assert results["second"] == Tokenized(results["second"].request, [])
    assert {started.request.request_id for started in stage.started} == {"first", "third"}


def test_aborting_a_request_that_does_not_wait_changes_nothing() -> None:
    with running() as stage:
        stage.stage.abort("r")
        assert stage.is_accepted(TextPrompt("abc"))
        stage.stage.abort("r")
        assert stage.stage.num_waiting == 0


def test_num_waiting_counts_requests_that_no_worker_has_taken() -> None:
    with running() as stage:
        stage.encoder.gate.clear()
        # The gate holds the only worker at the first, so the others wait for sure; the first may wait still.
        for i in range(4):
            stage.stage.submit(request(str(i)))
        assert stage.stage.num_waiting in (3, 4)
        stage.encoder.gate.set()
        for _ in range(4):
            stage.result()
        assert stage.stage.num_waiting == 0


@pytest.mark.parametrize("num_workers", [1, 3])
def test_stop_ends_the_threads_and_posts_every_request_once(num_workers: int) -> None:
    before = threading.active_count()
    stage = Stage(num_workers=num_workers)
    for i in range(50):
        stage.stage.submit(request(str(i)))
    stage.stage.stop()
    results = [stage.posted.get_nowait() for _ in range(50)]
    assert stage.posted.empty()
    assert sorted(int(result.request.request_id) for result in results) == list(range(50))
    assert all(isinstance(result, Tokenized) or isinstance(result.error, Unavailable) for result in results)
    assert threading.active_count() == before


def test_a_request_submitted_after_the_stop_fails() -> None:
    with running() as stage:
        stage.stage.stop()
        assert isinstance(stage.error(TextPrompt("abc")), Unavailable)
        assert stage.stage.num_waiting == 0


def test_workers_are_named() -> None:
    with running(num_workers=2):
        assert {"tokenize-0", "tokenize-1"} <= {thread.name for thread in threading.enumerate()}
