"""The table of parameters that clients send although a body's type has no field for them: one row for each wish.

A wish is refused, or reported in the response header x-oaiserve-adapted, or ignored if that changes no answer. If a
body's type has a field of that name, the field is read instead.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple


class How(Enum):
    REFUSED = auto()  # It would change the answer.
    TOLD = auto()  # It is left out, which the response reports: the client may rely on it.
    NOTHING = auto()  # It is ignored: it is fulfilled anyway, or concerns something that this server lacks.


class Wish(NamedTuple):
    path: str  # The name of a parameter, or of a field within one. [] stands for the entries of a list.
    how: How
    harmless: tuple[Any, ...] = ()  # Values that change nothing. None always does so.
    hint: str = ""  # If REFUSED, what to do instead. If TOLD, why it is left out.
    is_typed: bool = False  # Types of bodies have the field, but nothing acts on it.

    @property
    def steps(self) -> list[str]:
        """Return the names on the path, beginning with the parameter's, and [] where it enters a list."""
        return self.path.replace("[]", ".[]").split(".")


_IS_ELSEWHERE = "is left out: this server has no such service"
_IS_OF_RESPONSES = "is left out: only /v1/responses reads it"
_IS_OF_TEMPLATES = "is left out: this route does not read it, or has no chat template"
_FORMAT = "is left out: use 'response_format', or 'text.format' of /v1/responses"
_BLOCK = "Nothing here moderates: please ask without it, and check the text yourself."

