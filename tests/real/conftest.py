"""Real files for the tests in this folder, which `make test-real` runs: `artefacts.py` says where they come from."""

import os
from pathlib import Path

import pytest

from tests.real import artefacts


@pytest.fixture(scope="session")
def gemma_270m() -> Path:
    """Gemma 3 270M (base), as GGUF in Q4_K_M."""
    return artefacts.fetched(artefacts.GEMMA_270M)


@pytest.fixture(scope="session")
def qwen_05b() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, as GGUF in a mix of Q4_K_M, Q5_0, Q6_K and Q8_0."""
    return artefacts.fetched(artefacts.QWEN_05B)


@pytest.fixture(scope="session")
def qwen_15b() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct, as GGUF in Q4_K_M."""
    return artefacts.fetched(artefacts.QWEN_15B)


@pytest.fixture(scope="session")
def mpnet() -> Path:
    """The folder of all-mpnet-base-v2."""
    return artefacts.fetched(artefacts.MPNET)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2."""
    return artefacts.fetched(artefacts.MINILM)


@pytest.fixture(scope="session")
def llama_cpp() -> Path:
    """The source of llama.cpp, with its vocabularies, templates and chat tests."""
    return artefacts.fetched(artefacts.LLAMA_CPP)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.real)
