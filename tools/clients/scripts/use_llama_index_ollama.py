"""The examples for LlamaIndex's Ollama and OllamaEmbedding."""

import features
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.llms.ollama import Ollama
from subjects import City, get_weather

ROOT_URL = features.BASE_URL.removesuffix("/v1")
EMBEDDER_URL = features.EMBEDDINGS_URL.removesuffix("/v1")
llm = Ollama(model=features.MODEL, base_url=ROOT_URL, temperature=0)
embedder = OllamaEmbedding(model_name=features.EMBEDDER, base_url=EMBEDDER_URL)
llm.additional_kwargs = {"num_predict": 200}

question = [ChatMessage(role="user", content=features.QUESTION)]


def text() -> None:
    features.check_capital(llm.chat(question).message.content)
    features.check_capital(llm.complete(features.QUESTION).text)
    assert llm.metadata.context_window > 1000


def stream() -> None:
    parts = [part.delta or "" for part in llm.stream_chat(question)]
    features.check_streamed(parts, llm.chat(question).message.content)


def auto() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = llm.chat_with_tools([tool], user_msg=features.WEATHER_QUESTION)
    calls = llm.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
    assert calls or answer.message.content


def structured() -> None:
    assert isinstance(llm.as_structured_llm(City).complete(features.QUESTION).raw, City)


def embeddings() -> None:
    features.check_vectors(embedder.get_text_embedding_batch(features.TEXTS))


features.run(text, stream, auto, structured, embeddings)
