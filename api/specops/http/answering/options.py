"""Base classes of all request bodies, and the options that every generating endpoint takes.

Each protocol's body says in its own field names what the engine is asked for; `EngineOptions` is
the one view that the rest of the server has of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from specops.http.answering.body import Some, Text, TokenId, conflict
from specops.http.answering.constraints import Constraints
from specops.request import DrafterName, SamplingParams
from specops.sampling_defaults import RANGES, SamplingDefaults

_MAX_BIASES = 300
_MAX_DIGITS = 12  # of a number that is read: tokens have fewer
# Samplers of other servers, and their values that ask for nothing.
_NO_SAMPLERS: dict[str, tuple[Any, ...]] = {"typical_p": (None, 1), "top_n_sigma": (None, -1, 0)}
NEVER = -1e9  # what `false` adds to a logit: a number, since one with a grammar must stay finite


def _by_token(biases: object) -> object:
    """Return biases by number or text, of OpenAI's object or llama-server's list of pairs."""
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
    if not (-100 <= bias <= 100 or bias == NEVER):
        raise ValueError("must be from -100 to 100, or false")
    return bias


_BIAS = {"anyOf": [{"type": "number", "minimum": -100, "maximum": 100}, {"const": False}]}
_TOKEN = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "maxLength": 256}]}
_PAIR = {"type": "array", "prefixItems": [_TOKEN, _BIAS], "minItems": 2, "maxItems": 2}
_BIASES = {"type": "object", "additionalProperties": _BIAS, "maxProperties": _MAX_BIASES}
_PAIRS = {"type": "array", "items": _PAIR, "maxItems": _MAX_BIASES}
Biases = Annotated[
    dict[
        TokenId | Annotated[Text, Field(max_length=256)],
        Annotated[float, AfterValidator(_bias)],
    ],
    BeforeValidator(_by_token),
    WithJsonSchema({"anyOf": [_BIASES, _PAIRS]}),
]
StopString = Annotated[Text, Field(min_length=1, max_length=256)]
# OpenAI takes 4; editors that complete code and clients of Ollama send more.
MAX_STOPS = 64


def not_zero(tokens: int) -> int:
    """Refuse 0, which would be no limit of anything."""
    if tokens == 0:
        raise ValueError("must be at least 1, or -1 for as many as the server allows")
    return tokens


# -1 and -2 are llama-server's and Ollama's words for "no limit".
MostTokens = Annotated[
    int,
    Field(ge=-2),
    AfterValidator(not_zero),
    WithJsonSchema({"type": "integer", "minimum": -2, "not": {"const": 0}}),
]


# Empty strings are left out: every text ends in one, so nobody means them.
_Stop = Annotated[Text, Field(max_length=256)]
StopList = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
Stops = _Stop | StopList


def sampling_field(name: str, description: str, default: float | None = None) -> Any:
    """Return a field that says how to draw tokens, in the range that models' defaults have, too.

    Args:
        name: of the parameter, in `RANGES`.
        description: for the documentation.
        default: None: the model's own.
    """
    allowed = RANGES[name]
    least, above = (allowed.low, None) if allowed.included else (None, allowed.low)
    return Field(default, ge=least, gt=above, le=allowed.high, description=description)


class EngineOptions(Constraints):
    """The options that all generating endpoints take.

    Attributes:
        limit_field: name of the field with the most tokens of an answer.
        penalty_fields: names of `repetition_penalty`; the first one that is set counts.
        bans_ends: `ignore_eos` forbids the tokens that end an answer, as llama-server does; else
            the answer goes on behind them.
        default_sampling: how tokens are sampled where neither body nor model says it.
    """

    limit_field: ClassVar[str] = ""
    penalty_fields: ClassVar[tuple[str, ...]] = ("repetition_penalty",)
    bans_ends: ClassVar[bool] = False
    default_sampling: ClassVar[SamplingDefaults] = SamplingDefaults(temperature=1.0)
    neutral_values = _NO_SAMPLERS

    temperature: float | None = sampling_field(
        "temperature",
        "0: always the likeliest token; default of this and the other sampling fields: the "
        "model's (`sampling` in GET /v1/models), or else the protocol's",
    )
    top_p: float | None = sampling_field(
        "top_p", "sample from the likeliest tokens whose probabilities add up to this"
    )
    stream: bool | None = Field(False, description="server-sent events, one per step")
    k_draft: int | None = Field(
        None,
        ge=0,
        description="maximum draft tokens per step; default: the server's (8; 3 if not adaptive)",
    )
    drafter: DrafterName | None = Field(
        None, description="the drafter that proposes draft tokens; default: the server's"
    )
    adaptive: bool | None = Field(
        None,
        description="use fewer draft tokens, or none, where that is faster; false: "
        "always as many as there are, up to k_draft; default: the server's (true)",
    )
    top_k: int | None = Field(
        None, ge=-1, description="sample from the k likeliest tokens only; 0 or -1: from all"
    )
    min_p: float | None = sampling_field(
        "min_p", "minimum probability, as a share of the likeliest token's"
    )
    presence_penalty: float | None = sampling_field(
        "presence_penalty", "subtracted from the logits of tokens in the answer"
    )
    frequency_penalty: float | None = Field(
        0.0, ge=-2, le=2, description="subtracted from them for each time that they occur"
    )
    repetition_penalty: float | None = sampling_field(
        "repetition_penalty", "divides the logits of tokens in prompt and answer; 1: none"
    )
    logit_bias: Biases | None = Field(
        None,
        description="added to the logits of tokens, each by its number or a text, all of whose "
        "tokens it is added to; false: never; as an object, or a list of pairs",
    )
    bad_words: Annotated[list[StopString], Field(max_length=64)] | None = Field(
        default=[], description="texts whose tokens never occur in the answer in sequence"
    )
    allowed_token_ids: Some[TokenId] | None = Field(
        None, description="the only tokens that the answer may have"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = Field(
        default=[], description="tokens that end the output and are part of it"
    )
    min_tokens: int | None = Field(
        0, ge=0, description="minimum number of tokens before an end token"
    )
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
        """Tokens to report for each position, instead of the likeliest."""
        return ()

    @property
    def prompt_top(self) -> int | None:
        """Number of likeliest tokens to report for each token of the prompt; None: nothing."""
        return None

    @property
    def includes_stop(self) -> bool:
        """The stop string that ends an answer is a part of it."""
        return False

    @property
    def scheduling(self) -> dict[str, Any]:
        """Fields of `GenerationRequest`: when the request leaves the queue, when its answer ends.

        Prompts that are only computed, for the requests after them, leave the queue last.
        """
        return {"priority": int(self.limit == 0 and self.prompt_top is None)}

    @property
    def streams(self) -> bool:
        """The answer is a stream."""
        return bool(self.stream)

    def choice_seed(self, choice: int) -> int | None:
        """Return the seed of one of the choices."""
        return None

    def drawing(self, model: SamplingDefaults) -> SamplingDefaults:
        """Return how tokens are drawn: as the body says, else the model, else the protocol."""
        penalties = (getattr(self, name) for name in self.penalty_fields)
        penalty = next((value for value in penalties if value is not None), None)
        requested = SamplingDefaults(
            *(self.temperature, self.top_k, self.top_p, self.min_p, penalty, self.presence_penalty)
        )
        chosen = requested.over(model).over(self.default_sampling)
        return chosen if chosen.temperature else requested._replace(temperature=0.0)

    def sampling(self, choice: int, model: SamplingDefaults) -> SamplingParams:
        """Return how the tokens of one choice are drawn, without biases and bad words.

        Those are texts; the endpoint adds them when it has the tokenizer.
        """
        drawing = self.drawing(model)
        return SamplingParams(
            temperature=drawing.temperature or 0.0,
            top_k=max(0, drawing.top_k or 0),
            top_p=drawing.top_p or 1.0,
            seed=self.choice_seed(choice),
            grammar=self.grammar,
            min_p=drawing.min_p or 0.0,
            presence_penalty=drawing.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=drawing.repetition_penalty or 1.0,
        )


class SeededOptions(EngineOptions):
    """Options with a seed and stop strings, by the names that most protocols share."""

    seed: int | None = Field(
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
        """Return the seed of one of the choices; the engine takes no negative ones."""
        return None if self.seed is None else (self.seed + choice) % (1 << 63)


class ReportingOptions(SeededOptions):
    """Options with llama-server's reports of how far a stream is."""

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
        """Fields of `GenerationRequest`, with what its outputs report."""
        reports = {
            "step_stats": self.streams and bool(self.timings_per_token),
            "prompt_progress": self.streams and bool(self.return_progress),
        }
        return super().scheduling | reports
