"""The base class of all request bodies, and types of their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from annotated_types import GroupedMetadata
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

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


def _has_token(prompt: list[int | str]) -> list[int | str]:
    if not any(isinstance(item, int) for item in prompt):
        raise ValueError("texts alone are several prompts")
    return prompt


# One prompt, of tokens and texts in a row.
MixedPrompt = Annotated[
    list[TokenId | Text], Field(min_length=1, fail_fast=True), AfterValidator(_has_token)
]

MOST_TOOLS = 1 << 10  # of one request
_PLAIN = (str, int, float, type(None))
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
        without_effect: names of unknown fields that only concern other services. They are ignored
            even where unknown fields are refused.
        neutral_values: by name, values of unknown fields that ask for nothing.
    """

    model_config = STRICT
    without_effect: ClassVar[frozenset[str]] = frozenset()
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


def unknown_fields(body: BaseModel, at: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the names of a body's unknown fields; the items of a list share one name.

    Yields:
        The name, and whether the field is known to be without effect.
    """
    harmless, neutral = frozenset[str](), dict[str, tuple[Any, ...]]()
    if isinstance(body, Body):
        harmless, neutral = body.without_effect, body.neutral_values  # type: ignore[assignment]
    for name, value in (body.model_extra or {}).items():
        if value in neutral.get(name, ()):
            continue
        yield at + name, name in harmless
    for name, value in vars(body).items():  # without the unknown ones
        if isinstance(value, _PLAIN):
            continue  # pydantic takes longer to tell what is no model
        if isinstance(value, BaseModel):
            yield from unknown_fields(value, f"{at}{name}.")
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, BaseModel):
                    yield from unknown_fields(item, f"{at}{name}.")


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


def wrong_together(field: str, message: str) -> PydanticCustomError:
    """Return the error of a validator that finds `field` in conflict with another field."""
    # pydantic formats the message as a template: ours goes in as a value, so braces stay.
    return PydanticCustomError("combination", "{message}", {"field": field, "message": message})
