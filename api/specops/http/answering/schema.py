"""Parts of request bodies: their base class, and the options of all generating endpoints.

Each protocol's body has its own names for the engine's options; the rest of the server sees all
bodies as `EngineOptions`. Fields that constrain an answer's form have the names of several servers:
OpenAI's, vLLM's old and new ones, llama.cpp's. llama.cpp's options, in its server and in Ollama,
follow llama.cpp: whole numbers lose a fraction, and a number out of range has llama.cpp's meaning.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args

import orjson
from annotated_types import GroupedMetadata
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from specops import synonyms
from specops.http.errors import InvalidField
from specops.http.state import Context
from specops.request import DrafterName, Grammar, GrammarKind, SamplingParams
from specops.sampling_defaults import RANGES, SamplingDefaults
from specops.text.grammar_source import IgnoredKeyword
from specops.text.json_values import dumps, writable

# -- bodies ----------------------------------------------------------------------------------------


def _encodable(text: str) -> str:
    """Refuse an unpaired surrogate, which JSON can spell but no encoding of text can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"unpaired surrogate at position {error.start}") from None
    return text


def _numbers(change: Callable[[Any], Any]) -> BeforeValidator:
    """Change numbers; leave everything else, NaN too, to be refused."""

    def changed(value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool) and value == value  # noqa: PLR0124
        return change(value) if number else value

    return BeforeValidator(changed)


Text = Annotated[str, AfterValidator(_encodable)]
FreeObject = Annotated[dict[str, Any], AfterValidator(writable)]
# Languages with one kind of number may write 5 as 5.0.
WHOLE = _numbers(lambda value: int(value) if value % 1 == 0 else value)
Integer = Annotated[int | None, WHOLE]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]


_Item = TypeVar("_Item")
MAX_TOOLS = 1 << 10  # of one request
# The first wrong item ends the check: 400,000 messages, in 1 MB, would take 4 s to list.
Items = Annotated[list[_Item], Field(fail_fast=True)]
Some = Annotated[list[_Item], Field(min_length=1, fail_fast=True)]
Tools = Annotated[list[_Item], Field(max_length=MAX_TOOLS, fail_fast=True)]


def _has_token(prompt: list[int | str]) -> list[int | str]:
    if not any(isinstance(item, int) for item in prompt):  # texts alone are several prompts
        raise PydanticCustomError("tokens_type", "Input should be a list with a token in it")
    return prompt


# One prompt, of tokens and texts in a row.
MixedPrompt = Annotated[Some[TokenId | Text], AfterValidator(_has_token)]

STRICT = ConfigDict(extra="allow", strict=True, frozen=True)


class Unsupported(GroupedMetadata):
    """Marks a field that this server does not support: only values without effect are accepted."""

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
    """A JSON object from a client. Unknown fields are kept separately: see `unknown_fields`.

    Attributes:
        ignored_fields: names of unknown fields that only concern other services. They are ignored
            even if the settings refuse unknown fields.
        neutral_values: by name, values of unknown fields that have no effect, like null.
    """

    model_config = STRICT
    ignored_fields: ClassVar[frozenset[str]] = frozenset()
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


@cache
def _model_fields(kind: type[Any]) -> tuple[str, ...] | None:
    """Return the names of a model's fields that may hold models; None: the class is no model."""
    if not issubclass(kind, BaseModel):
        return None
    return tuple(name for name, field in kind.model_fields.items() if _holds(field.annotation))


def _holds(annotation: Any) -> bool:
    """Return whether a value of this type may be or contain a model."""
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
                    if value is not None and value not in neutral.get(name, ()):
                        yield at + name, known and name in part.ignored_fields
            for name in names:
                value = part.__dict__[name]
                if value is not None and type(value) is not str:  # most have texts
                    found.append((f"{at}{name}.", value if type(value) is list else [value]))


def names_of(field: str) -> AliasChoices:
    """Return all names that clients use for a field, for its `validation_alias`."""
    return AliasChoices(field, *synonyms.FIELDS[field])


def known_fields(body: BaseModel) -> dict[str, Any]:
    """Return a body's fields by their JSON names, without unknown ones."""
    return body.model_dump(by_alias=True, include=set(type(body).model_fields))


def listed(prompt: Any) -> list[Any]:
    """Return one or several prompts as a list; a list with a token in it is one prompt."""
    several = isinstance(prompt, list) and not any(isinstance(item, int) for item in prompt)
    return prompt if several else [prompt]


