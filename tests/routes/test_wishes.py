"""Each parameter and each field that the official SDKs can send is obeyed, told in x-oaiserve-adapted, or refused.

The SDKs' types are walked: a field of a new version that nobody has decided about fails here by its name. Parameters
are in the types of the bodies, or rows of the table of wishes. The types within conversations and tools are below. One
object of each is sent with and without each field.
"""

import importlib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import msgspec
import pytest
from typing_extensions import get_type_hints, is_typeddict

from oaiserve.routes.adaptations import HEADER
from oaiserve.routes.intake.decode import reads
from oaiserve.routes.intake.invalid import members
from oaiserve.routes.intake.wishes import WISHES, How
from tests.missing_plugins import is_served
from tests.routes.asking import BODIES, CALL, CHAT, COMPLETIONS, HYBRID, MESSAGES, RESPONSES, refused
from tests.routes.doubles import says
from tests.routes.sdk_objects import SENT, Fields, Sent
from tests.serving import Serve, Served
from tools.reference import bodies_of_routes

ROOTS = [
    (CHAT, "openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming"),
    (COMPLETIONS, "openai.types.completion_create_params.CompletionCreateParamsNonStreaming"),
    (RESPONSES, "openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming"),
    ("/v1/embeddings", "openai.types.embedding_create_params.EmbeddingCreateParams"),
    ("/v1/batches", "openai.types.batch_create_params.BatchCreateParams"),
    ("/v1/responses/compact", "openai.types.responses.response_compact_params.ResponseCompactParams"),
    ("/v1/responses/input_tokens", "openai.types.responses.input_token_count_params.InputTokenCountParams"),
    ("/v1/conversations", "openai.types.conversations.conversation_create_params.ConversationCreateParams"),
    (MESSAGES, "anthropic.types.message_create_params.MessageCreateParamsNonStreaming"),
    (MESSAGES, "anthropic.types.beta.message_create_params.MessageCreateParamsNonStreaming"),
    ("/v1/messages/batches", "anthropic.types.messages.batch_create_params.BatchCreateParams"),
    ("/v1/messages/batches", "anthropic.types.beta.messages.batch_create_params.BatchCreateParams"),
    ("/v1/messages/count_tokens", "anthropic.types.message_count_tokens_params.MessageCountTokensParams"),
    ("/v1/messages/count_tokens", "anthropic.types.beta.message_count_tokens_params.MessageCountTokensParams"),
]
SERVED = {route: body for route, body in BODIES.items() if is_served(route)}  # those of missing plug-ins are not
ANY_FORM = msgspec.inspect.DictType | msgspec.inspect.AnyType | msgspec.inspect.RawType
# Parameters whose types are walked as those within conversations and tools.
OPEN = ("messages", "input", "items", "system", "tools", "tool_choice", "functions")


