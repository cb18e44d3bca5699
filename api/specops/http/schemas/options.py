"""What may be chosen with every request, whichever API it comes through."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which no encoding of text can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at position {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
StopString = Annotated[Text, Field(min_length=1, max_length=256)]
Stops = StopString | Annotated[list[StopString], Field(max_length=4)]

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)


class EngineOptions(BaseModel):
    """Options that OpenAI's API does not have: drafter, draft tokens, how tokens are drawn."""

    model_config = STRICT

    k_draft: int | None = Field(
        None,
        ge=0,
        description="most draft tokens per step; default: the server's (8; 3 where not adaptive)",
    )
    drafter: Literal["draft", "ngram", "ngram_cache", "cascade", "none"] | None = Field(
        None, description="the drafter that proposes draft tokens; default: the server's"
    )
    share_ngrams: bool = Field(
        True,
        description="false: neither draft from what other requests said nor let them draft from "
        "this one: `ngram` in place of `ngram_cache`",
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
    top_k: int = Field(0, ge=0, description="draw from the k likeliest tokens only; 0: from all")
    ignore_eos: bool = Field(False, description="go on after an end token")


def listed(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings, however many were given."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
