"""The examples for llm, by its Python interface. It has no way to force a call of a tool."""

import os
from pathlib import Path

from features import BASE_URL, MODEL, QUESTION, WEATHER_QUESTION, check_capital, check_streamed, run, weather
from subjects import City, get_weather

models = """\
- model_id: demo
  model_name: demo
  api_base: http://127.0.0.1:8000/v1
  supports_schema: true
  supports_tools: true
"""
models += models.replace("model_id: demo", "model_id: demo-responses") + "  responses: true\n"
models = models.replace("http://127.0.0.1:8000/v1", BASE_URL).replace("model_name: demo", f"model_name: {MODEL}")
Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(models)

import llm  # noqa: E402  it reads the file

model = llm.get_model("demo")
options = {"temperature": 0, "max_tokens": 200, "key": "none"}


def text() -> None:
    check_capital(model.prompt(QUESTION, stream=False, **options).text())


def stream() -> None:
    check_streamed(list(model.prompt(QUESTION, **options)), model.prompt(QUESTION, stream=False, **options).text())


def auto() -> None:
    assert model.chain(
        WEATHER_QUESTION, tools=[get_weather], options={"temperature": 0, "max_tokens": 200}, key="none"
    ).text()
    weather.check_obeyed()


def structured() -> None:
    for streamed in (False, True):
        City.model_validate_json(model.prompt(QUESTION, schema=City, stream=streamed, **options).text())


def responses() -> None:
    asker = llm.get_model("demo-responses")
    check_streamed(list(asker.prompt(QUESTION, **options)), asker.prompt(QUESTION, stream=False, **options).text())
    talk = asker.conversation()
    check_capital(talk.prompt(QUESTION, **options).text())
    assert talk.prompt("And of Italy?", **options).text()


run(text, stream, auto, structured, responses)
