"""Base classes of all request bodies, and the options that every generating endpoint takes.

Each protocol's body says in its own field names what the engine is asked for; `EngineOptions` is
the one view that the rest of the server has of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import orjson
from annotated_types import GroupedMetadata
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specops.request import FORMER_DRAFTERS, DrafterName, Grammar, GrammarKind, SamplingParams


def _encodable(text: str) -> str:
    """Refuse half a surrogate pair: JSON can spell it, but no encoding of text can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at position {error.start}") from None
    return text


def _current_name(drafter: object) -> object:
    return FORMER_DRAFTERS.get(drafter, drafter) if isinstance(drafter, str) else drafter


Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[Text, Field(min_length=1, max_length=256)]
Stops = StopString | Annotated[list[StopString], Field(max_length=4)]

STRICT = ConfigDict(extra="allow", strict=True, frozen=True)


class Only(GroupedMetadata):
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
    """

    model_config = STRICT
    without_effect: ClassVar[frozenset[str]] = frozenset()


def unknown_fields(body: BaseModel, at: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the names of a body's unknown fields; the items of a list share one name.

    Yields:
        The name, and whether the field is known to be without effect.
    """
    harmless = body.without_effect if isinstance(body, Body) else frozenset()
    for name in body.model_extra or ():
        yield at + name, name in harmless
    for name in body.model_fields_set:
        value = getattr(body, name, None)
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, BaseModel):
                yield from unknown_fields(item, f"{at}{name}.")


def wrong_together(field: str, message: str) -> PydanticCustomError:
    """Return the error of a validator that finds `field` in conflict with another field."""
    # pydantic formats the message as a template: ours goes in as a value, so braces stay.
    return PydanticCustomError("combination", "{message}", {"field": field, "message": message})


class AnyText(Body):
    """No constraint."""

    type: Literal["text"]


class JsonObject(Body):
    """Some JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema with OpenAI's fields around it."""

    name: Text = Field("", description="ignored")
    description: Text | None = Field(None, description="ignored")
    json_schema: dict[str, Any] | bool = Field(alias="schema", description="local references only")
    strict: bool | None = Field(None, description="ignored: the answer always follows the schema")


