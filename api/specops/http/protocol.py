"""What the server has to know of a protocol beside its endpoints: its prompts, and its errors.

OpenAI's form of an error is that of all endpoints but Anthropic's and Ollama's:

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`param` names the field that is wrong, if there is one. Client libraries turn every protocol's
errors into their own exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import orjson
from fastapi import APIRouter, Response

from specops.http.errors import ApiError
from specops.request import PromptTooLong

OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
MAXIMUM = "This model's maximum context length is"


class Prompt(NamedTuple):
    """An endpoint that the engine works for.

    Attributes:
        field: of the body, which has the prompt.
        operation: OpenTelemetry's name of what the endpoint does.
    """

    field: str
    operation: Literal["chat", "text_completion", "embeddings"]


class Protocol:
    """One protocol, with OpenAI's conventions; a subclass overrides what another one does else.

    Args:
        router: the endpoints.
        prefix: of the paths that follow these conventions; the longest one that fits counts. None:
            the endpoints have the conventions of others.
        prompts: those that the engine works for, by path.
        links: names of the endpoints in the list at `/`, and their paths.

    Attributes:
        invalid_status: of the answer to a body with a wrong field.
        id_headers: of every response; they have the request's id.
        any_media_type: bodies are read as JSON, whatever they claim to be.
    """

    invalid_status: ClassVar[int] = 400
    id_headers: ClassVar[tuple[str, ...]] = ("x-request-id", "request-id")
    any_media_type: ClassVar[bool] = False

    def __init__(
        self,
        router: APIRouter,
        *,
        prefix: str | None = None,
        prompts: Mapping[str, Prompt] | None = None,
        links: Mapping[str, str] | None = None,
    ) -> None:
        self.prefix = prefix
        self.router = router
        self.prompts = dict(prompts or {})
        self.links = dict(links or {})

    def error_body(self, error: ApiError) -> bytes:
        """Return the JSON of an error."""
        status = error.status_code
        failed = "invalid_request_error" if status < 500 else "server_error"
        detail = {
            "message": error.detail,
            "type": OPENAI_TYPES.get(status, failed),
            "param": error.param,
            "code": error.code,
        }
        return orjson.dumps({"error": detail})

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream after a failure."""
        return b"data: " + self.error_body(error) + b"\n\n"

    def error_response(self, error: ApiError) -> Response:
        """Return the whole response to a request that failed."""
        content = self.error_body(error)
        return Response(content, error.status_code, error.headers, media_type="application/json")

    def too_long(self, error: PromptTooLong, field: str) -> str:
        """Return the message for a prompt that does not fit into the context.

        It has the words that client libraries and agents look for: they then drop the oldest
        messages and try again. One token of the context is the answer's. LangChain looks for the
        code in the text of the client's exception, which has no `code`.

        Args:
            field: the one with the prompt.
        """
        prompt = error.prompt_tokens
        return (
            f"{MAXIMUM} {error.context} tokens. However, you requested {prompt + 1} tokens "
            f"({prompt} in the {field}, at least 1 in the completion). Please reduce the length "
            f"of the {field} or completion. (context_length_exceeded)"
        )

    def unknown_model(self, requested: str, own: str) -> str:
        """Return the message for a request for another model than the server's own."""
        return f"the model {requested!r} does not exist; this server has {own!r}"


class Protocols(tuple[Protocol, ...]):
    """All protocols; one of them has the empty prefix, for all other paths."""

    __slots__ = ()

    @property
    def prompts(self) -> dict[str, Prompt]:
        """The endpoints that the engine works for, by path."""
        return {path: prompt for protocol in self for path, prompt in protocol.prompts.items()}

    def of(self, path: str) -> Protocol:
        """Return the protocol of a request's path."""
        prefixes = {item.prefix: item for item in self if item.prefix is not None}
        return prefixes[max(filter(path.startswith, prefixes), key=len)]