def absent(value: object) -> bool:
    """Return whether to leave a field out of an answer, as the official services do."""
    return value is None


def conflict(field: str, message: str) -> PydanticCustomError:
    """Return a validator's error for a field that conflicts with another one."""
    # pydantic treats the message as a template: as a value, ours keeps its braces.
    return PydanticCustomError("combination", "{message}", {"field": field, "message": message})


# -- constraints -----------------------------------------------------------------------------------

Schema = FreeObject | Text
Choices = Some[Text]


class AnyText(Body):
    """No constraint."""

    type: Literal["text"]


class JsonObject(Body):
    """Any JSON object, or, as in llama.cpp's server, one that follows a schema."""

    type: Literal["json_object"]
    json_schema: FreeObject | None = Field(None, alias="schema")

    @property
    def grammar(self) -> Grammar:
        """The grammar of the object; an empty schema counts as none."""
        return json_grammar(self.json_schema) if self.json_schema else ANY_OBJECT


class NamedSchema(Body):
    """A JSON schema in OpenAI's wrapper."""

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
        """The schema's grammar."""
        return json_grammar(self.json_schema, strict=bool(self.strict))


class JsonBySchema(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    @model_validator(mode="before")
    @classmethod
    def _schema_beside_type(cls, form: Any) -> Any:
        """Accept llama-server's form, too: the fields of `json_schema` next to `type`."""
        if isinstance(form, dict) and "schema" in form and "json_schema" not in form:
            fields = {name: value for name, value in form.items() if name != "type"}
            return {"type": form.get("type"), "json_schema": fields}
        return form

    @property
    def grammar(self) -> Grammar:
        """The schema's grammar."""
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
        """The grammars of the fields that are set: one."""
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
        """The fields that constrain the answer, with their grammars; more than one is refused."""
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
    """Return the grammar of JSON that follows a schema.

    Args:
        schema: the schema, or its text.
        strict: whether to refuse keywords that cannot be enforced.
    """
    # Properties come in the schema's order.
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


# -- options of all endpoints ----------------------------------------------------------------------

_MAX_BIASES = 300
_MAX_DIGITS = 12  # read of a number: tokens have fewer
_LEAST_SHARE = 1e-9  # stands for 0, as the likeliest token alone exceeds it
NEVER = -1e9  # added to a logit for `false`; finite, because logits under a grammar must be


def _by_token(biases: object) -> object:
    """Return biases by number or text, from OpenAI's object or llama-server's list of pairs."""
    if not isinstance(biases, dict | list):
        return biases
    if len(biases) > _MAX_BIASES:  # pydantic counts after it has checked all of them
        raise ValueError(f"at most {_MAX_BIASES} tokens")
    pairs: list[Any]
    if isinstance(biases, dict):
        pairs = [(_number(name), bias) for name, bias in biases.items()]
    else:
        pairs = [pair for pair in biases if isinstance(pair, list) and len(pair) == 2]
        if len(pairs) < len(biases) or any(isinstance(token, list | dict) for token, _ in pairs):
            raise ValueError("must be an object, or a list of pairs of a token and its bias")
    return {token: NEVER if bias is False else bias for token, bias in pairs}


def _number(name: str) -> int | str:
    return int(name[:_MAX_DIGITS]) if name.isdecimal() else name


def _bias(bias: float) -> float:
    return bias if bias == NEVER else min(max(bias, -100.0), 100.0)


_BIAS = {"anyOf": [{"type": "number"}, {"const": False}]}
_TOKEN = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "maxLength": 256}]}
_PAIR = {"type": "array", "prefixItems": [_TOKEN, _BIAS], "minItems": 2, "maxItems": 2}
_BIASES = {"type": "object", "additionalProperties": _BIAS, "maxProperties": _MAX_BIASES}
_PAIRS = {"type": "array", "items": _PAIR, "maxItems": _MAX_BIASES}
Biases = Annotated[
    dict[
        TokenId | Annotated[Text, Field(max_length=256)],
        Annotated[float, Field(allow_inf_nan=False), AfterValidator(_bias)],
    ],
    BeforeValidator(_by_token),
    WithJsonSchema({"anyOf": [_BIASES, _PAIRS]}),
]
StopString = Annotated[Text, Field(min_length=1, max_length=256)]
# OpenAI takes 4; editors that complete code and clients of Ollama send more.
MAX_STOPS = 64


