"""Schemas that pydantic and zod write: each compiles, and answers by it are what the client reads.

Answers are drawn at random from what the grammar allows. What pydantic wrote, pydantic reads.
`zod.json` has what `z.toJSONSchema` of zod 4.6.7 writes for a type of each kind.
"""

from __future__ import annotations

import json
import re
from collections import deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union
from uuid import UUID

import numpy as np
import pytest
from pydantic import (
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Json,
    SecretStr,
    Tag,
    TypeAdapter,
    conlist,
    constr,
)
from pydantic.dataclasses import dataclass

from specops.text.grammar_source import GrammarError
from tests.simulated_target import grammars, tokenizer
from tests.text.schemas.answers import at_random, faults, follows, json_schema

END = 0  # of a text
ANSWERS = 3  # by each schema


class Color(Enum):
    RED, GREEN = "red", "dark green"


class Level(IntEnum):
    LOW, HIGH = 1, 2


class Address(BaseModel):
    street: str = Field(description="With the number.", examples=["Main St 1"])
    zip: Annotated[str, Field(pattern=r"^\d{5}$")] = "00000"


class Person(BaseModel):
    """A person with everything."""

    name: str = Field(min_length=1, max_length=20, title="Full name")
    age: int = Field(ge=0, lt=150)
    nick: Optional[str] = None  # noqa: UP045 - as clients write it
    home: Address
    others: list[Address] = Field(default_factory=list, max_length=2)
    color: Color = Color.RED


