"""The clients that are tried, and what each needs to use this server."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.bench import prepare

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Client:
    """A client and its script."""

    title: str
    packages: tuple[str, ...]  # packages that a user installs; the version of the first is shown
    script: str
    written: str = ""  # what a user writes to reach this server; "": the first text of several lines in the script
    language: str = "python"  # language of the client
    flags: tuple[str, ...] = ()  # for a server of its own
    needs_torch: bool = False  # torch of the benchmarks' environment, where possible a build without CUDA
    made_by: Callable[[], Path] | None = None  # the environment is one of the benchmarks', with its own pins
    note: str = ""  # a sentence below the table

    @property
    def is_javascript(self) -> bool:
        return self.script.endswith(".mjs")

    @property
    def brings_node(self) -> bool:
        return NODE in self.packages

    @property
    def setup(self) -> str:
        if self.written:
            return self.written
        text, *_ = re.findall(r'"""\\\n(.+?)\n"""', (SCRIPTS / self.script).read_text(), re.DOTALL)
        return str(text).replace("\\\\", "\\")


OPENAI_SETUP = """\
import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")"""

OPENAI_JS_SETUP = """\
import OpenAI from "openai";
const client = new OpenAI({ baseURL: "http://127.0.0.1:8000/v1", apiKey: "none" });"""

# This package installs the program node, which then runs the client. That of the machine may be too old.
NODE = "node@22"
NO_CHOICE = "Ollama's API requires no calls, so a small model may make none."

