"""The examples for LlamaIndex's OpenAILike, OpenAIResponses and OpenAILikeEmbedding."""

import features
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from subjects import City, get_weather

capabilities = {"is_chat_model": True, "is_function_calling_model": True, "should_use_structured_outputs": True}
llm = OpenAILike(
    model=features.MODEL,
    api_base=features.BASE_URL,
    api_key=features.API_KEY,
    temperature=0,
    max_tokens=200,
    **capabilities,
)
embedder = OpenAILikeEmbedding(model_name=features.EMBEDDER, api_base=features.EMBEDDINGS_URL, api_key=features.API_KEY)

question = [ChatMessage(role="user", content=features.QUESTION)]
weather_tool = FunctionTool.from_defaults(get_weather)


def text() -> None:
    features.check_capital(llm.chat(question).message.content)


def stream() -> None:
    features.check_streamed(
        [chunk.delta or "" for chunk in llm.stream_chat(question)], llm.chat(question).message.content
    )


def tools() -> None:
    question = ChatMessage(role="user", content=features.WEATHER_QUESTION)
    answer = llm.chat_with_tools([weather_tool], user_msg=question, tool_required=True)
    results = []
    for call in llm.get_tool_calls_from_response(answer):
        content = str(weather_tool(**call.tool_kwargs))
        results.append(ChatMessage(role="tool", content=content, additional_kwargs={"tool_call_id": call.tool_id}))
    features.weather.check_called()
    assert llm.chat_with_tools([weather_tool], chat_history=[question, answer.message, *results]).message.content


def tools_streamed() -> None:
    chunks = list(llm.stream_chat_with_tools([weather_tool], user_msg=features.WEATHER_QUESTION, tool_required=True))
    for call in llm.get_tool_calls_from_response(chunks[-1]):
        weather_tool(**call.tool_kwargs)
    features.weather.check_called()


async def auto() -> None:
    agent = FunctionAgent(tools=[weather_tool], llm=llm, system_prompt="You are a helpful assistant.")
    assert str(await agent.run(features.WEATHER_QUESTION))
    features.weather.check_obeyed()


def structured() -> None:
    city = llm.as_structured_llm(City).chat(question).raw
    assert isinstance(city, City), repr(city)


def responses() -> None:
    asker = OpenAIResponses(
        model=features.MODEL,
        api_base=features.BASE_URL,
        api_key=features.API_KEY,
        temperature=0,
        max_output_tokens=200,
        context_window=8192,
        track_previous_responses=True,
    )
    parts = [chunk.delta or "" for chunk in asker.stream_chat(question)]
    first = OpenAIResponses(**asker.to_dict() | {"api_key": features.API_KEY}).chat(question)
    features.check_streamed(parts, first.message.content)
    assert asker.chat([ChatMessage(role="user", content="And of Italy?")]).message.content


def embeddings() -> None:
    features.check_vectors(embedder.get_text_embedding_batch(features.TEXTS))


features.run(text, stream, tools, tools_streamed, auto, structured, responses, embeddings)
