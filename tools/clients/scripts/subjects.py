"""What the examples ask models for: a call of a function, as a function and as a type, and an answer of a type. This is
no part of features.py because the load generators' environments have no pydantic."""

from typing import Literal

from features import weather
from pydantic import BaseModel, Field


def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """Report the weather in a city."""
    return weather.report(city, unit)


class GetWeather(BaseModel):
    """Report the weather in a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]


class City(BaseModel):
    """A city."""

    name: str
    country: str
    is_capital: bool = Field(description="Whether it is the capital of its country")