def sdk_type(dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


@cache
def hints_of(typed_dict: Any) -> dict[str, Any]:
    return get_type_hints(typed_dict)


@cache
def information_of(kind: type[msgspec.Struct]) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(kind)


def inner(hint: Any) -> list[Any]:
    return [each for each in get_args(hint) if not isinstance(each, str | int | None)]


def parameters(hint: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the type of each parameter, with its fields unless it is open."""
    if not is_typeddict(hint):
        for each in inner(hint):
            yield from parameters(each, prefix)
        return
    for name, type_of_field in hints_of(hint).items():
        yield prefix + name, type_of_field
        if prefix or name not in OPEN:
            yield from parameters(type_of_field, f"{prefix}{name}.")


def types_within(hint: Any, found: dict[Any, set[str]]) -> dict[Any, set[str]]:
    if is_typeddict(hint) and hint not in found:
        fields = hints_of(hint)
        found[hint] = set(fields)
        for field in fields.values():
            types_within(field, found)
    for each in inner(hint):
        types_within(each, found)
    return found


def has(kind: type[msgspec.Struct], path: str) -> bool:
    """Return whether the type of a body has a field, in one of several forms, or in the entries of a list. An object of
    any form has every field, and so has a body that another route reads."""
    nodes: list[msgspec.inspect.Type] = [information_of(kind)]
    for step in path.split("."):
        nodes += [
            entry for node in nodes if isinstance(node, msgspec.inspect.ListType) for entry in members(node.item_type)
        ]
        if any(isinstance(node, ANY_FORM) for node in nodes):
            return True
        structs = [node for node in nodes if isinstance(node, msgspec.inspect.StructType)]
        if any(step == struct.tag_field for struct in structs):
            return True
        nodes = [
            member
            for struct in structs
            for field in struct.fields
            if field.encode_name == step
            for member in members(field.type)
        ]
    return bool(nodes)


# Types that are read, with their fields: those that are obeyed or told, and after "|" those that need nothing here, or
# whose object is refused or left out as a whole.
READ = """
    AdditionalTools: tools type | id role
    AssistantMessageParam: content role
    Base64ImageSourceParam: data type | media_type
    CacheControlEphemeralParam: | ttl type
    ChatCompletionAllowedToolChoiceParam: allowed_tools type
    ChatCompletionAllowedToolsParam: mode tools
    ChatCompletionAssistantMessageParam: content function_call name refusal role tool_calls | audio
    ChatCompletionContentPartImageParam: image_url type | prompt_cache_breakpoint
    ChatCompletionContentPartInputAudioParam: input_audio type | prompt_cache_breakpoint
    ChatCompletionContentPartRefusalParam: refusal type
    ChatCompletionContentPartTextParam: text type | prompt_cache_breakpoint
    ChatCompletionDeveloperMessageParam: content name role
    ChatCompletionFunctionMessageParam: content name role
    ChatCompletionFunctionToolParam: function type
    ChatCompletionMessageCustomToolCallParam: custom id | type
    ChatCompletionMessageFunctionToolCallParam: function id | type
    ChatCompletionNamedToolChoiceParam: function type
    ChatCompletionSystemMessageParam: content name role
    ChatCompletionToolMessageParam: content role tool_call_id
    ChatCompletionUserMessageParam: content name role
    CompactionBlockParam: content tool_changes type | cache_control encrypted_content signature
    CompactionTrigger: type | id
    Content: text | type
    ContentBlockSourceParam: content | type
    Custom: input name | description format
    CustomToolParam: allowed_callers async defer_loading description format name type
    DocumentBlockParam: citations context source title type | cache_control
    EasyInputMessageParam: content phase role type
    File: file type | prompt_cache_breakpoint
    FileFile: file_data filename | file_id
    Function: arguments name | description parameters
    FunctionCall: arguments name
    FunctionCallOutput: call_id output type | caller id name namespace status
    FunctionDefinition: description name parameters strict
    FunctionToolParam: allowed_callers async defer_loading description name output_schema parameters strict type
    Grammar: definition syntax type
    ImageBlockParam: source transformations type | cache_control
    ImageURL: detail url
    InputAudio: data format
    InputSchemaTyped: properties required type
    ItemReference: id type
    Message: content role type | status
    NamespaceToolParam: description name tools type
    PlainTextSourceParam: data media_type type
    PromptCacheBreakpoint: | mode ttl
    FilePromptCacheBreakpoint: | mode ttl
    RedactedThinkingBlockParam: | data type
    ResponseCompactionItemParamParam: encrypted_content type | id
    ResponseCustomToolCallOutputParam: call_id output type | caller id
    ResponseCustomToolCallParam: call_id input name type | async caller id namespace
    ResponseFunctionToolCallParam: arguments call_id name namespace type | async caller id status
    ResponseInputFileContentParam: detail file_data file_id filename type | file_url prompt_cache_breakpoint
    ResponseInputFileParam: detail file_data file_id filename type | file_url prompt_cache_breakpoint
    ResponseInputImageContentParam: detail file_id image_url type | prompt_cache_breakpoint
    ResponseInputImageParam: detail file_id image_url type | prompt_cache_breakpoint
    ResponseInputTextContentParam: text type | prompt_cache_breakpoint
    ResponseInputTextParam: text type | prompt_cache_breakpoint
    ResponseOutputMessageParam: content phase role type | id status
    ResponseOutputRefusalParam: refusal type
    ResponseOutputTextParam: text type | annotations logprobs
    ResponseReasoningItemParam: content encrypted_content summary type | id status
    ResponseToolSearchOutputItemParamParam: tools type | call_id execution id status
    SearchResultBlockParam: citations content source title type | cache_control
    Summary: text | type
    SystemMessageParam: clear_at content output_config role
    Text: type | format
    TextBlockParam: text type | cache_control citations
    ThinkingBlockParam: thinking type | signature
    ToolAdditionBlockParam: tool type | cache_control
    ToolChangeToolDefinitionParam: definition | type
    ToolChangeToolReferenceParam: name | type
    ToolChoiceAllowedParam: mode tools type
    ToolChoiceAnyParam: disable_parallel_tool_use type
    ToolChoiceAutoParam: disable_parallel_tool_use type
    ToolChoiceCustomParam: name type
    ToolChoiceFunctionParam: name type
    ToolChoiceNoneParam: type
    ToolChoiceToolParam: name type | disable_parallel_tool_use
    ToolFunction: allowed_callers async defer_loading description name output_schema parameters strict type
    ToolParam: allowed_callers defer_loading description input_examples input_schema name strict type
    ToolParam: | cache_control eager_input_streaming
    ToolRemovalBlockParam: tool type | cache_control
    ToolResultBlockParam: content is_error tool_use_id type | cache_control toolset_name
    ToolSearchOutputNamespaceToolParam: description name tools type
    ToolUseBlockParam: id input name type | cache_control caller toolset_name
    UserMessageParam: content role
"""
# Families of types that are treated as one: what happens to them, and patterns of their names.
TREATED = {
    "left out or refused, as tools that run elsewhere": r"""
        (Tool)?(Mcp|CodeInterpreter|ImageGeneration|LocalShell|ProgrammaticToolCalling)
        (Tool)?(Mcp|CodeInterpreter|ImageGeneration)(Container|AllowedTools|RequireApproval|InputImageMask|Svg)\w*
        (FileSearch|Computer|ComputerUsePreview|WebSearch|WebSearchPreview|FunctionShell|ApplyPatch|ToolSearch)ToolParam
        (Computer|Browser)Toolset\w+ (Browser|Computer)\w+ConfigParam
        (CodeExecution|WebSearch|WebFetch|Memory)Tool20\d+Param
        Tool(Bash|TextEditor)20\d+Param ToolSearchTool(Bm25_|Regex)\d+Param WebFetchURLSource\w+ UserLocation(Param)?
        ComparisonFilter CompoundFilter Filters RankingOptions\w* Container(Auto|Reference|NetworkPolicy\w+)Param
        SkillReferenceParam InlineSkill(Source)?Param LocalSkillParam LocalEnvironmentParam
        MCPTool(set|(Default)?Config)Param ToolChangeMCPTool(set)?ReferenceParam AdvisorTool\d+Param
        ToolComputerUse\d+Param""",
    "refused, as choices of tools that cannot be forced": r"""
        ToolChoice(ApplyPatch|Mcp|Shell|SpecificProgrammaticToolCalling|Types)Param
        ChatCompletionNamedToolChoiceCustomParam""",
    "left out, and told": r"""
        ChatCompletionCustomToolParam CustomFormat\w+ ImageTransformationsParam Fallback(Block|Info)Param
        MCPToolListingBlockParam MCPToolParamParam SystemMessageOutputConfigParam""",
    "shown as a call, a result or a text, and told": r"""
        Response(Computer|FileSearch|CodeInterpreter)ToolCall\w*Param ResponseFunctionWebSearchParam
        ComputerCallOutput\w* (ApplyPatch|Shell|LocalShell|Mcp|ImageGeneration|ToolSearch)Call\w* HTTPError
        Mcp(ListTools|ListToolsTool|ApprovalRequest|ApprovalResponse|ProtocolError|ToolExecutionError)
        Program(Output)? ResponseFunctionShellCallOutputContentParam Outcome(Exit|Timeout) Output(Image|Logs)
        PendingSafetyCheck Result ActionFind ActionOpenPage ActionSearch(Source)?
        (Action)?(Click|DoubleClick|Drag|DragPath|Keypress|Move|Screenshot|Scroll|Type|Wait)
        ServerToolUseBlockParam BrowserState\w+ (Encrypted)?(Bash|TextEditor)?CodeExecution\w+(Block|Error)Param
        (WebSearch|WebFetch|ToolSearch)\w*(Block|Error|ErrorObject)Param ToolReferenceBlockParam
        ContainerUploadBlockParam MCPTool(Use|Result)BlockParam Advisor\w+(Block|Error)Param""",
    "refused, as media that cannot be read": r"""
        Base64PDFSourceParam URLPDFSourceParam (File|URL)(Document|Image)SourceParam""",
    "refused, as they belong into parameters": r"""
        ResponseConfigurationUpdateItemParamParam Reasoning ResponseFormatText\w*""",
    "of no use to a model that reads text": r"""
        Annotation\w+ Citation\w+Param Logprob(TopLogprob)? (FunctionCallOutput|ApplyPatchCall|ShellCall)?Caller\w+
        DirectCallerParam ServerToolCaller\w*Param Audio""",
}


def fields_read(*, is_acted_on: bool = False) -> dict[str, set[str]]:
    """Return the fields of each type, or only those that are obeyed or told."""
    fields: dict[str, set[str]] = {}
    for row in READ.strip().splitlines():
        name, _, listed = row.strip().partition(":")
        acted_on, _, others = listed.partition("|")
        fields.setdefault(name, set()).update(acted_on.split() if is_acted_on else (acted_on + others).split())
    return fields


ACTED_ON = {kind: fields for kind, fields in fields_read(is_acted_on=True).items() if fields}


@pytest.fixture(
    scope="module",
    params=[root for root in ROOTS if is_served(root[0])],
    ids=lambda root: root[1].removesuffix("NonStreaming"),
)
def root(request: pytest.FixtureRequest) -> tuple[str, Any]:
    route, dotted = request.param
    return route, sdk_type(dotted)


def test_each_parameter_of_the_sdks_is_read_or_a_row_of_the_table(root: tuple[str, Any]) -> None:
    route, kind = root
    body = bodies_of_routes()[route]
    rows = {wish.path for wish in WISHES}
    unknown = {
        path
        for path, _ in parameters(kind)
        if not (has(body, path) or path in rows or any(_is_about(row, path) for row in rows))
    }
    assert not unknown, f"no body of {route} has these, and no row of the table"


@pytest.mark.parametrize("route", BODIES)
def test_no_route_ignores_a_parameter_of_another_route_in_silence(route: str) -> None:
    body = bodies_of_routes()[route]
    paths = {path for other, dotted in ROOTS if other in SERVED for path, _ in parameters(sdk_type(dotted))}
    paths |= {name for other in SERVED for name in bodies_of_routes()[other].__struct_fields__}
    rows = {wish.path for wish in WISHES}
    unknown = {
        path for path in paths if not (has(body, path) or path in rows or any(_is_about(row, path) for row in rows))
    }
    assert not unknown, f"{route} does not read these, and no row of the table is about them"


def _is_about(row: str, path: str) -> bool:
    """Return whether a row decides about a field: it names an object around it, or a field within it."""
    return path.startswith(f"{row}.") or row.startswith(f"{path}.")


def test_each_type_within_conversations_and_tools_is_known(root: tuple[str, Any]) -> None:
    _, kind = root
    read = fields_read()
    unknown = set()
    for path, hint in parameters(kind):
        for found, fields in types_within(hint, {}).items() if path in OPEN else ():
            name = re.sub("^Beta(Request)?", "", found.__name__)
            if name in read:
                unknown |= {f"{name}.{field}" for field in fields - read[name]}
            elif not any(re.fullmatch(pattern, name) for listed in TREATED.values() for pattern in listed.split()):
                unknown.add(name)
    assert not unknown, "decide what happens to these, and add them to READ or TREATED"


@pytest.mark.parametrize("wish", [wish for wish in WISHES if wish.how is not How.NOTHING], ids=lambda wish: wish.path)
def test_a_wish_is_refused_or_told_on_each_route_that_does_not_read_it(served: Served, wish: Any) -> None:
    sent: Any = "a wish"
    for field in reversed(wish.path.replace("[]", "").split(".")[1:]):
        sent = {field: sent}
    name = wish.path.split(".")[0]
    given = {name.removesuffix("[]"): [sent] if name.endswith("[]") else sent}
    for route, body in SERVED.items():
        if reads(bodies_of_routes()[route], wish.path) and not wish.is_typed:
            continue
        answer = served.post(route, **body, **given)
        if wish.how is How.REFUSED:
            refused(answer, wish.path)
        elif answer.status_code == 200:
            assert f"{wish.path}: {wish.hint}" in answer.headers[HEADER]
        else:  # Its type is wrong on this route, or its object refuses it.
            assert name.removesuffix("[]") in answer.json()["error"]["message"]


def reaction(served: Served, sent: Sent, fields: Fields) -> tuple[object, ...]:
    """Return all that a request shows of what was read in it: its refusal, or its notes, what the engine gets, and how
    many calls are in the answer."""
    answer = served.post(sent.route, **{**BODIES[sent.route], **sent.body(fields)})
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    request = served.engine.submitted.get()
    num_calls = answer.text.count('"call_id"') + answer.text.count('"tool_use"')
    return answer.headers.get(HEADER), str(request.prompts), str(request.params), num_calls


@pytest.mark.plugin("batches", "messages", "responses")
@pytest.mark.parametrize("kind", ACTED_ON)
def test_an_answer_depends_on_each_field_that_is_acted_on(serve: Serve, kind: str) -> None:
    served = serve(template=HYBRID, script=says(f"{CALL}{CALL}"))
    served.engine.media = frozenset(("image", "audio"))
    upload = {"file": ("a.txt", b"The code is 4711."), "purpose": (None, "user_data")}
    uploaded = {"file_id": served.http.post("/v1/files", files=upload).json()["id"]}
    depends_on = set()
    for sent in SENT:
        if sent.kind == kind:
            fields = sent.fields | {name: uploaded[name] for name in sent.fields.keys() & uploaded.keys()}
            whole = reaction(served, sent, fields)
            assert reaction(served, sent, fields) == whole
            for name in fields:
                other = {field: value for field, value in fields.items() if field != name}
                if name == "type":  # Many objects are understood without one.
                    other["type"] = "another"
                if reaction(served, sent, other) != whole:
                    depends_on.add(name)
    assert depends_on == ACTED_ON[kind]
