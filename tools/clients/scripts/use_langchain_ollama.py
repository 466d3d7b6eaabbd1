"""The examples for LangChain's ChatOllama and OllamaEmbeddings."""

import features
from langchain_core.messages import HumanMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from subjects import City, get_weather

ROOT_URL = features.BASE_URL.removesuffix("/v1")
EMBEDDER_URL = features.EMBEDDINGS_URL.removesuffix("/v1")
model = ChatOllama(model=features.MODEL, base_url=ROOT_URL, temperature=0)
embedder = OllamaEmbeddings(model=features.EMBEDDER, base_url=EMBEDDER_URL)
model.num_predict = 200
model.num_ctx = 4096


def text() -> None:
    answer = model.invoke(features.QUESTION)
    features.check_capital(answer.content)
    assert answer.usage_metadata["output_tokens"] > 1
    ChatOllama(model=features.MODEL, base_url=ROOT_URL, validate_model_on_init=True)  # It looks for a listed name.


def stream() -> None:
    features.check_streamed(
        [part.content for part in model.stream(features.QUESTION)], model.invoke(features.QUESTION).content
    )


def auto() -> None:
    question = HumanMessage(features.WEATHER_QUESTION)
    answer = model.bind_tools([get_weather]).invoke([question])
    assert answer.content or answer.tool_calls


def structured() -> None:
    assert isinstance(model.with_structured_output(City, method="json_schema").invoke(features.QUESTION), City)


def embeddings() -> None:
    features.check_vectors(embedder.embed_documents(features.TEXTS))


features.run(text, stream, auto, structured, embeddings)