# If several are refused, the first one here is reported: tools come before the choice among them.
WISHES: tuple[Wish, ...] = (
    Wish("audio", How.REFUSED),
    Wish("chat_template", How.REFUSED),
    Wish("documents", How.REFUSED, ([],)),
    Wish("functions", How.REFUSED, ([],), "Use 'tools' instead."),
    Wish("function_call", How.REFUSED, ("none",), "Use 'tool_choice' instead."),
    Wish("guided_json", How.REFUSED, (), "Use 'structured_outputs.json' instead."),
    Wish("guided_regex", How.REFUSED, (), "Use 'structured_outputs.regex' instead."),
    Wish("guided_choice", How.REFUSED, (), "Use 'structured_outputs.choice' instead."),
    Wish("guided_grammar", How.REFUSED, (), "Use 'structured_outputs.grammar' instead."),
    Wish("guided_whitespace_pattern", How.REFUSED),
    Wish("regex", How.REFUSED, (), "Use 'structured_outputs.regex' instead."),  # SGLang's, like the next one
    Wish("ebnf", How.REFUSED, (), "Use 'structured_outputs.grammar' instead."),
    Wish("logits_processors", How.REFUSED, ([],)),
    Wish("modalities", How.REFUSED, (["text"], [])),
    Wish("return_tokens_as_token_ids", How.REFUSED, (False,)),
    Wish("spaces_between_special_tokens", How.REFUSED, (True,)),
    Wish("suffix", How.REFUSED, ("",)),
    Wish("tools", How.REFUSED, ([],)),
    Wish("tool_choice", How.REFUSED, ("none",)),
    Wish("truncate_prompt_tokens", How.REFUSED),
    Wish("use_beam_search", How.REFUSED, (False,)),
    Wish("web_search_options", How.REFUSED),
    # Parameters of other routes, which would change the answer.
    Wish("conversation", How.REFUSED, (), "Only /v1/responses continues conversations: send their messages instead."),
    Wish("best_of", How.REFUSED, (1,)),
    Wish("echo", How.REFUSED, (False,)),
    Wish("generate", How.REFUSED, (True,), "On /v1/responses, send 'prompt_cache_options': {'prewarm': true} instead."),
    Wish("instructions", How.REFUSED, ("",), "Send a system message instead."),
    Wish("messages", How.REFUSED, ([],), "This route takes 'input' or 'prompt', and /v1/chat/completions messages."),
    Wish("previous_response_id", How.REFUSED, (), "Only /v1/responses continues responses: send messages instead."),
    Wish("system", How.REFUSED, ("", []), "Send a system message, or 'instructions' of /v1/responses, instead."),
    Wish("thread", How.REFUSED, (), "Send the whole conversation instead."),
    Wish("moderation.policy.input.mode", How.REFUSED, ("score",), _BLOCK),
    Wish("moderation.policy.output.mode", How.REFUSED, ("score",), _BLOCK),
    Wish("moderation", How.TOLD, ({},), "is left out: nothing here moderates"),
    Wish("prompt_cache_options.prewarm", How.REFUSED, (False,), "Send 'max_tokens': 1 instead."),
    Wish("prompt_cache_options.ttl", How.TOLD, (), "is left out: blocks stay while there is room", is_typed=True),
    Wish("prompt_cache_options.comparison_response_id", How.TOLD, (), "is left out: /v1/responses compares prompts"),
    Wish("prompt_cache_options.mode", How.NOTHING),  # The cache finds any prefix.
    Wish(
        "prompt_cache_retention", How.TOLD, ("in_memory", "in-memory"), "is left out: blocks stay while there is room"
    ),
    Wish("access_programs", How.TOLD, ({},), _IS_ELSEWHERE),
    Wish("background_options.completion_window", How.TOLD, ("soonest",), "is left out: only /v1/responses can wait"),
    Wish("background_options.continuation_id", How.TOLD, (), "is left out: windows order responses", is_typed=True),
    Wish("billing_policy", How.TOLD, (), _IS_ELSEWHERE),
    Wish("compaction", How.TOLD, ({},), "is left out: the conversation is read whole"),
    Wish("container", How.TOLD, (), _IS_ELSEWHERE),
    Wish("context_management", How.TOLD, ([], {}), "is left out: the conversation is read whole"),
    Wish("fallback_credit_token", How.TOLD, (), _IS_ELSEWHERE),
    Wish("fallbacks", How.TOLD, ([],), _IS_ELSEWHERE),
    Wish("image", How.TOLD, ({},), "is left out: images are read whole"),
    Wish("inference_geo", How.TOLD, ("global",), _IS_ELSEWHERE),
    Wish("output_config.effort", How.TOLD, (), "is left out: only /v1/messages reads it"),
    Wish("output_config.task_budget", How.TOLD, (), "is left out: models here count no tokens of a task"),
    Wish("output_expires_after", How.TOLD, (), "is left out: files stay until they are deleted"),
    Wish("personality", How.TOLD, (), _IS_ELSEWHERE),
    Wish("service_tier", How.TOLD, ("auto", "default", "standard_only"), "is left out: 'priority' orders requests"),
    Wish("speed", How.TOLD, ("standard",), _IS_ELSEWHERE),
    Wish("user_profile_id", How.TOLD, (), _IS_ELSEWHERE),
    Wish("workspace_id", How.TOLD, (), _IS_ELSEWHERE),
    Wish("store", How.TOLD, (False,), "is left out: only /v1/responses stores answers"),
    Wish("add_generation_prompt", How.TOLD, (True,), _IS_OF_TEMPLATES),
    Wish("chat_template_kwargs", How.TOLD, ({},), _IS_OF_TEMPLATES),
    Wish("continue_final_message", How.TOLD, (False,), _IS_OF_TEMPLATES),
    Wish("reasoning_format", How.TOLD, (), "is left out: only /v1/chat/completions reads it"),
    Wish("include", How.TOLD, ([],), _IS_OF_RESPONSES),
    Wish("logprobs", How.TOLD, (False, 0), "is left out: only chat and completions read it"),
    Wish("top_logprobs", How.TOLD, (0,), "is left out: only chat and /v1/responses read it"),
    # A client may count the tokens of a whole request, so these are not refused.
    Wish("max_output_tokens", How.TOLD, (), "is left out: use 'max_tokens'"),
    Wish("output_config.format", How.TOLD, (), _FORMAT),
    Wish("output_format", How.TOLD, (), _FORMAT),
    Wish("stop_sequences", How.TOLD, ([],), "is left out: use 'stop'"),
    Wish("background", How.TOLD, (False,), "is left out: only /v1/responses can wait"),
    Wish("enable_thinking", How.TOLD, (), "is left out: use 'chat_template_kwargs'"),
    Wish("input", How.TOLD, (), "is left out: this route takes 'messages' or 'prompt'"),
    Wish("prompt", How.TOLD, (), "is left out: this route takes 'messages' or 'input'"),
    Wish("reasoning", How.TOLD, ({},), _IS_OF_RESPONSES),
    Wish("text", How.TOLD, ({},), _IS_OF_RESPONSES),
    Wish("thinking", How.TOLD, ({},), "is left out: only /v1/messages reads it"),
    Wish("truncation", How.TOLD, ("disabled",), "is left out: only /v1/responses truncates"),
    Wish("verbosity", How.TOLD, ("medium",), "is left out: models here have no switch for it"),
    Wish("reasoning_effort", How.TOLD, (), "is left out: no chat template reads it"),
    Wish("thinking_token_budget", How.TOLD, (), "is left out: no chat template begins reasoning"),
    Wish("diagnostics", How.TOLD, ({},), "is left out: /v1/messages compares prompts"),
    Wish("reasoning.summary", How.TOLD, ("auto", "none"), "is left out: the reasoning itself is in the answer"),
    Wish("reasoning.generate_summary", How.TOLD, ("auto",), "is left out: the reasoning itself is in the answer"),
    Wish("reasoning.context", How.TOLD, ("auto",), "is left out: the chat template decides which reasoning it shows"),
    Wish("reasoning.mode", How.TOLD, ("standard",), "is left out: models here have one mode"),
    Wish("text.verbosity", How.TOLD, ("medium",), "is left out: models here have no switch for it", is_typed=True),
    *(
        Wish(f"{tool}.{name}", How.TOLD, harmless, f"is left out: {reason}")
        for tool in ("tools[]", "tools[].tools[]")  # the latter in a namespace
        for name, harmless, reason in (
            ("allowed_callers", (["direct"],), "only the model calls tools"),
            ("async", (False,), "the client runs the tool as it likes"),
            ("defer_loading", (False,), "the model sees all tools from the start"),
            ("input_examples", ([],), "chat templates have no place for it"),
            ("output_schema", (), "chat templates have no place for it"),
        )
    ),
    # Anthropic's SDK sends them as a header.
    Wish("betas", How.NOTHING),
    # Reasoning is never bound to what comes before it.
    Wish("thinking.block_binding", How.NOTHING),
    # Labels for a client's own records, and for caches, which need no labels here.
    Wish("cache_control", How.NOTHING),
    Wish("metadata", How.NOTHING),
    Wish("prompt_cache_key", How.NOTHING),
    Wish("request_id", How.NOTHING),
    Wish("safety_identifier", How.NOTHING),
    Wish("session_id", How.NOTHING),
    Wish("user", How.NOTHING),
    # Parameters of features that a route or this server lacks.
    Wish("ec_transfer_params", How.NOTHING),
    Wish("guided_decoding_backend", How.NOTHING),
    Wish("include_reasoning", How.NOTHING),
    Wish("kv_transfer_params", How.NOTHING),
    Wish("length_penalty", How.NOTHING),  # It affects only beam search.
    Wish("max_tool_calls", How.NOTHING),
    Wish("mcp_servers", How.NOTHING),
    Wish("mm_processor_kwargs", How.NOTHING),
    Wish("parallel_tool_calls", How.NOTHING),
    Wish("prediction", How.NOTHING),
    Wish("vllm_xargs", How.NOTHING),
)

NAMES = frozenset(wish.steps[0] for wish in WISHES)
