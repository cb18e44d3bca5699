"""What the clients ask for: questions, a tool, and a form for each kind of schema.

Drivers run in environments of their own and import this module, so it needs nothing but pydantic.
`drivers.mjs` has the same forms in zod; `judge.py` checks every answer with these.
"""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

QUESTION = "What is the capital of France?"
ANSWER = "Paris"
LONG_ANSWER = "Write a long story about a fox, a crow and a piece of cheese."  # to be cancelled
WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER = "sunny, 21 degrees"  # what the tool returns
TEXTS = ("a cat", "a kitten", "a train")

# More than the context that the server is started with, in turns that can be left out.
_TURN = "The quick brown fox jumps over the lazy dog. " * 20
TOO_LONG = [
    *({"role": role, "content": _TURN} for _ in range(10) for role in ("user", "assistant")),
    {"role": "user", "content": QUESTION},
]


def earlier_calls(*, text: bool) -> list[dict[str, Any]]:
    """Return a conversation in which the tool was called twice: what Ollama has in place of
    `tool_choice` is a model that does what it did before.

    Args:
        text: OpenAI's form of messages, in which arguments are a text; else Ollama's.
    """
    messages: list[dict[str, Any]] = []
    for city in ("London", "Rome"):
        arguments: Any = {"city": city}
        call = {"name": "get_weather", "arguments": json.dumps(arguments) if text else arguments}
        named = {"id": city, "type": "function"} if text else {}
        result = {"tool_call_id": city} if text else {"tool_name": "get_weather"}
        messages += [
            {"role": "user", "content": f"What is the weather in {city}?"},
            {"role": "assistant", "content": "", "tool_calls": [{**named, "function": call}]},
            {"role": "tool", "content": f"{city}: {WEATHER}", **result},
        ]
    return messages


def get_weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: The city's name.
    """
    return f"{city}: {WEATHER}"


Name = Annotated[str, Field(max_length=20)]  # a small model might never end


class Colour(Enum):
    """One of three."""

    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Records(BaseModel):
    """Points by name."""

    points: dict[str, int]


class Circle(BaseModel):
    """A circle."""

    kind: Literal["circle"]
    radius: int


class Square(BaseModel):
    """A square."""

    kind: Literal["square"]
    side: int


class Unions(BaseModel):
    """One of two shapes."""

    shape: Circle | Square


class Optionals(BaseModel):
    """A person."""

    name: Name
    nickname: Name | None = None


class Sets(BaseModel):
    """Some colours, each of them once."""

    colours: set[Colour]


class Decimals(BaseModel):
    """A price."""

    price: Decimal


class Dates(BaseModel):
    """A day, and a time."""

    day: date
    time: datetime


class Enums(BaseModel):
    """A shirt."""

    colour: Colour
    size: Literal["small", "large"]


class Recursion(BaseModel):
    """A folder, which may hold another one."""

    name: Name
    inner: Recursion | None


# The model is small: it repeats what it is told, and is not asked to understand.
_SAID = {
    Records: '{"points": {"Ann": 3, "Bob": 5}}',
    Unions: '{"shape": {"kind": "circle", "radius": 3}}',
    Optionals: '{"name": "Ann", "nickname": null}',
    Sets: '{"colours": ["red", "blue"]}',
    Decimals: '{"price": "12.50"}',
    Dates: '{"day": "2024-05-01", "time": "2024-05-01T12:30:00Z"}',
    Enums: '{"colour": "red", "size": "small"}',
    Recursion: '{"name": "a", "inner": null}',
}
FORMS: dict[str, tuple[type[BaseModel], str]] = {
    form.__name__.lower(): (form, f"Repeat this JSON: {text}") for form, text in _SAID.items()
}
