"""The bodies that clients send, one struct per route, and their limits. Three of them share a base.

JSON null means the same as a missing parameter, and 2.0 is accepted as an integer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from oaiserve.routes.intake.object_types import (
    Effort,
    GivenMessage,
    Integer,
    NonEmpty,
    Prompts,
    RepetitionDetection,
    ResponseFormat,
    StructuredOutputs,
    TokenId,
    Tool,
    ToolChoice,
    described,
)

MAX_CHOICES = 128  # OpenAI's limit for n
MAX_BEST_OF = 20  # OpenAI's limit
MAX_CHOICES_PER_REQUEST = 2048  # prompts times n, or times best_of
MAX_LOGPROBS = 20
MAX_STRINGS = 128  # maximum of `stop`, and of `bad_words`
MAX_CHARACTERS = 4096  # limit for all these strings together, because the engine thread searches the text for them
MAX_SALT_CHARACTERS = 128
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_DEADLINE_MS = 86_400_000  # a day
MAX_TOOLS = 1024
# OpenAI's limits.
MAX_METADATA = 16
MAX_KEY_CHARACTERS = 64
MAX_VALUE_CHARACTERS = 512
ReasoningFormat = Literal["none", "auto", "deepseek", "deepseek-legacy"]  # llama.cpp's; all but "none" mean the same


# Fields that several bodies share.
ModelName = Annotated[str | None, described("Name of the model; the one that is served, if left out.")]
Priority = Annotated[Integer | None, described("Lower is earlier, under --policy priority.", -MAX_INT64 - 1, MAX_INT64)]
TopLogprobs = Annotated[
    Integer | None, described("Alternatives for each token, if log-probabilities are requested.", 0, MAX_LOGPROBS)
]
ThinkingBudget = Annotated[
    Integer | None, described("Most tokens of the reasoning, whose end is forced then.", 0, MAX_INT32)
]
_AddsSpecialTokens = Annotated[
    bool | None, described("Add the tokenizer's own tokens to the prompt. Default: true, but false for messages.")
]
_AddsGenerationPrompt = Annotated[
    bool | None, described("Add the template's beginning of an answer after the messages. Default: true.")
]
_ContinuesMessage = Annotated[bool | None, described("Continue the last message instead.")]
TemplateKwargs = Annotated[dict[str, Any] | None, described("Variables of the chat template.")]
ParallelToolCalls = Annotated[bool | None, described("Whether there may be several calls. Default: true.")]


class SamplingBody(msgspec.Struct, kw_only=True):
    """The parameters that all generation routes accept. None means that the client did not set it."""

    model: ModelName = None
    n: Annotated[Integer | None, described("Choices for each prompt. Default: 1.", 1, MAX_CHOICES)] = None
    max_tokens: Annotated[Integer | None, described("Most tokens of a choice. -1: no limit.", 1, MAX_INT32)] = None
    max_completion_tokens: Annotated[
        Integer | None, described("Newer name of max_tokens, which it overrides.", 1, MAX_INT32)
    ] = None
    min_tokens: Annotated[
        Integer | None, described("Tokens before which a choice cannot end by itself.", 0, MAX_INT32)
    ] = None
    temperature: Annotated[
        float | None,
        described(
            "0 takes the likeliest token each time. Default: default_sampling of the model, as for the next three.",
            0,
            2,
        ),
    ] = None
    top_p: Annotated[
        float | None, described("Draw among the likeliest tokens that have this probability together.", 0, 1)
    ] = None
    top_k: Annotated[
        Integer | None, described("Draw among this many of the likeliest tokens. 0 and -1: all.", -1, MAX_INT32)
    ] = None
    min_p: Annotated[
        float | None, described("Drop tokens with less than this share of the likeliest one's probability.", 0, 1)
    ] = None
    presence_penalty: Annotated[
        float | None, described("Lowers the logits of tokens that are in the answer already.", -2, 2)
    ] = None
    frequency_penalty: Annotated[
        float | None, described("The same, for each occurrence of a token in the answer.", -2, 2)
    ] = None
    # The bounds keep logits finite in 32 bits. Beyond them the output is noise.
    repetition_penalty: Annotated[
        float | None, described("Divides the logits of tokens that are in the prompt or the answer. 1: off.", 0.01, 100)
    ] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, described("Added to the logit.", -100, 100)]] | None,
        described("What to add to logits, by token id."),
    ] = None
    allowed_token_ids: Annotated[list[TokenId] | None, described("The only tokens that may be drawn.", minItems=1)] = (
        None
    )
    bad_words: Annotated[
        list[NonEmpty] | None, described("Texts whose tokens must not come in a row.", maxItems=MAX_STRINGS)
    ] = None
    metadata: Annotated[Any, described("Its `session_id` names the run of an agent that the request belongs to.")] = (
        None
    )
    seed: Annotated[
        Integer | None,
        described("Equal requests with equal seeds get equal draws. -1: none.", -MAX_INT64 - 1, MAX_INT64),
    ] = None
    stop: Annotated[
        NonEmpty | list[NonEmpty] | None, described("Texts before which the answer ends.", maxItems=MAX_STRINGS)
    ] = None
    stop_token_ids: Annotated[list[TokenId] | None, described("Tokens at which the answer ends.")] = None
    include_stop_str_in_output: Annotated[bool | None, described("Keep the stop in the text.")] = None
    ignore_eos: Annotated[bool | None, described("Ignore the end of the sequence, and continue up to max_tokens.")] = (
        None
    )
    repetition_detection: Annotated[
        bool | RepetitionDetection | None,
        described("End a choice that is in a loop. true: what counts as a loop for the server. Default: false."),
    ] = None
    skip_special_tokens: Annotated[bool | None, described("Leave special tokens out of the text. Default: true.")] = (
        None
    )
    add_special_tokens: _AddsSpecialTokens = None
    prompt_logprobs: Annotated[
        Integer | None,
        described("Log-probabilities of the prompt, with this many alternatives for each token.", 0, MAX_LOGPROBS),
    ] = None
    response_format: Annotated[ResponseFormat | None, described("OpenAI's constraint.")] = None
    structured_outputs: Annotated[StructuredOutputs | None, described("vLLM's constraint.")] = None
    grammar: Annotated[str | None, described("llama.cpp's constraint: a grammar in GBNF, or in Lark's form.")] = None
    json_schema: Annotated[dict[str, Any] | None, described("llama.cpp's constraint: a JSON Schema.")] = None
    stream: Annotated[bool | None, described("Send the answer as server-sent events while it is generated.")] = None
    stream_options: Annotated[
        dict[str, bool | None] | None, described("With stream: include_usage, include_timings, continuous_usage_stats.")
    ] = None
    return_progress: Annotated[
        bool | None, described("With stream: while a long prompt is computed, send chunks that report the progress.")
    ] = None
    stream_interval: Annotated[Integer | None, described("Tokens of a choice in an event.", 1, MAX_INT32)] = None
    priority: Priority = None
    deadline_ms: Annotated[
        Integer | None,
        described("Deadline of the whole answer, in milliseconds from the receipt of the request.", 1, MAX_DEADLINE_MS),
    ] = None
    ttft_deadline_ms: Annotated[Integer | None, described("The same for the first token.", 1, MAX_DEADLINE_MS)] = None
    cache_salt: Annotated[
        str | None,
        described(
            "Only requests with the same salt share cached prefixes.", minLength=1, maxLength=MAX_SALT_CHARACTERS
        ),
    ] = None
    return_token_ids: Annotated[bool | None, described("Send the ids of the prompt and of the answer, too.")] = None


class CompletionBody(SamplingBody, kw_only=True):
    """The texts to continue, and how."""

    prompt: Annotated[Prompts, described("A text, a list of texts, a list of token ids, or a list of such lists.")]
    max_tokens: Annotated[
        Integer | None, described("Most tokens of a choice. Default: 16. -1: no limit.", -1, MAX_INT32)
    ] = None
    max_completion_tokens: Annotated[
        Integer | None, described("Newer name of max_tokens, which it overrides.", -1, MAX_INT32)
    ] = None
    suffix: Annotated[
        str | None,
        described("The text after the answer, which fills the gap. For models with tokens for filling in the middle."),
    ] = None
    echo: Annotated[bool | None, described("Begin the text, and its log-probabilities, with the prompt.")] = None
    logprobs: Annotated[
        bool | Integer | None,
        described("Log-probabilities, with this many alternatives for each token.", 0, MAX_LOGPROBS),
    ] = None
    best_of: Annotated[
        Integer | None, described("Candidates for each prompt, of which the n likeliest are sent.", 1, MAX_BEST_OF)
    ] = None


class ChatBody(SamplingBody, kw_only=True):
    """The conversation to answer, and how."""

    messages: Annotated[list[GivenMessage], described("The conversation so far.", minItems=1)]
    logprobs: Annotated[bool | None, described("Send the log-probability of each token of the content.")] = None
    top_logprobs: TopLogprobs = None
    add_generation_prompt: _AddsGenerationPrompt = None
    continue_final_message: _ContinuesMessage = None
    chat_template_kwargs: TemplateKwargs = None
    tools: Annotated[list[Tool] | None, described("Functions that the model may call.", maxItems=MAX_TOOLS)] = None
    tool_choice: Annotated[ToolChoice | None, described("Whether to call tools, and which. Default: auto.")] = None
    parallel_tool_calls: ParallelToolCalls = None
    reasoning_effort: Annotated[
        Effort | None,
        described("Passed on to the chat template. For one that has none: none, minimal and low are less."),
    ] = None
    thinking_token_budget: ThinkingBudget = None
    reasoning_format: Annotated[ReasoningFormat | None, described("none leaves reasoning in the content.")] = None
    prediction: Annotated[
        dict[str, Any] | None,
        described("Makes the usage count the tokens of drafts. The drafts themselves come from the prompt."),
    ] = None
    include_reasoning: Annotated[bool | None, described("false leaves reasoning out of the answer.")] = None


Metadata = Annotated[
    dict[str, Annotated[str, described("At most 512 characters.", maxLength=MAX_VALUE_CHARACTERS)]] | None,
    described("Is kept.", maxProperties=MAX_METADATA, propertyNames={"maxLength": MAX_KEY_CHARACTERS}),
]


class MetadataBody(msgspec.Struct, kw_only=True):
    """New metadata."""

    metadata: Metadata = None


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """The adapter to load. `lora_path` is its folder: a path in the server's folder of adapters."""

    lora_name: str
    lora_path: str
    load_inplace: Annotated[bool | None, described("Replace a loaded adapter of this name. Default: false.")] = None


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """The adapter to unload."""

    lora_name: str


class TokenizeBody(msgspec.Struct, kw_only=True):
    """What to tokenize: either a prompt or messages."""

    model: ModelName = None
    prompt: Annotated[str | None, described("A text.")] = None
    messages: Annotated[list[GivenMessage] | None, described("A conversation.", minItems=1)] = None
    add_special_tokens: _AddsSpecialTokens = None
    add_generation_prompt: _AddsGenerationPrompt = None
    continue_final_message: _ContinuesMessage = None
    chat_template_kwargs: TemplateKwargs = None
    return_token_strs: Annotated[bool | None, described("Send the text of each token, too.")] = None
    tools: Annotated[list[Tool] | None, described("Functions in the prompt.", maxItems=MAX_TOOLS)] = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The tokens to turn into text."""

    model: ModelName = None
    tokens: list[TokenId]