class JsonBySchema(Body):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[AnyText | JsonObject | JsonBySchema, Field(discriminator="type")]
ANY_OBJECT = Grammar(GrammarKind.JSON_OBJECT, '{"type":"object"}')
_CONSTRAINTS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class EngineOptions(Body):
    """The options that all generating endpoints take.

    Attributes:
        limit_field: name of the field with the most tokens of an answer.
        strict_limit: a value above the server's limit is an error; otherwise that one applies.
    """

    limit_field: ClassVar[str] = ""
    strict_limit: ClassVar[bool] = False

    temperature: float | None = Field(1.0, ge=0, le=2, description="0: always the likeliest token")
    top_p: float | None = Field(
        1.0, gt=0, le=1, description="draw from the likeliest tokens that sum up to this"
    )
    stream: bool | None = Field(False, description="server-sent events, one per step")
    k_draft: int | None = Field(
        None,
        ge=0,
        description="most draft tokens per step; default: the server's (8; 3 where not adaptive)",
    )
    drafter: Annotated[DrafterName, BeforeValidator(_current_name)] | None = Field(
        None,
        description="the drafter that proposes draft tokens; default: the server's; `ngram` and "
        "`ngram_cache` are older names of `suffix`",
    )
    share_ngrams: bool = Field(
        True,
        description="accepted and without effect: SPECOPS_PREFIX_CACHE decides which requests use "
        "the texts of earlier requests; by default those of the same client",
    )
    adaptive: bool | None = Field(
        None,
        description="fewer draft tokens than k_draft, or none, where that is faster; false: "
        "always k_draft; default: the server's (true)",
    )
    exact: bool | None = Field(
        None,
        description="accepted and without effect: output is always bit for bit that of plain "
        "decoding, alone or beside others, where GET /v1/models says `batch_invariant`",
    )
    top_k: int | None = Field(
        0, ge=-1, description="draw from the k likeliest tokens only; 0 or -1: from all"
    )
    min_p: float | None = Field(
        0.0, ge=0, le=1, description="least probability, as a share of the likeliest token's"
    )
    typical_p: float | None = Field(
        1.0, gt=0, le=1, description="draw from the most typical tokens that sum up to this"
    )
    top_n_sigma: float | None = Field(
        0.0,
        ge=0,
        description="draw from logits within so many standard deviations of the largest; 0: all",
    )
    presence_penalty: float | None = Field(
        0.0, ge=-2, le=2, description="subtracted from the logits of tokens that the answer has"
    )
    frequency_penalty: float | None = Field(
        0.0, ge=-2, le=2, description="subtracted from them for each time that they occur"
    )
    repetition_penalty: float | None = Field(
        1.0, gt=0, le=10, description="divides the logits of tokens of the prompt and the answer"
    )
    logit_bias: Annotated[dict[Text, Bias], Field(max_length=300)] | None = Field(
        None, description="added to logits, by token: its number, or a text that is one token"
    )
    bad_words: Annotated[list[StopString], Field(max_length=64)] | None = Field(
        default=[], description="texts whose tokens never stand in the answer in a row"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = Field(
        default=[], description="tokens that end the output, as a part of it"
    )
    min_tokens: int | None = Field(0, ge=0, description="tokens before which no end token comes")
    ignore_eos: bool | None = Field(
        False, description="go on after an end token, where no grammar ends the answer"
    )
    response_format: ResponseFormat | None = Field(
        None, description="`json_object`, or `json_schema` with a schema that the answer follows"
    )
    guided_json: dict[str, Any] | Text | None = Field(
        None, description="a JSON schema that the answer follows, or its text"
    )
    guided_regex: Text | None = Field(
        None, description="a regular expression, without look-around, that the whole answer matches"
    )
    guided_choice: Annotated[list[Text], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="the answer is one of these texts"
    )
    guided_grammar: Text | None = Field(
        None, description="a Lark grammar, in llguidance's dialect, that the answer follows"
    )

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        given = self._constraints()
        if len(given) > 1:
            raise wrong_together(given[1], f"not together with `{given[0]}`")
        try:
            _ = self.grammar
        except orjson.JSONEncodeError as error:
            raise wrong_together(given[0], f"it cannot be written as JSON: {error}") from None
        return self

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return 1

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer; None: as many as the server allows."""
        found: int | None = getattr(self, self.limit_field, None)
        return found

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return ()

    @property
    def token_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token; None: no probabilities."""
        return None

    @property
    def streams(self) -> bool:
        """The answer is a stream."""
        return bool(self.stream)

    def choice_seed(self, choice: int) -> int | None:
        """Return the seed of one of the choices."""
        return None

    def sampling(self, choice: int) -> SamplingParams:
        """Return how the tokens of one choice are drawn, without biases and bad words.

        Those are texts; the endpoint adds them when it has the tokenizer.
        """
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.choice_seed(choice),
            grammar=self.grammar,
            min_p=self.min_p or 0.0,
            typical_p=self.typical_p or 1.0,
            top_n_sigma=self.top_n_sigma or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
        )

    @property
    def grammar_field(self) -> str | None:
        """Name of the field that constrains the answer."""
        return next(iter(self._constraints()), None)

    @cached_property
    def grammar(self) -> Grammar | None:
        """The grammar that the answer follows."""
        if isinstance(self.response_format, JsonBySchema):
            return json_grammar(self.response_format.json_schema.json_schema)
        if isinstance(self.response_format, JsonObject):
            return ANY_OBJECT
        if self.guided_json is not None:
            return json_grammar(self.guided_json)
        if self.guided_choice is not None:
            return Grammar(GrammarKind.CHOICE, orjson.dumps(self.guided_choice).decode())
        if self.guided_regex is not None:
            return Grammar(GrammarKind.REGEX, self.guided_regex)
        text = self.guided_grammar
        return None if text is None else Grammar(GrammarKind.LARK, text)

    def _constraints(self) -> list[str]:
        """Return the names of the fields that constrain the answer."""
        found = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if isinstance(self.response_format, JsonObject | JsonBySchema):
            found.insert(0, "response_format")
        return found


class SeededOptions(EngineOptions):
    """Options with a seed and stop strings, by the names that most protocols share."""

    seed: int | None = Field(
        None,
        ge=-(1 << 63),
        le=(1 << 63) - 1,
        description="same seed, same output, with any drafter and beside any other requests; "
        "choice i has seed + i",
    )
    stop: Stops | None = Field(None, description="strings that end the output; not part of it")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def choice_seed(self, choice: int) -> int | None:
        """Return the seed of one of the choices; the engine takes no negative ones."""
        return None if self.seed is None else (self.seed + choice) % (1 << 63)


def json_grammar(schema: Any) -> Grammar:
    """Return the grammar of the JSON that a schema, or its text, describes.

    Raises:
        orjson.JSONEncodeError: the schema is nested too deeply.
    """
    # Properties come in the order in which the schema has them.
    text = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    return Grammar(GrammarKind.JSON_SCHEMA, text)
