"""The base class of all request bodies, and types of their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from annotated_types import GroupedMetadata
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from specops import synonyms
from specops.text.json_values import writable


def _encodable(text: str) -> str:
    """Refuse an unpaired surrogate: JSON can spell it, but no encoding of text can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"unpaired surrogate at position {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
FreeObject = Annotated[dict[str, Any], AfterValidator(writable)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]


_Item = TypeVar("_Item")
MAX_TOOLS = 1 << 10  # of one request
# The first wrong item ends the check: 400,000 messages, in 1 MB, would take 4 s to list.
Items = Annotated[list[_Item], Field(fail_fast=True)]
Some = Annotated[list[_Item], Field(min_length=1, fail_fast=True)]
Tools = Annotated[list[_Item], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _has_token(prompt: list[int | str]) -> list[int | str]:
    if not any(isinstance(item, int) for item in prompt):
        raise ValueError("texts alone are several prompts")
    return prompt


# One prompt, of tokens and texts in a row.
MixedPrompt = Annotated[Some[TokenId | Text], AfterValidator(_has_token)]

STRICT = ConfigDict(extra="allow", strict=True, frozen=True)


class Unsupported(GroupedMetadata):
    """Marks a field that this server does not support: only values that ask for nothing pass."""

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral

    def __iter__(self) -> Iterator[object]:
        yield AfterValidator(self._check)
        yield WithJsonSchema({"enum": list(self._neutral)})

    def _check(self, value: Any) -> Any:
        for neutral in self._neutral:  # False is not 0 here
            if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
                return value
        raise PydanticCustomError("unsupported", "this server does not support it")


class Body(BaseModel):
    """A JSON object that a client sends. Unknown fields are kept apart: see `unknown_fields`.

    Attributes:
        ignored_fields: names of unknown fields that only concern other services. They are ignored
            even where unknown fields are refused.
        neutral_values: by name, values of unknown fields that ask for nothing.
    """

    model_config = STRICT
    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


@cache
def _model_fields(kind: type[Any]) -> tuple[str, ...] | None:
    """Return the names of a model's fields that may hold models; None: a class of no models."""
    if not issubclass(kind, BaseModel):
        return None
    return tuple(name for name, field in kind.model_fields.items() if _holds(field.annotation))


def _holds(annotation: Any) -> bool:
    """Whether a value of this type may be, or have, a model."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(map(_holds, get_args(annotation)))


def unknown_fields(body: BaseModel) -> Iterator[tuple[str, bool]]:
    """Yield the names of a body's unknown fields; the items of a list share one name.

    Yields:
        The name, and whether the field is known to be without effect.
    """
    found: list[tuple[str, list[Any]]] = [("", [body])]
    for at, parts in found:  # which grows meanwhile
        for part in parts:
            if (names := _model_fields(type(part))) is None:  # type: ignore[arg-type]
                continue
            if extra := part.__pydantic_extra__:
                known = isinstance(part, Body)
                neutral = part.neutral_values if known else {}
                for name, value in extra.items():
                    if value not in neutral.get(name, ()):
                        yield at + name, known and name in part.ignored_fields
            for name in names:
                value = part.__dict__[name]
                if value is not None and type(value) is not str:  # most have texts
                    found.append((f"{at}{name}.", value if type(value) is list else [value]))


def names_of(field: str) -> AliasChoices:
    """Return all names that clients have for a field, for its `validation_alias`."""
    return AliasChoices(field, *synonyms.FIELDS[field])


def known_fields(body: BaseModel) -> dict[str, Any]:
    """Return a body as JSON has it, without its unknown fields."""
    return body.model_dump(by_alias=True, include=set(type(body).model_fields))


def listed(prompt: Any) -> list[Any]:
    """Return one or several prompts as a list; a list with a token in it is one prompt."""
    several = isinstance(prompt, list) and not any(isinstance(item, int) for item in prompt)
    return prompt if several else [prompt]


def absent(value: object) -> bool:
    """Whether a field is left out of an answer, as the official services do: for `exclude_if`."""
    return value is None


def conflict(field: str, message: str) -> PydanticCustomError:
    """Return the error of a validator that finds `field` in conflict with another field."""
    # pydantic formats the message as a template: ours goes in as a value, so braces stay.
    return PydanticCustomError("combination", "{message}", {"field": field, "message": message})
