"""The search of the site finds the page for what a user types.

The site's search runs in a browser, and only `make docs` has the program that builds its index. So this indexes the
pages in the same way: by sections, words by their beginnings, and titles a thousand times as heavy as texts.
"""

import math
import re
from collections import Counter
from functools import cache
from typing import NamedTuple

import pytest

from tests.pages import PAGES, name_of
from tools.site_pages import CHANGELOG_BOOST, FENCE

TITLE_WEIGHT = 1000.0
SATURATION = 1.2  # BM25's k1: how much the repetition of a word counts
LENGTH_SHARE = 0.75  # BM25's b: how much less a word counts in a long text
BOOST = re.compile(r"\A---\nsearch: boost: ([\d.]+)\n---\n")
HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
NOT_READ = re.compile(r"<!--.*?-->|\]\([^)]*\)", re.DOTALL)
STOP_WORDS = {"a", "an", "and", "in", "is", "it", "my", "of", "the", "to"}  # some of lunr's

# What users type, and the page that answers it.
QUESTIONS = {
    "install": "docs/start.md",
    "which model fits my machine": "docs/models.md",
    "gguf file": "docs/models.md",
    "ollama": "docs/ollama.md",
    "langchain": "docs/clients.md",
    "claude code": "docs/commands.md",
    "what may a coding agent do": "docs/agents.md",
    "json schema": "docs/structured-outputs.md",
    "tool calls": "docs/tools-and-reasoning.md",
    "upload an image": "docs/images.md",
    "transcribe speech": "docs/speech.md",
    "create embeddings": "docs/embeddings.md",
    "lora adapter": "docs/adapters.md",
    "same answer every time": "docs/reproducible.md",
    "model repeats itself": "docs/repeats.md",
    "why is my request slow": "docs/slow-requests.md",
    "cost per request": "docs/costs.md",
    "one client takes everything": "docs/one-client.md",
    "api key limits": "docs/keys.md",
    "https certificate": "docs/security.md",
    "prometheus alerts": "deploy/README.md",
    "kubernetes": "deploy/README.md",
    "use several GPUs": "docs/several-gpus.md",
    "two servers behind one address": "docs/gateway.md",
    "vllm in front": "docs/any-engine.md",
    "record requests": "docs/loadtest.md",
    "speed compared with llama.cpp": "docs/benchmarks.md",
}


class Section(NamedTuple):
    page: str
    boost: float
    fields: tuple[Counter[str], Counter[str]]  # words of the title and of the text


def words(text: str) -> list[str]:
    return [word for part in re.split(r"[\s-]+", text.lower()) if (word := part.strip("`*|.,:;()[]\"'#<>/"))]


@cache
def sections() -> list[Section]:
    """Return the sections of all pages on the site, each from one heading to the next."""
    found = []
    for page in PAGES:
        text = page.read_text()
        boost = float(match[1]) if (match := BOOST.match(text)) else 1.0
        if page.name == "CHANGELOG.md":
            boost = CHANGELOG_BOOST
        # A comment in a snippet is no heading.
        prose = FENCE.sub(lambda fence: fence[0].replace("\n#", "\n "), text)
        _, *parts = HEADING.split(NOT_READ.sub(" ", prose))
        for title, body in zip(parts[::2], parts[1::2], strict=True):
            found.append(Section(name_of(page), boost, (Counter(words(title)), Counter(words(body)))))
    return found


@cache
def average_lengths() -> tuple[float, ...]:
    return tuple(sum(section.fields[field].total() for section in sections()) / len(sections()) for field in (0, 1))


@cache
def rarity(word: str) -> float:
    """Return the weight of a word: the logarithm of how few sections have it."""
    having = sum(any(word in field for field in section.fields) for section in sections())
    return math.log(1 + (len(sections()) - having + 0.5) / (having + 0.5))


def score(section: Section, query: list[str]) -> float:
    """Return how well a section matches, 0 for not at all: for each word of the query, its best match in each field."""
    total = 0.0
    for field, weight, average in zip(section.fields, (TITLE_WEIGHT, 1.0), average_lengths(), strict=True):
        norm = SATURATION * (1 - LENGTH_SHARE + LENGTH_SHARE * field.total() / average)
        for asked in query:
            matches = (word for word in field if word.startswith(asked))
            values = (rarity(word) * field[word] * (SATURATION + 1) / (field[word] + norm) for word in matches)
            total += weight * max(values, default=0.0)
    return total * section.boost


def found_pages(question: str) -> list[str]:
    """Return the pages with sections that match, the best first."""
    query = [word for word in words(question) if word not in STOP_WORDS]
    best: dict[str, float] = {}
    for section in sections():
        value = score(section, query)
        if value:
            best[section.page] = max(value, best.get(section.page, 0.0))
    return sorted(best, key=lambda page: -best[page])


@pytest.mark.parametrize("question", QUESTIONS)
def test_search_shows_the_right_page_among_the_first_three(question: str) -> None:
    assert QUESTIONS[question] in found_pages(question)[:3]


def test_words_that_no_page_has_find_nothing() -> None:
    assert found_pages("xylophone") == []
