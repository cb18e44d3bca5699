"""Bodies of POST /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from specops.http.schemas.body import Body, FreeObject, Text, TokenId
from specops.http.schemas.chat import ChatTool, Message
from specops.http.schemas.conversation import Conversation, conversation


class TokenizeRequest(Body):
    """A text to encode."""

    content: Text
    add_special: bool = Field(False, description="with the special tokens that begin a prompt")
    with_pieces: bool = Field(False, description="report each token's text as well")


class TokenPiece(BaseModel):
    """A token and its spelling."""

    id: int
    piece: str | list[int] = Field(description="a text, or the bytes of a part of a character")


class TokenizeResponse(BaseModel):
    """The tokens of a text."""

    tokens: list[int] | list[TokenPiece]


class DetokenizeRequest(Body):
    """Tokens to decode."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class DetokenizeResponse(BaseModel):
    """The text of tokens."""

    content: str


class ApplyTemplateRequest(Body):
    """A conversation to write as one text."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: FreeObject | None = None

    def conversation(self) -> Conversation:
        """Return the conversation without the protocol.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        left_out: list[str] = []
        return conversation(
            [message.for_template(left_out) for message in self.messages],
            "messages",
            self.tools,
            left_out=left_out,
            template_options=self.chat_template_kwargs or {},
        )


class ApplyTemplateResponse(BaseModel):
    """The prompt that the model's chat template writes."""

    prompt: str
