"""The examples for instructor. All that it does is structured, so its answers are of the user's types."""

import instructor
from features import API_KEY, BASE_URL, MODEL, QUESTION, WEATHER_QUESTION, run, weather
from openai import OpenAI
from subjects import City, GetWeather

client = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY))

settings = {"model": MODEL, "temperature": 0, "max_tokens": 200}
question = [{"role": "user", "content": QUESTION}]
weather_question = [{"role": "user", "content": WEATHER_QUESTION}]


def stream() -> None:
    cities = list(client.create_partial(City, messages=question, **settings))
    assert len(cities) > 1
    City.model_validate(cities[-1].model_dump())


def tools() -> None:
    arguments = client.create(GetWeather, messages=weather_question, **settings)
    weather.report(**arguments.model_dump())
    weather.check_called()


def structured() -> None:
    by_schema = instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=API_KEY), mode=instructor.Mode.JSON_SCHEMA)
    city = by_schema.create(City, messages=question, **settings)
    assert isinstance(city, City), repr(city)


def responses() -> None:
    openai = OpenAI(base_url=BASE_URL, api_key=API_KEY)
    asker = instructor.from_openai(openai, mode=instructor.Mode.RESPONSES_TOOLS)
    options = {"model": MODEL, "temperature": 0, "max_output_tokens": 200}
    city = asker.create(City, messages=question, **options)
    assert isinstance(city, City), repr(city)
    cities = list(asker.create_partial(City, messages=question, **options))
    assert len(cities) > 1
    City.model_validate(cities[-1].model_dump())


run(stream, tools, structured, responses)
