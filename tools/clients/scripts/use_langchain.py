"""The examples for LangChain's ChatOpenAI and OpenAIEmbeddings, and its standard tests of them."""

import features
import langchain_chat
import langchain_standard
import langchain_standard_tests
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import LengthFinishReasonError

model = ChatOpenAI(
    model=features.MODEL, base_url=features.BASE_URL, api_key=features.API_KEY, temperature=0, max_tokens=200
)
embedder = OpenAIEmbeddings(
    model=features.EMBEDDER,
    base_url=features.EMBEDDINGS_URL,
    api_key=features.API_KEY,
    check_embedding_ctx_length=False,
)

LEAST_TESTS = 90  # standard tests that pass with a small model


def responses() -> None:
    asker = ChatOpenAI(
        model=features.MODEL,
        base_url=features.BASE_URL,
        api_key=features.API_KEY,
        temperature=0,
        max_tokens=200,
        use_responses_api=True,
        use_previous_response_id=True,
    )
    first = asker.invoke(features.QUESTION)
    features.check_streamed([chunk.text for chunk in asker.stream(features.QUESTION)], first.text)
    second = asker.invoke([HumanMessage(features.QUESTION), first, HumanMessage("And of Italy?")])
    assert second.text
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["total_tokens"]


def embeddings() -> None:
    features.check_vectors(embedder.embed_documents(features.TEXTS))


def standard() -> None:
    langchain_standard.check(langchain_standard_tests, LEAST_TESTS, LengthFinishReasonError)


features.run(*langchain_chat.examples(model), responses, embeddings, standard)
