"""Bodies of OpenAI's POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from specops.http.schemas.body import Body, Text, TokenId

MOST_INPUTS = 2048  # OpenAI's own bound
_Text = Annotated[Text, Field(min_length=1)]
_Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Texts = Annotated[list[_Text], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]
_TokenLists = Annotated[list[_Tokens], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]


class EmbeddingRequest(Body):
    """One or several texts to embed, as text or as tokens."""

    without_effect = frozenset({"user"})

    model: str = Field(description="as GET /v1/models tells")
    input: _Text | _Tokens | _Texts | _TokenLists
    encoding_format: Literal["float", "base64"] | None = Field(
        "float", description="numbers, or the base64 of 32-bit floats, little endian"
    )
    dimensions: int | None = Field(
        None, ge=1, description="only the size that the model's embeddings have"
    )

    @property
    def inputs(self) -> list[str] | list[list[int]]:
        """The texts as a list, also where there is only one."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]
        return self.input


class Embedding(BaseModel):
    """The vector of one text; its length is 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Tokens in."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The vectors of all texts, in their order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