def _not_zero(tokens: int) -> int:
    """Refuse 0, which makes no sense as a limit."""
    if tokens == 0:
        raise ValueError("must be at least 1, or -1 for as many as the server allows")
    return tokens


# -1 and -2 mean "no limit" to llama-server and Ollama.
MostTokens = Annotated[
    int,
    Field(ge=-2),
    AfterValidator(_not_zero),
    WHOLE,
    WithJsonSchema({"type": "integer", "minimum": -2, "not": {"const": 0}}),
]


# Empty strings are ignored: every text ends with one, so nobody means them.
_Stop = Annotated[Text, Field(max_length=256)]
StopList = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
Stops = _Stop | StopList


def sampling_field(name: str, description: str, default: float | None = None) -> Any:
    """Return a field for a sampling parameter, with the same range as models' defaults.

    Args:
        name: the parameter's name in `RANGES`.
        description: for the documentation.
        default: the default; None: the model's.
    """
    allowed = RANGES[name]
    least, above = (allowed.low, None) if allowed.included else (None, allowed.low)
    return Field(default, ge=least, gt=above, le=allowed.high, description=description)


class EngineOptions(Constraints):
    """The options of all generating endpoints.

    Attributes:
        limit_field: name of the field with the maximum tokens of an answer.
        penalty_fields: names of `repetition_penalty`; the first one that is set counts.
        bans_ends: whether `ignore_eos` forbids end tokens, as in llama-server; otherwise the answer
            continues after them.
        default_sampling: sampling parameters that neither body nor model sets.
    """

    limit_field: ClassVar[str] = ""
    penalty_fields: ClassVar[tuple[str, ...]] = ("repetition_penalty",)
    bans_ends: ClassVar[bool] = False
    default_sampling: ClassVar[SamplingDefaults] = SamplingDefaults(temperature=1.0)
    neutral_values = synonyms.SAMPLERS_OFF

    temperature: float | None = sampling_field(
        "temperature",
        "0: always the likeliest token; default of this and the other sampling fields: the "
        "model's (`sampling` in GET /v1/models), or else the protocol's",
    )
    top_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="sample from the likeliest tokens whose probabilities add up to this; 0: the "
        "likeliest",
    )
    stream: bool | None = Field(False, description="server-sent events, one per step")
    k_draft: Integer = Field(
        None,
        ge=0,
        description="maximum draft tokens per step; default: the server's (8; 3 if not adaptive)",
    )
    drafter: DrafterName | None = Field(
        None, description="the drafter that proposes draft tokens; default: the server's"
    )
    adaptive: bool | None = Field(
        None,
        description="use fewer draft tokens, or none, if that is faster; false: always as many as "
        "the drafter proposes, up to k_draft; default: the server's (true)",
    )
    top_k: Integer = Field(
        None, ge=-1, description="sample from the k likeliest tokens only; 0 or -1: from all"
    )
    min_p: float | None = sampling_field(
        "min_p", "minimum probability, as a share of the likeliest token's"
    )
    presence_penalty: float | None = sampling_field(
        "presence_penalty", "subtracted from the logits of tokens in the answer"
    )
    frequency_penalty: float | None = Field(
        0.0, ge=-2, le=2, description="subtracted from the logits for each occurrence in the answer"
    )
    repetition_penalty: float | None = sampling_field(
        "repetition_penalty", "divides the logits of tokens in prompt and answer; 1: none"
    )
    logit_bias: Biases | None = Field(
        None,
        description="-100 to 100, added to the logits of a token, by its number, or of all tokens "
        "of a text; false: never; an object or a list of pairs",
    )
    bad_words: Annotated[list[StopString], Field(max_length=64)] | None = Field(
        default=[], description="texts whose token sequences never occur in the answer"
    )
    allowed_token_ids: Some[TokenId] | None = Field(
        None, description="the only tokens that the answer may have"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = Field(
        default=[], description="tokens that end the output and are part of it"
    )
    min_tokens: Integer = Field(0, ge=0, description="minimum number of tokens before an end token")
    ignore_eos: bool | None = Field(
        False, description="continue after an end token, unless a grammar ends the answer"
    )

    @model_validator(mode="after")
    def _leaves_tokens(self) -> Self:
        for name in ("bad_words", "min_tokens"):  # together they might forbid every token
            if self.allowed_token_ids and getattr(self, name):
                raise conflict(name, "cannot be combined with `allowed_token_ids`")
        return self

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return 1

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer; None: as many as the server allows."""
        most: int | None = getattr(self, self.limit_field, None)
        return most

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return ()

    @property
    def token_logprobs(self) -> int | None:
        """Number of likeliest tokens to report for each position; None: no probabilities."""
        return None

    @property
    def logprob_tokens(self) -> Sequence[int]:
        """Tokens to report at each position, instead of the likeliest."""
        return ()

    @property
    def prompt_top(self) -> int | None:
        """Number of likeliest tokens to report for each token of the prompt; None: nothing."""
        return None

    @property
    def includes_stop(self) -> bool:
        """Whether the stop string that ends an answer is part of it."""
        return False

    @property
    def scheduling(self) -> dict[str, Any]:
        """Fields of `GenerationRequest`: when the request leaves the queue, when its answer ends.

        Prompts that are only computed for later requests leave the queue last.
        """
        return {"priority": int(self.limit == 0 and self.prompt_top is None)}

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream."""
        return bool(self.stream)

    def choice_seed(self, choice: int) -> int | None:
        """Return the seed of one of the choices."""
        return None

    def drawing(self, model: SamplingDefaults) -> SamplingDefaults:
        """Return how tokens are drawn: by the body's parameters, the model's, the protocol's."""
        penalties = (getattr(self, name) for name in self.penalty_fields)
        penalty = next((value for value in penalties if value is not None), None)
        requested = SamplingDefaults(
            *(self.temperature, self.top_k, self.top_p, self.min_p, penalty, self.presence_penalty)
        )
        chosen = requested.over(model).over(self.default_sampling)
        return chosen if chosen.temperature else requested._replace(temperature=0.0)

    def sampling(self, choice: int, model: SamplingDefaults) -> SamplingParams:
        """Return how the tokens of one choice are drawn, without biases and bad words.

        Those are texts: the endpoint adds them with the tokenizer.
        """
        drawing = self.drawing(model)
        return SamplingParams(
            temperature=drawing.temperature or 0.0,
            top_k=max(0, drawing.top_k or 0),
            top_p=1.0 if drawing.top_p is None else max(drawing.top_p, _LEAST_SHARE),
            seed=self.choice_seed(choice),
            grammar=self.grammar,
            min_p=drawing.min_p or 0.0,
            presence_penalty=drawing.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=drawing.repetition_penalty or 1.0,
        )


class SeededOptions(EngineOptions):
    """Options with a seed and stop strings, by the names of most protocols."""

    seed: Integer = Field(
        None,
        ge=-(1 << 63),
        le=(1 << 63) - 1,
        description="same seed, same output, with any drafter and under any load; "
        "choice i has seed + i",
    )
    stop: Stops | None = Field(None, description="strings that end the output; not part of it")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        return tuple(filter(None, stops))

    def choice_seed(self, choice: int) -> int | None:
        """Return the seed of one of the choices, which the engine needs not to be negative."""
        return None if self.seed is None else (self.seed + choice) % (1 << 63)


class ReportingOptions(SeededOptions):
    """Options with llama-server's reports of a stream's progress."""

    timings_per_token: bool | None = Field(
        False, description="in a stream, every event has the `timings` so far"
    )
    return_progress: bool | None = Field(
        False,
        description="a stream begins with `prompt_progress` for each part of the prompt: tokens in "
        "`total`, from the `cache` and `processed` so far, `time_ms`",
    )

    @property
    def scheduling(self) -> dict[str, Any]:
        """Fields of `GenerationRequest`, with the reports of its outputs."""
        reports = {
            "step_stats": self.streams and bool(self.timings_per_token),
            "prompt_progress": self.streams and bool(self.return_progress),
        }
        return super().scheduling | reports


# -- llama.cpp's options ---------------------------------------------------------------------------

_LARGEST = (1 << 63) - 1


def _within(low: float, high: float) -> BeforeValidator:
    return _numbers(lambda value: min(max(value, low), high))


_NUMBER, _FINITE = WithJsonSchema({"type": "number"}), Field(allow_inf_nan=False)
ClampedInteger = Annotated[
    int, _numbers(lambda value: int(min(max(value, -_LARGEST - 1), _LARGEST))), _NUMBER
]
_Temperature = Annotated[float, _FINITE, _within(0, 100), _NUMBER]
_Share = Annotated[float, _FINITE, _within(0, 1), _NUMBER]
_Subtracted = Annotated[float, _FINITE, _within(-100, 100), _NUMBER]
# llama.cpp divides by it, which nobody who sends 0 means.
_Divisor = Annotated[
    float,
    _FINITE,
    _numbers(lambda value: min(max(value, 0.01), 100) if value > 0 else 1.0),
    _NUMBER,
]


class LlamaOptions(SeededOptions):
    """Sampling options with llama.cpp's names and ranges."""

    penalty_fields = ("repeat_penalty", "repetition_penalty")

    seed: ClampedInteger | None = Field(None, description="same seed, same output; negative: none")
    temperature: _Temperature | None = Field(
        None, description="0 or less: always the likeliest token"
    )
    top_k: ClampedInteger | None = Field(
        None, description="sample from the k likeliest tokens only; 0 or less: from all"
    )
    top_p: _Share | None = Field(
        None,
        description="sample from the likeliest tokens whose probabilities add up to this; 0: the "
        "likeliest",
    )
    min_p: _Share | None = Field(
        None, description="minimum probability, as a share of the likeliest token's"
    )
    repeat_penalty: _Divisor | None = Field(
        None, description="divides the logits of tokens in prompt and answer; 0 or less, 1: none"
    )
    repetition_penalty: _Divisor | None = Field(
        None, description="another name of `repeat_penalty`"
    )
    presence_penalty: _Subtracted | None = Field(
        None, description="subtracted from the logits of tokens in the answer"
    )
    frequency_penalty: _Subtracted | None = Field(
        0.0, description="subtracted from the logits for each occurrence in the answer"
    )

    def choice_seed(self, choice: int) -> int | None:
        """Return the seed of one of the choices; a negative one means none."""
        return None if (self.seed or 0) < 0 else super().choice_seed(choice)


# -- what is ignored -------------------------------------------------------------------------------

_MAX_NAMES = 32  # in the header
_MAX_NAME = 64  # characters of a name
_MAX_PATH = 160  # characters of a path in a JSON schema; its end says most
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # and the comma, which separates the names


def ignore_unknown(ctx: Context, body: Body) -> None:
    """Note a body's unknown fields for `answer_headers`; the settings may refuse them.

    Raises:
        InvalidField: there is an unknown field, and the settings refuse it.
    """
    refuses = ctx.settings.unknown_fields == "refuse"
    names: dict[str, None] = {}
    for name, harmless in unknown_fields(body):
        short = name[:_MAX_NAME]
        if refuses and not harmless:
            field = name.partition(".")[0]
            raise InvalidField(field, f"no such field: {short}", code="unknown_parameter")
        names[short] = None
        if len(names) == _MAX_NAMES and not refuses:
            break
    ignore(ctx, names)


def ignore(ctx: Context, names: Iterable[str]) -> None:
    """Note ignored parts of the body for `answer_headers`."""
    _note(ctx, (name[:_MAX_NAME] for name in names))


def ignore_keywords(ctx: Context, ignored: Iterable[IgnoredKeyword], field: str | None) -> None:
    """Note the keywords of JSON schemas that the answer does not have to follow.

    Args:
        ctx: the HTTP request's context.
        ignored: the keywords.
        field: the field that constrains the answer's text.
    """
    _note(ctx, (_keyword(item, field or "") for item in ignored))


def answer_headers(ctx: Context) -> dict[str, str]:
    """Return the headers that name the model, and the ignored parts of the body."""
    served = {"x-served-model": ctx.served} if ctx.served.isascii() and ctx.served else {}
    return served | ({"x-ignored-fields": ", ".join(ctx.ignored)} if ctx.ignored else {})


def _note(ctx: Context, names: Iterable[str]) -> None:
    noted = dict.fromkeys(ctx.ignored)
    for name in names:
        if len(noted) == _MAX_NAMES:
            break
        noted[_UNPRINTABLE.sub("?", name) or "?"] = None  # h11 sends no empty last one
    ctx.ignored = list(noted)


def _keyword(item: IgnoredKeyword, field: str) -> str:
    name = field if item.tool is None else f"tools.{item.tool}"
    path = item.path if len(item.path) <= _MAX_PATH else "/..." + item.path[-_MAX_PATH:]
    return f"{name}#{path}"