CLIENTS = {
    "openai-3": Client("openai (Python)", ("openai",), "use_openai.py", OPENAI_SETUP),
    "openai-2": Client("openai 2 (Python)", ("openai<3",), "use_openai.py", OPENAI_SETUP),
    "openai-1": Client("openai 1 (Python)", ("openai<2",), "use_openai.py", OPENAI_SETUP),
    "openai-js": Client(
        "openai (JavaScript)",
        ("openai@>=7", "zod", NODE),
        "use_openai.mjs",
        OPENAI_JS_SETUP,
        language="js",
        note="The JavaScript clients need node 22, which their environment takes from npm's package `node`.",
    ),
    "openai-js-6": Client(
        "openai 6 (JavaScript)",
        ("openai@6", "zod"),
        "use_openai.mjs",
        OPENAI_JS_SETUP,
        language="js",
    ),
    "anthropic": Client(
        "anthropic (Python)",
        ("anthropic",),
        "use_anthropic.py",
        """\
import anthropic

client = anthropic.Anthropic(base_url="http://127.0.0.1:8000", api_key="none")""",
    ),
    "anthropic-js": Client(
        "anthropic (JavaScript)",
        ("@anthropic-ai/sdk",),
        "use_anthropic.mjs",
        """\
import Anthropic from "@anthropic-ai/sdk";
const client = new Anthropic({ baseURL: "http://127.0.0.1:8000", apiKey: "none" });""",
        language="js",
    ),
    "ollama": Client(
        "ollama (Python)",
        ("ollama",),
        "use_ollama.py",
        """\
import ollama

client = ollama.Client(host="http://127.0.0.1:8000")""",
        note=f"{NO_CHOICE} With `--port 11434` it needs no `host`.",
    ),
    "ollama-js": Client(
        "ollama (JavaScript)",
        ("ollama",),
        "use_ollama.mjs",
        """\
import { Ollama } from "ollama";
const client = new Ollama({ host: "http://127.0.0.1:8000" });""",
        language="js",
    ),
    "langchain-ollama": Client(
        "LangChain, ChatOllama",
        ("langchain-ollama",),
        "use_langchain_ollama.py",
        """\
from langchain_ollama import ChatOllama, OllamaEmbeddings

model = ChatOllama(model="demo", base_url="http://127.0.0.1:8000")
embedder = OllamaEmbeddings(model="embedder", base_url="http://127.0.0.1:8001")""",
        note='`method="json_schema"` of `with_structured_output` enforces a type.',
    ),
    "llama-index-ollama": Client(
        "LlamaIndex, Ollama",
        ("llama-index-llms-ollama", "llama-index-embeddings-ollama", "llama-index-core"),
        "use_llama_index_ollama.py",
        """\
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.llms.ollama import Ollama

llm = Ollama(model="demo", base_url="http://127.0.0.1:8000")
embedder = OllamaEmbedding(model_name="embedder", base_url="http://127.0.0.1:8001")""",
    ),
    "langchain": Client(
        "LangChain",
        ("langchain-openai", "langchain", "langchain-tests"),
        "use_langchain.py",
        """\
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

model = ChatOpenAI(model="demo", base_url="http://127.0.0.1:8000/v1", api_key="none")
embedder = OpenAIEmbeddings(
    model="embedder", base_url="http://127.0.0.1:8001/v1", api_key="none", check_embedding_ctx_length=False
)""",
        note="With `use_responses_api=True` it uses `/v1/responses`. Without `check_embedding_ctx_length=False` it "
        "sends token ids of OpenAI's models. Some of its standard tests need a better model.",
    ),
    "langchain-anthropic": Client(
        "LangChain, ChatAnthropic",
        ("langchain-anthropic", "langchain", "langchain-tests"),
        "use_langchain_anthropic.py",
        """\
from langchain_anthropic import ChatAnthropic

model = ChatAnthropic(model="demo", base_url="http://127.0.0.1:8000", api_key="none")""",
    ),
    "pydantic-ai": Client(
        "pydantic-ai",
        ("pydantic-ai-slim[openai]",),
        "use_pydantic_ai.py",
        """\
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIResponsesModel("demo", provider=OpenAIProvider(base_url="http://127.0.0.1:8000/v1", api_key="none"))
embedder = OpenAIEmbeddingModel(
    "embedder", provider=OpenAIProvider(base_url="http://127.0.0.1:8001/v1", api_key="none")
)""",
    ),
    "openai-agents": Client(
        "openai-agents",
        ("openai-agents", "pytest-asyncio"),
        "use_openai_agents.py",
        """\
from agents import OpenAIResponsesModel, set_tracing_disabled
from openai import AsyncOpenAI

client = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = OpenAIResponsesModel(model="demo", openai_client=client)
set_tracing_disabled(True)""",
        note="`AGENTS_CHECKOUT=FOLDER` adds its repository's integration tests.",
    ),
    "ai-sdk-openai": Client(
        "Vercel's ai, @ai-sdk/openai",
        ("@ai-sdk/openai@>=4", "ai@>=7", "zod", NODE),
        "use_ai_sdk_openai.mjs",
        """\
import { createOpenAI } from "@ai-sdk/openai";
const openai = createOpenAI({ baseURL: "http://127.0.0.1:8000/v1", apiKey: "none" });
const model = openai("demo");
const embeddings = createOpenAI({ baseURL: "http://127.0.0.1:8001/v1", apiKey: "none" });
const embedder = embeddings.embeddingModel("embedder");""",
        language="js",
    ),
    "ai-sdk-openai-compatible": Client(
        "Vercel's ai, @ai-sdk/openai-compatible",
        ("@ai-sdk/openai-compatible@>=3", "ai@>=7", "zod", NODE),
        "use_ai_sdk_openai_compatible.mjs",
        """\
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
const local = createOpenAICompatible({
  name: "local", baseURL: "http://127.0.0.1:8000/v1", apiKey: "none",
  supportsStructuredOutputs: true, includeUsage: true,
});
const model = local("demo");
const embeddings = createOpenAICompatible({ name: "embeddings", baseURL: "http://127.0.0.1:8001/v1", apiKey: "none" });
const embedder = embeddings.embeddingModel("embedder");""",
        language="js",
        note="Without `includeUsage`, streams have no counts of tokens.",
    ),
    "ai-sdk-anthropic": Client(
        "Vercel's ai, @ai-sdk/anthropic",
        ("@ai-sdk/anthropic@>=4", "ai@>=7", "zod", NODE),
        "use_ai_sdk_anthropic.mjs",
        """\
import { createAnthropic } from "@ai-sdk/anthropic";
const anthropic = createAnthropic({ baseURL: "http://127.0.0.1:8000/v1", apiKey: "none" });
const model = anthropic("demo");""",
        language="js",
    ),
    "huggingface-hub": Client(
        "huggingface_hub",
        ("huggingface-hub", "numpy", "pydantic"),
        "use_huggingface_hub.py",
        """\
from huggingface_hub import InferenceClient

client = InferenceClient(base_url="http://127.0.0.1:8000/v1", api_key="none")""",
    ),
    "instructor": Client(
        "instructor",
        ("instructor",),
        "use_instructor.py",
        """\
import instructor
from openai import OpenAI

client = instructor.from_openai(OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none"))""",
        note="The modes `TOOLS`, the default, and `JSON_SCHEMA` enforce a type; `JSON` only mentions it to the model.",
    ),
    "llama-index": Client(
        "LlamaIndex",
        ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
        "use_llama_index.py",
        """\
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

capabilities = {"is_chat_model": True, "is_function_calling_model": True, "should_use_structured_outputs": True}
llm = OpenAILike(model="demo", api_base="http://127.0.0.1:8000/v1", api_key="none", **capabilities)
embedder = OpenAILikeEmbedding(model_name="embedder", api_base="http://127.0.0.1:8001/v1", api_key="none")""",
        note="`OpenAIResponses` uses `/v1/responses`. It needs `context_window`, since it only knows OpenAI's models.",
    ),
    "haystack": Client(
        "haystack",
        ("haystack-ai",),
        "use_haystack.py",
        """\
from haystack.components.embedders import OpenAIDocumentEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.utils import Secret

generator = OpenAIChatGenerator(
    model="demo", api_base_url="http://127.0.0.1:8000/v1", api_key=Secret.from_token("none")
)
embedder = OpenAIDocumentEmbedder(
    model="embedder", api_base_url="http://127.0.0.1:8001/v1", api_key=Secret.from_token("none")
)""",
    ),
    "smolagents": Client(
        "smolagents",
        ("smolagents[openai]",),
        "use_smolagents.py",
        """\
from smolagents import OpenAIModel

model = OpenAIModel(model_id="demo", api_base="http://127.0.0.1:8000/v1", api_key="none")""",
    ),
    "llm": Client(
        "llm",
        ("llm",),
        "use_llm.py",
        language="yaml",
        note="Put the lines into its file `extra-openai-models.yaml`. With `responses: true` it uses `/v1/responses`.",
    ),
    "litellm": Client(
        "litellm",
        ("litellm", "mcp"),
        "use_litellm.py",
        """\
import litellm

server = {"model": "openai/demo", "api_base": "http://127.0.0.1:8000/v1", "api_key": "none"}
embedder = {"model": "openai/embedder", "api_base": "http://127.0.0.1:8001/v1", "api_key": "none"}""",
        note="For tools, also install the package mcp.",
    ),
    "lm-eval": Client(
        "lm-eval",
        ("lm-eval[api,hf]",),
        "use_lm_eval.py",
        language="sh",
        flags=("--dtype", "float32"),
        needs_torch=True,
        note="It takes the tokenizer from the server (`tokenizer_backend=auto`). Its own tasks download data.",
    ),
    "vllm-bench": Client(
        "vllm bench serve",
        (prepare.VLLM,),
        "use_vllm_bench.py",
        language="sh",
        made_by=prepare.vllm,
    ),
    "guidellm": Client(
        "guidellm",
        ("guidellm",),
        "use_guidellm.py",
        language="sh",
        needs_torch=True,
    ),
    "aiperf": Client(
        "aiperf",
        ("aiperf",),
        "use_aiperf.py",
        language="sh",
    ),
}
