"""A protocol's conventions, besides its endpoints: its prompts and its errors.

OpenAI's conventions are the default. All endpoints except Anthropic's and Ollama's report errors
in its form:

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`param` names the wrong field, if there is one. Client libraries turn every protocol's errors into
their own exceptions. Several protocols have paths such as /v1/models: the client's headers say
which one it follows.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import orjson
from fastapi import APIRouter, Response

from specops.http.errors import ApiError
from specops.request import PromptTooLong
from specops.text.json_values import line

OPENAI_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    501: "not_supported_error",  # llama-server's
}


class Prompt(NamedTuple):
    """An endpoint that uses the engine.

    Attributes:
        field: the body's field with the prompt.
        operation: OpenTelemetry's name of the endpoint's operation.
    """

    field: str
    operation: Literal["chat", "text_completion", "embeddings"]


def _openai_error(error: ApiError) -> dict[str, Any]:
    status = error.status_code
    failed = "invalid_request_error" if status < 500 else "server_error"
    kind = OPENAI_TYPES.get(status, failed)
    described = {"message": error.detail, "type": kind, "param": error.param, "code": error.code}
    return {"error": described | dict(error.more)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Protocol:
    """One protocol.

    Attributes:
        router: the endpoints.
        prefixes: prefixes of the paths that follow these conventions; the longest match counts.
            Empty: the endpoints follow another protocol's conventions.
        shared: prefixes of paths that several protocols have, each with the header of the requests
            that follow these conventions.
        prompts: the endpoints that use the engine, by path.
        invalid_status: status of the answer to a body with a wrong field.
        id_headers: headers of every response that have the request's id.
        any_media_type: whether bodies are read as JSON, whatever their media type.
        error_json: returns an error's fields.
        event: the event that ends a stream, for an error's JSON.
        too_long_message: for a prompt that does not fit into the context. Client libraries and
            agents recognize its words, drop the oldest messages and try again. LangChain looks for
            the code in the text of the client's exception, which has no `code`.
        unknown_model_message: for a request for another model.
    """

    router: APIRouter
    prefixes: tuple[str, ...] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    prompts: Mapping[str, Prompt] = field(default_factory=dict)
    invalid_status: int = 400
    id_headers: tuple[str, ...] = ("x-request-id", "request-id")
    any_media_type: bool = False
    error_json: Callable[[ApiError], dict[str, Any]] = _openai_error
    event: bytes = b"data: %b\n\n"
    too_long_message: str = (
        "This model's maximum context length is {context} tokens. However, you requested {asked} "
        "tokens ({prompt} in the {field}, at least 1 in the completion). Please reduce the length "
        "of the {field} or completion. (context_length_exceeded)"
    )
    unknown_model_message: str = "the model {requested!r} does not exist; this server has {own!r}"

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream after a failure."""
        return self.event % line(self.error_json(error))

    def error_response(self, error: ApiError) -> Response:
        """Return the whole response to a failed request."""
        content, headers = orjson.dumps(self.error_json(error)), error.headers
        return Response(content, error.status_code, headers, media_type="application/json")

    def too_long(self, error: PromptTooLong, field: str) -> str:
        """Return the message for a prompt that does not fit; the answer needs one token.

        Args:
            error: has both lengths.
            field: the body's field with the prompt.
        """
        prompt, context = error.prompt_tokens, error.context
        return self.too_long_message.format(
            message=error,
            field=field,
            prompt=prompt,
            asked=prompt + 1,
            context=context,
            longest=context - 1,
        )


class Protocols:
    """All protocols; one of them has the empty prefix, for all other paths.

    Attributes:
        prompts: the endpoints that use the engine, by path.
    """

    def __init__(self, *protocols: Protocol) -> None:
        self._protocols = protocols
        self.prompts = {path: prompt for item in protocols for path, prompt in item.prompts.items()}
        rules = [(prefix, "", item) for item in protocols for prefix in item.prefixes]
        rules += [(*shared, item) for item in protocols for shared in item.shared.items()]
        self._rules = sorted(rules, key=lambda rule: (-len(rule[0]), not rule[1]))

    def __iter__(self) -> Iterator[Protocol]:
        return iter(self._protocols)

    def of(self, path: str, headers: Container[str] = ()) -> Protocol:
        """Return the protocol of a request."""
        return next(
            item
            for prefix, header, item in self._rules
            if path.startswith(prefix) and (not header or header in headers)
        )
