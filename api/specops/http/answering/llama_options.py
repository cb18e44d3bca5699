"""llama.cpp's sampling options, which its own server and Ollama take.

A fraction is cut off where a whole number is expected, and a number beyond the sensible ones means
what llama.cpp makes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from specops.http.answering.options import SeededOptions

_LARGEST = (1 << 63) - 1
_LEAST = 1e-9  # of a share that is above 0: the likeliest token alone stays


def _numbers(change: Callable[[Any], Any]) -> BeforeValidator:
    """Change numbers; anything else is left to be refused, NaN too."""

    def changed(value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool) and value == value  # noqa: PLR0124
        return change(value) if number else value

    return BeforeValidator(changed)


def _within(low: float, high: float) -> BeforeValidator:
    return _numbers(lambda value: min(max(value, low), high))


_NUMBER, _FINITE = WithJsonSchema({"type": "number"}), Field(allow_inf_nan=False)
Whole = Annotated[
    int, _numbers(lambda value: int(min(max(value, -_LARGEST - 1), _LARGEST))), _NUMBER
]
_Temperature = Annotated[float, _FINITE, _within(0, 100), _NUMBER]
_Share = Annotated[float, _FINITE, _within(_LEAST, 1), _NUMBER]
_Subtracted = Annotated[float, _FINITE, _within(-100, 100), _NUMBER]
# llama.cpp divides by it; nobody who sends 0 means that.
_Divisor = Annotated[
    float,
    _FINITE,
    _numbers(lambda value: min(max(value, 0.01), 100) if value > 0 else 1.0),
    _NUMBER,
]


class LlamaOptions(SeededOptions):
    """How tokens are drawn, in llama.cpp's names and ranges."""

    penalty_fields = ("repeat_penalty", "repetition_penalty")

    seed: Whole | None = Field(None, description="same seed, same output; negative: none")
    temperature: _Temperature | None = Field(
        None, description="0 or less: always the likeliest token"
    )
    top_k: Whole | None = Field(
        None, description="sample from the k likeliest tokens only; 0 or less: from all"
    )
    top_p: _Share | None = Field(
        None,
        description="sample from the likeliest tokens whose probabilities add up to this; 0: the "
        "likeliest",
    )
    min_p: Annotated[float, _FINITE, _within(0, 1), _NUMBER] | None = Field(
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
        0.0, description="subtracted from them for each time that they occur"
    )

    def choice_seed(self, choice: int) -> int | None:
        """Return the seed of one of the choices; a negative one means that there is none."""
        return None if (self.seed or 0) < 0 else super().choice_seed(choice)
