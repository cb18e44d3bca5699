"""POST /v1/embeddings: texts to vectors, in OpenAI's protocol."""

from __future__ import annotations

import base64
from itertools import starmap
from typing import Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from specops.http.answering.answers import list_answer
from specops.http.answering.body import Body, Text, TokenId
from specops.http.answering.embed import Vector, embed
from specops.http.answering.served_model import check_model
from specops.http.errors import InvalidField
from specops.http.protocol import Prompt, Protocol
from specops.http.protocols.openai.common import ERRORS
from specops.http.state import Ctx
from specops.text.json_values import dumps

MOST_INPUTS = 2048  # OpenAI's own bound
_Text = Annotated[Text, Field(min_length=1)]
_Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Texts = Annotated[list[_Text], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]
_TokenLists = Annotated[list[_Tokens], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]


class EmbeddingRequest(Body):
    """One or several texts to embed, as text or as tokens."""

    without_effect = frozenset({"user"})

    model: str = Field(description="as in GET /v1/models")
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


PATH = "/v1/embeddings"
router = APIRouter(tags=["openai"])
PROTOCOL = Protocol(
    router=router,
    prefixes=(PATH,),
    prompts={PATH: Prompt("input", "embeddings")},
    links={"embeddings": PATH},
    too_long_message="This model's maximum context length is {context} tokens, however you "
    "requested {prompt} tokens ({prompt} in your prompt; 0 for the completion). Please "
    "reduce your prompt; or completion length. (context_length_exceeded)",
)


@router.post(PATH, response_model=EmbeddingList, responses=ERRORS)
async def embeddings(body: EmbeddingRequest, ctx: Ctx) -> Response:
    """Embed one or several texts: the mean of the model's last hidden states, of length 1."""
    engine = check_model(ctx, body.model)
    own = engine.info.embedding_size
    if own and body.dimensions not in (None, own):
        message = f"this model's embeddings have {own} dimensions and cannot be shortened"
        raise InvalidField("dimensions", message)
    generation, vectors, tokens = await embed(ctx, body, body.inputs, body.input)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}

    def item(index: int, vector: Vector) -> bytes:
        as_base64 = body.encoding_format == "base64"
        entries = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector
        return dumps({"object": "embedding", "index": index, "embedding": entries})

    rest = {"object": "list", "model": engine.info.name, "usage": usage}
    return list_answer(rest, "data", starmap(item, enumerate(vectors)), generation.headers)
