"""What the Python scripts share: the servers' addresses, and the JSON lines in which they report.

A script is started with the address of a server and the name of its model, with those of a server of embeddings, with
the folder of the first model, which has its tokenizer, and with the address of a server that transcribes speech and a
sound for it. Its examples are functions that are named after the
features that they try; an example fails by raising.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

BASE_URL, MODEL, EMBEDDINGS_URL, EMBEDDER, MODEL_FOLDER, SPEECH_URL, SOUND = sys.argv[1:8]
TRANSCRIBER = "whisper-1"
API_KEY = "none"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # id of the model in that folder
QUESTION = "What is the capital of France?"
WEATHER_QUESTION = "What is the weather in Paris, in celsius?"
UNITS = ("celsius", "fahrenheit")
TEXTS = ["a cat sleeps", "a dog barks", "a cat sleeps"]
MOST_CHARACTERS = 400  # characters of an error
SKIPPED = os.environ.get("SKIPPED_EXAMPLES", "").split()


def run(*examples: Callable[[], Awaitable[None] | None]) -> None:
    """Run the examples that are not to be skipped, and write one line for each to stdout; what the client prints goes
    to stderr."""
    examples = tuple(example for example in examples if example.__name__ not in SKIPPED)
    out = sys.stdout
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")
    print(json.dumps({"features": [example.__name__ for example in examples]}), file=out, flush=True)
    loop = asyncio.new_event_loop()  # one for all, because clients keep their connections in it
    asyncio.set_event_loop(loop)
    for example in examples:
        weather.calls.clear()
        line = {"feature": example.__name__}
        try:
            result = example()
            if inspect.isawaitable(result):
                loop.run_until_complete(result)
        except Exception as error:
            reason = " ".join(str(error).split())
            line["error"] = f"{type(error).__name__}: {reason}"[:MOST_CHARACTERS]
        print(json.dumps(line), file=out, flush=True)


def check_capital(text: str | None) -> None:
    assert "Paris" in (text or ""), f"the answer is {text!r}"


def check_streamed(parts: list[str], whole: str | None = None) -> None:
    """Check the parts of a streamed answer: there are several, and the text is that of the whole answer."""
    text = "".join(parts)
    assert len([part for part in parts if part]) > 1, f"the text came in one part: {parts}"
    assert whole is None or text == whole, f"streamed {text!r}, whole {whole!r}"
    check_capital(text)


def check_vectors(vectors: Sequence[Sequence[float]]) -> None:
    """Check the vectors of TEXTS: they are those that the server gives to who asks for plain numbers."""
    body = json.dumps({"model": EMBEDDER, "input": TEXTS, "encoding_format": "float"}).encode()
    request = urllib.request.Request(f"{EMBEDDINGS_URL}/embeddings", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        expected = [item["embedding"] for item in json.load(response)["data"]]
    assert [len(vector) for vector in vectors] == [len(vector) for vector in expected]
    differences = [abs(x - y) for pair in zip(vectors, expected, strict=True) for x, y in zip(*pair, strict=True)]
    assert max(differences) < 1e-6, f"the vectors differ by {max(differences)}"


def run_program(line: str, *arguments: str | Path) -> None:
    """Run a program of the client as a user writes it, but on this server, and with the tokenizer in this folder. It
    fails with the end of what the program has said."""
    line = line.replace("\\\n", "")
    for written, used in (("http://127.0.0.1:8000", BASE_URL.removesuffix("/v1")), (HUB_ID, MODEL_FOLDER)):
        line = line.replace(written, used)
    name, *words = shlex.split(line)
    command = [Path(sys.executable).with_name(name), *words, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = " ".join(done.stdout.split())[-MOST_CHARACTERS // 2 :]
    assert done.returncode == 0, f"{name} ended with exit code {done.returncode}: {said}"


class Weather:
    """The function that models call in the examples, and the arguments with which they did."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, object]] = []

    def report(self, city: str, unit: str) -> str:
        self.calls.append((city, unit))
        return f"It is 18 degrees {unit} in {city}."

    def check_called(self) -> None:
        assert self.calls, "the function was not called"
        self.check_obeyed()

    def check_obeyed(self) -> None:
        for city, unit in self.calls:
            assert isinstance(city, str), f"the city is {city!r}"
            assert unit in UNITS, f"the unit is {unit!r}"


weather = Weather()