class Free(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog", "wolf"]
    good: bool


class Zoo(BaseModel):
    animals: list[Annotated[Union[Cat, Dog], Field(discriminator="kind")]]  # noqa: UP007


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Chain(BaseModel):
    next: Chain | None = None
    other: Link | None = None


class Link(Chain):
    length: float


class Old(BaseModel):
    old: int = Field(deprecated=True, json_schema_extra={"readOnly": True})
    new: Annotated[int, Field(multiple_of=5)] = 5


@dataclass
class Point:
    x: float
    y: float = 0.0


class Pair(NamedTuple):
    first: int
    second: str


def _tag(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


# A type, and the keywords of its schema that are not enforced.
PYDANTIC: dict[str, tuple[Any, set[str]]] = {
    "model": (Person, set()),
    "open model": (Free, set()),
    "closed model": (Strict, set()),
    "optional": (Optional[Address], set()),  # noqa: UP045
    "discriminated union": (Zoo, set()),
    "union": (Union[int, str, Address, None], set()),  # noqa: UP007
    "tagged union": (
        Annotated[
            Annotated[list[int], Tag("many")] | Annotated[int, Tag("one")], Discriminator(_tag)
        ],
        set(),
    ),
    "recursion": (Tree, set()),
    "mutual recursion": (Chain, set()),
    "record": (dict[str, int], set()),
    "record of a choice": (dict[Literal["a", "b"], bool], set()),
    "record of an enum": (dict[Color, int], set()),
    "record by pattern": (dict[Annotated[str, Field(pattern="^k[0-9]$")], int], set()),
    "record by length": (dict[constr(min_length=2, max_length=3), int], set()),  # type: ignore[misc]
    "record by id": (dict[UUID, int], set()),
    "record by day": (dict[date, int], set()),
    "record of numbers": (dict[int, str], set()),
    "record of a size": (Annotated[dict[str, int], Field(min_length=1, max_length=2)], set()),
    "tuple": (tuple[int, str, bool], set()),
    "tuple of a kind": (tuple[int, ...], set()),
    "named tuple": (Pair, set()),
    "set": (set[int], {"uniqueItems"}),
    "set of an enum": (set[Color], set()),
    "set of truths": (frozenset[bool], set()),
    "list": (conlist(int, min_length=1, max_length=3), set()),  # type: ignore[valid-type]
    "deque": (deque[int], set()),
    "enum": (Color, set()),
    "numbers": (Level, set()),
    "literals": (Literal["a", 1, None, True], set()),
    "decimal": (Decimal, set()),
    "bounded decimal": (Annotated[Decimal, Field(ge=0, max_digits=5, decimal_places=2)], set()),
    "date": (date, set()),
    "time": (time, set()),
    "datetime": (datetime, set()),
    "datetime of a zone": (AwareDatetime, set()),
    "duration": (timedelta, set()),
    "id": (UUID, set()),
    "address of a page": (AnyUrl, set()),
    "IPv4": (IPv4Address, set()),
    "IPv6": (IPv6Address, set()),
    "bytes": (bytes, set()),
    "base64": (Base64Bytes, set()),
    "path": (Path, {"format"}),
    "secret": (SecretStr, {"format"}),
    "JSON in a text": (Json[int], set()),
    "pattern": (re.Pattern, {"format"}),
    "text": (constr(min_length=2, max_length=5, to_upper=True), set()),  # type: ignore[valid-type]
    "number": (Annotated[float, Field(gt=0, le=1)], set()),
    "dataclass": (Point, set()),
    "metadata": (Old, set()),
    "any": (dict[str, Any], set()),
}
# Their schemas say less than what pydantic checks.
UNREADABLE = {"bounded decimal", "duration", "JSON in a text", "base64"}


def answers_by(name: str, schema: Any, left_out: set[str]) -> list[str]:
    """Answers by a schema; each follows it, apart from these keywords."""
    matcher = grammars().matcher(json_schema(schema))
    paths = [item.path for item in matcher.ignored]
    assert {path.rpartition("/")[2] for path in paths} == left_out
    rng = np.random.default_rng(0)
    found = []
    for _ in range(ANSWERS * 3):
        own = grammars().matcher(json_schema(schema))
        text = at_random(own, tokenizer(), rng, end=END)
        if text is None or len(found) == ANSWERS:
            continue
        value = json.loads(text)
        assert faults(schema, value, paths) == [], (name, text)
        found.append(text)
    assert found, name
    return found


@pytest.mark.parametrize("name", PYDANTIC)
def test_what_pydantic_asks_for_it_can_read(name: str) -> None:
    kind, left_out = PYDANTIC[name]
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    for text in answers_by(name, adapter.json_schema(), left_out):
        if name not in UNREADABLE and not left_out:
            adapter.validate_json(text)


ZOD = json.loads((Path(__file__).parent / "zod.json").read_text())["schemas"]
ZOD_LEFT_OUT = {"record by uuid": "propertyNames", "duration": "pattern", "jwt": "format"}


# A walk at random does not find an end of these: a text that follows each, and one that does not.
ZOD_TEXTS = {
    "email": ("ada.l@example.org", "ada@example"),
    "emoji": ("🙂", "a"),
    "starts": ("abcz", "abc"),
    "includes": ("a mid b", "a md b"),
    "regexes": ("a to z", "a to b"),
}


@pytest.mark.parametrize("name", ZOD_TEXTS)
def test_texts_follow_what_zod_asks_for(name: str) -> None:
    for text, right in zip(ZOD_TEXTS[name], (True, False), strict=True):
        written = json.dumps(text, ensure_ascii=False)
        grammar = json_schema(ZOD[name])
        assert follows(grammars(), tokenizer(), grammar, written) is right, text


@pytest.mark.parametrize("name", sorted(ZOD.keys() - ZOD_TEXTS.keys()))
def test_answers_follow_what_zod_asks_for(name: str) -> None:
    left_out = {ZOD_LEFT_OUT[name]} if name in ZOD_LEFT_OUT else set()
    answers_by(name, ZOD[name], left_out)


@pytest.mark.parametrize("name", sorted(PYDANTIC))
def test_a_strict_schema_is_refused_only_where_something_is_left_out(name: str) -> None:
    kind, left_out = PYDANTIC[name]
    grammar = json_schema(TypeAdapter(kind).json_schema(), strict=True)
    if not left_out:
        grammars().matcher(grammar)
        return
    with pytest.raises(GrammarError, match=next(iter(left_out))):
        grammars().matcher(grammar)
