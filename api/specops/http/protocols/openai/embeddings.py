"""POST /v1/embeddings, /embedding: texts to vectors, in OpenAI's and llama-server's protocols."""

import base64
from itertools import starmap
from typing import Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from specops.http.answering.prompt import Part, joined
from specops.http.answering.schema import (
    Body,
    Integer,
    MixedPrompt,
    Some,
    Text,
    listed,
    names_of,
)
from specops.http.answering.submit import BatchRoute, Vector, check_model, embed
from specops.http.answering.writer import list_answer
from specops.http.errors import InvalidField
from specops.http.protocol import Prompt, Protocol
from specops.http.protocols.openai.common import ERRORS
from specops.http.state import Ctx
from specops.text.json_values import dumps

MAX_INPUTS = 2048  # OpenAI's limit


class EmbeddingText(Body):
    """llama-server's form of a text that may have images: whole, or in parts."""

    prompt_string: Text | None = None
    content: Some[Part] | None = None

    @property
    def text(self) -> str:
        """The text.

        Raises:
            InvalidField: it is empty, or a part is not text.
        """
        if self.prompt_string is None and self.content is None:
            raise InvalidField("input", "an object needs `prompt_string` or `content`")
        return self.prompt_string or "".join(joined([part], "input") for part in self.content or ())


_Input = Text | MixedPrompt | EmbeddingText


class EmbeddingRequest(Body):
    """One or more texts to embed, as text or tokens."""

    ignored_fields = frozenset({"user"})

    model: Text | None = Field(None, description="as in GET /v1/models")
    input: (
        Text
        | EmbeddingText
        | MixedPrompt
        | Annotated[list[_Input], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    ) = Field(validation_alias=names_of("input"))
    encoding_format: Literal["float", "base64"] | None = Field(
        "float", description="numbers, or the base64 of little-endian 32-bit floats"
    )
    dimensions: Integer = Field(
        None, ge=1, description="the length of the model's embeddings; no other is supported"
    )

    @property
    def inputs(self) -> list[str | list[int | str]]:
        """The texts as a list, even if there is only one."""
        inputs = listed(self.input)
        return [item.text if isinstance(item, EmbeddingText) else item for item in inputs]


class Embedding(BaseModel):
    """A text's vector, of norm 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Tokens in."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """All texts' vectors, in order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class LlamaEmbedding(BaseModel):
    """A text's vector as llama-server returns it: in a list of one."""

    index: int
    embedding: list[list[float]]


PATH, LLAMA = "/v1/embeddings", "/embedding"
router = APIRouter(tags=["openai"], route_class=BatchRoute)
PROTOCOL = Protocol(
    router=router,
    prefixes=(PATH, LLAMA),
    prompts={path: Prompt("input", "embeddings") for path in (PATH, LLAMA)},
    too_long_message="This model's maximum context length is {context} tokens, however you "
    "requested {prompt} tokens ({prompt} in your prompt; 0 for the completion). Please "
    "reduce your prompt; or completion length: it is too large. (context_length_exceeded)",
)


@router.post(PATH, response_model=EmbeddingList, responses=ERRORS)
async def embeddings(body: EmbeddingRequest, ctx: Ctx) -> Response:
    """Embed one or more texts: the mean of the model's last hidden states, of norm 1."""
    engine = check_model(ctx, body.model or "")
    own = engine.info.embedding_size
    if own and body.dimensions not in (None, own):
        message = f"this model's embeddings have {own} dimensions and cannot be shortened"
        raise InvalidField("dimensions", message)
    generation, vectors, tokens = await embed(ctx, body, body.inputs)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}

    def item(index: int, vector: Vector) -> bytes:
        as_base64 = body.encoding_format == "base64"
        entries = base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector
        return dumps({"object": "embedding", "index": index, "embedding": entries})

    rest = {"object": "list", "model": engine.info.name, "usage": usage}
    return list_answer(rest, "data", starmap(item, enumerate(vectors)), generation.headers)


@router.post(LLAMA, response_model=list[LlamaEmbedding], responses=ERRORS)
async def embedding(body: EmbeddingRequest, ctx: Ctx) -> Response:
    """Embed one or more texts; the answer is llama-server's list."""
    check_model(ctx, body.model or "")
    generation, vectors, _ = await embed(ctx, body, body.inputs)
    items = (dumps({"index": i, "embedding": [vector]}) for i, vector in enumerate(vectors))
    return list_answer(None, "", items, generation.headers)
