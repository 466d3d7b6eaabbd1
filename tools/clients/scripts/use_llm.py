"""The examples for llm, by its Python interface. It has no way to force a call of a tool."""

import os
from pathlib import Path
from typing import Literal

from features import BASE_URL, MODEL, QUESTION, WEATHER_QUESTION, Weather, check_capital, check_streamed, run
from pydantic import BaseModel

models = """\
- model_id: demo
  model_name: demo
  api_base: http://127.0.0.1:8000/v1
  supports_schema: true
  supports_tools: true
"""
models += models.replace("model_id: demo", "model_id: demo-responses") + "  responses: true\n"
models = models.replace("http://127.0.0.1:8000/v1", BASE_URL)
Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(models)

import llm  # noqa: E402  it reads the file

model = llm.get_model(MODEL)
options = {"temperature": 0, "max_tokens": 200, "key": "none"}


class City(BaseModel):
    name: str
    country: str
    is_capital: bool


def text() -> None:
    check_capital(model.prompt(QUESTION, stream=False, **options).text())


def stream() -> None:
    check_streamed(list(model.prompt(QUESTION, **options)), model.prompt(QUESTION, stream=False, **options).text())


def auto() -> None:
    weather = Weather()

    def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
        """Report the weather in a city."""
        return weather.report(city, unit)

    assert model.chain(
        WEATHER_QUESTION, tools=[get_weather], options={"temperature": 0, "max_tokens": 200}, key="none"
    ).text()
    weather.check_obeyed()


def structured() -> None:
    for streamed in (False, True):
        City.model_validate_json(model.prompt(QUESTION, schema=City, stream=streamed, **options).text())


def responses() -> None:
    asker = llm.get_model("demo-responses")
    asked = {"temperature": 0, "max_tokens": 200, "key": "none"}
    check_streamed(list(asker.prompt(QUESTION, **asked)), asker.prompt(QUESTION, stream=False, **asked).text())
    talk = asker.conversation()
    check_capital(talk.prompt(QUESTION, **asked).text())
    assert talk.prompt("And of Italy?", **asked).text()


run(text, stream, auto, structured, responses)
