"""What may be chosen with every request, whichever API it comes through."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from specops.request import FORMER_DRAFTERS, DrafterName, Grammar, GrammarKind, SamplingParams


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which no encoding of text can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at position {error.start}") from None
    return text


def _current(drafter: object) -> object:
    """The name that a drafter has now."""
    return FORMER_DRAFTERS.get(drafter, drafter) if isinstance(drafter, str) else drafter


Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[Text, Field(min_length=1, max_length=256)]
Stops = StopString | Annotated[list[StopString], Field(max_length=4)]

STRICT = ConfigDict(extra="allow", strict=True, frozen=True)


class Body(BaseModel):
    """Fields that a client sends. Those that there are not are kept apart: see `unknown_fields`.

    Attributes:
        without_effect: fields that concern other services alone.
    """

    model_config = STRICT
    without_effect: ClassVar[frozenset[str]] = frozenset()


def unknown_fields(body: BaseModel, at: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the fields that a body has besides those that there are; items of lists share a name.

    Returns:
        Each with whether it is known to be without effect.
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
    """Return what a validator of a whole request raises, with the field that is to blame."""
    # The message is a template of pydantic's, with nothing to fill in.
    return PydanticCustomError("combination", "{message}", {"field": field, "message": message})


class AnyText(Body):
    """No constraint."""

    type: Literal["text"]


class JsonObject(Body):
    """Some JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema, as OpenAI wraps it."""

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
    """What all endpoints that generate take: drafter, draft tokens, how tokens are chosen."""

    k_draft: int | None = Field(
        None,
        ge=0,
        description="most draft tokens per step; default: the server's (8; 3 where not adaptive)",
    )
    drafter: Annotated[DrafterName, BeforeValidator(_current)] | None = Field(
        None,
        description="the drafter that proposes draft tokens; default: the server's; `ngram` and "
        "`ngram_cache` are taken for `suffix`",
    )
    share_ngrams: bool = Field(
        True,
        description="accepted and without effect: requests draw on what earlier ones said as far "
        "as the server's prefix cache is shared, by default each client's on its own",
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
        0.0, ge=0, le=1, description="draw from tokens with this share of the likeliest's chance"
    )
    typical_p: float | None = Field(
        1.0, gt=0, le=1, description="draw from the most typical tokens that sum to this"
    )
    top_n_sigma: float | None = Field(
        0.0,
        ge=0,
        description="draw from logits within so many standard deviations of the largest; 0: all",
    )
    presence_penalty: float | None = Field(
        0.0, ge=-2, le=2, description="taken off the logits of tokens that the answer has"
    )
    frequency_penalty: float | None = Field(
        0.0, ge=-2, le=2, description="taken off them for each time that it has them"
    )
    repetition_penalty: float | None = Field(
        1.0, gt=0, le=10, description="divides the logits of tokens of the prompt and the answer"
    )
    logit_bias: Annotated[dict[Text, Bias], Field(max_length=300)] | None = Field(
        None, description="added to logits, by token: its number, or a text that is one token"
    )
    bad_words: Annotated[list[StopString], Field(max_length=64)] | None = Field(
        default=[], description="texts whose tokens the answer has not in a row"
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

    def drawn(
        self, temperature: float | None, top_p: float | None, seed: int | None = None
    ) -> SamplingParams:
        """How tokens are chosen; what is said in texts is added where they become tokens."""
        return SamplingParams(
            temperature=1.0 if temperature is None else temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if top_p is None else top_p,
            seed=seed,
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
        """The field that constrains the answer."""
        return next(iter(self._constraints()), None)

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the answer follows."""
        if isinstance(self.response_format, JsonBySchema):
            return json_grammar(self.response_format.json_schema.json_schema)
        if isinstance(self.response_format, JsonObject):
            return ANY_OBJECT
        if self.guided_json is not None:
            return json_grammar(self.guided_json)
        if self.guided_choice is not None:
            return Grammar(GrammarKind.CHOICE, orjson.dumps(self.guided_choice).decode())
        texts = {GrammarKind.REGEX: self.guided_regex, GrammarKind.LARK: self.guided_grammar}
        found = (Grammar(kind, text) for kind, text in texts.items() if text is not None)
        return next(found, None)

    def _constraints(self) -> list[str]:
        """The fields that constrain the answer."""
        found = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if isinstance(self.response_format, JsonObject | JsonBySchema):
            found.insert(0, "response_format")
        return found


def json_grammar(schema: Any) -> Grammar:
    """The grammar of the JSON that a schema, or its text, describes.

    Raises:
        orjson.JSONEncodeError: it is nested too deeply.
    """
    # Properties come in the order in which the schema has them.
    text = schema if isinstance(schema, str) else orjson.dumps(schema).decode()
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def listed(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings, however many were given."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
