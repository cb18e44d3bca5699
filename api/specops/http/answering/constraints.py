"""Fields that constrain an answer's form: JSON schemas, regular expressions, choices, grammars.

They have the names of several servers: OpenAI's, vLLM's old and new ones, llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import Field, model_validator

from specops import synonyms
from specops.http.answering.body import Body, FreeObject, Some, Text, conflict
from specops.request import Grammar, GrammarKind
from specops.text.json_values import dumps

Schema = FreeObject | Text
Choices = Some[Text]


class AnyText(Body):
    """No constraint."""

    type: Literal["text"]


class JsonObject(Body):
    """Some JSON object, or, as llama.cpp's server has it, one that a schema describes."""

    type: Literal["json_object"]
    json_schema: FreeObject | None = Field(None, alias="schema")

    @property
    def grammar(self) -> Grammar:
        """The grammar of the object."""
        return ANY_OBJECT if self.json_schema is None else json_grammar(self.json_schema)


class NamedSchema(Body):
    """A JSON schema with OpenAI's fields around it."""

    name: Text = Field("", description="ignored")
    description: Text | None = Field(None, description="ignored")
    json_schema: FreeObject | bool = Field(alias="schema", description="local references only")
    strict: bool | None = Field(
        None,
        description="refuse keywords that cannot be enforced; otherwise they are left out, and the "
        "header X-Ignored-Fields names them",
    )

    @property
    def grammar(self) -> Grammar:
        """The grammar of what the schema describes."""
        return json_grammar(self.json_schema, strict=bool(self.strict))


class JsonBySchema(Body):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    @model_validator(mode="before")
    @classmethod
    def _schema_beside_type(cls, form: Any) -> Any:
        """Accept llama-server's form, too: the fields of `json_schema` next to `type`."""
        if isinstance(form, dict) and "schema" in form and "json_schema" not in form:
            beside = {name: value for name, value in form.items() if name != "type"}
            return {"type": form.get("type"), "json_schema": beside}
        return form

    @property
    def grammar(self) -> Grammar:
        """The grammar of what the schema describes."""
        return self.json_schema.grammar


ANY_OBJECT = Grammar(GrammarKind.JSON_OBJECT, '{"type":"object"}')
ResponseFormat = Annotated[AnyText | JsonObject | JsonBySchema, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's newer form of `guided_json` and the others: one of these fields."""

    ignored_fields = frozenset({"whitespace_pattern", "disable_any_whitespace"})

    json_schema: Schema | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = Field(None, description="Lark, in llguidance's dialect, or GBNF")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        for name in (self.model_extra or {}).keys() - self.ignored_fields:
            raise conflict("structured_outputs", f"this server has no {name[:64]!r}")
        if len(self.grammars) != 1:
            message = "needs exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`"
            raise conflict("structured_outputs", message)
        return self

    @cached_property
    def grammars(self) -> list[Grammar]:
        """The grammar of each of the fields; there is one."""
        objects = [ANY_OBJECT] if self.json_object else []
        values = {name: getattr(self, name) for name in ("regex", "choice", "grammar")}
        values = {"json": self.json_schema, **values}
        return objects + [
            _MAKERS[name](value) for name, value in values.items() if value is not None
        ]


class Constraints(Body):
    """The fields of all generating endpoints that constrain the answer."""

    response_format: ResponseFormat | None = Field(
        None,
        description="`json_object`, with a `schema` or without, or `json_schema` with a schema "
        "that the answer follows",
    )
    json_schema: Schema | None = Field(None, description="another name of `guided_json`")
    guided_json: Schema | None = Field(
        None, description="a JSON schema that the answer follows, or its text"
    )
    guided_regex: Text | None = Field(
        None, description="a regular expression, without look-around, that the whole answer matches"
    )
    guided_choice: Choices | None = Field(None, description="the answer is one of these texts")
    guided_grammar: Text | None = Field(
        None,
        description="a grammar that the answer follows: Lark, in llguidance's dialect, or "
        "llama.cpp's GBNF",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM's newer form of `guided_json` and the others"
    )
    gbnf: Text | None = Field(
        None, alias="grammar", description="llama-server's name of `guided_grammar`; empty: none"
    )

    @model_validator(mode="after")
    def _known_constraints(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            guided = name.startswith("guided_") and name not in synonyms.FORM_ONLY
            if (guided or name in synonyms.CONSTRAINING) and value not in _NEUTRAL:
                raise conflict(name[:64], "this server does not support it")
        return self

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        names = list(self.constraints)
        if len(names) > 1:
            raise conflict(names[1], f"cannot be combined with `{names[0]}`")
        return self

    @property
    def grammar_field(self) -> str | None:
        """Name of the field that constrains the answer."""
        return next(iter(self.constraints), None)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the answer follows."""
        return next(iter(self.constraints.values()), None)

    @cached_property
    def constraints(self) -> dict[str, Grammar]:
        """Each field that constrains the answer, and its grammar; two of them are refused."""
        by_field = {}
        if isinstance(self.response_format, JsonObject | JsonBySchema):
            by_field["response_format"] = self.response_format.grammar
        for name, form in synonyms.CONSTRAINTS.items():
            if (value := getattr(self, name)) is not None:
                by_field[name] = _MAKERS[form](value)
        if self.gbnf:
            by_field["grammar"] = _MAKERS["grammar"](self.gbnf)
        if self.structured_outputs is not None:
            (by_field["structured_outputs"],) = self.structured_outputs.grammars
        return by_field


_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})


def json_grammar(schema: Any, *, strict: bool = False) -> Grammar:
    """Return the grammar of the JSON that a schema, or its text, describes.

    Args:
        strict: refuse keywords that cannot be enforced.
    """
    # Properties come in the order in which the schema has them.
    text = schema if isinstance(schema, str) else dumps(schema).decode()
    return Grammar(GrammarKind.JSON_SCHEMA, text, strict=strict)


def _choice(texts: list[str]) -> Grammar:
    return Grammar(GrammarKind.CHOICE, orjson.dumps(texts).decode())


_MAKERS: dict[str, Callable[[Any], Grammar]] = {
    "json": json_grammar,
    "regex": partial(Grammar, GrammarKind.REGEX),
    "choice": _choice,
    "grammar": partial(Grammar, GrammarKind.LARK),
}
