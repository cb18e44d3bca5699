"""The errors that clients see; `protocol` has their form in each protocol."""

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from specops.serving.admission import QueueFull

_RETRY_SECONDS = 5
_MAX_PROBLEMS = 20  # in one answer
_SHOULD_BE = "Input should be "  # the beginning of most problems' messages
_OBJECTS = ("dict_type", "model_type", "model_attributes_type")
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that left; only in the log
GENERATING = (400, 401, 408, 413, 415, 429, 500, 503, 504)  # failures of generating endpoints

# Characters that may control a terminal: messages quote clients' texts.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\",;]+/)*(?=[^\s/])")

Responses = dict[int | str, dict[str, Any]]
"""The description of an endpoint's answers in /openapi.json, by status."""
EVENTS: Responses = {200: {"content": {"text/event-stream": {}}}}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorDetail


def error_responses(*codes: int, model: type[BaseModel] = ErrorResponse) -> Responses:
    """Return the description of failures with these status codes, for /openapi.json."""
    return {code: {"model": model} for code in sorted(codes)}


def without_folders(message: str) -> str:
    """Return a message of the server without the folders of its files, which only the log shows.

    >>> without_folders("cannot read /models/a/b.gguf")
    'cannot read b.gguf'
    """
    return _FOLDERS.sub("", message)


class ApiError(HTTPException):
    """An answer that is not a success.

    Args:
        status: the HTTP status, 400 to 599.
        message: for people.
        code: for programs, in snake case.
        param: name of the wrong field.
        headers: the response's headers.
        more: further fields of the error, for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        message = _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", message)
        super().__init__(status, without_folders(message) if status >= 500 else message, headers)
        self.code = code
        self.param = param
        self.more = more or {}


class InvalidField(Exception):  # noqa: N818 - the name says what is wrong
    """A field has a value that this server cannot use, although its type is right.

    Args:
        field: the field's name in the body.
        message: what is wrong, and what to send.
        code: the error's kind, for programs.
    """

    def __init__(self, field: str, message: str, *, code: str = "invalid_value") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.code = code


def internal_error() -> ApiError:
    """Return the answer to a failure of the server."""
    return ApiError(
        500, "the server failed; its log has the reason, under this request's id",
        code="internal_error",
    )  # fmt: skip


def unavailable(message: str, code: str) -> ApiError:
    """Return the answer to a request that may succeed a few seconds later."""
    return ApiError(503, message, code=code, headers={"retry-after": str(_RETRY_SECONDS)})


def queue_full(error: QueueFull) -> ApiError:
    """Return the answer to a request that the admission controller refused."""
    retry = {"retry-after": str(error.retry_after)}
    return ApiError(429, str(error), code=error.reason, headers=retry)


def timeout_error(what: str, seconds: float) -> ApiError:
    """Return the answer to a request that was not `what` (`finished`) in time."""
    return ApiError(504, f"the request was not {what} within {seconds:g} seconds", code="timeout")


def client_left() -> ApiError:
    """Return the error that ends the work after the client left; nobody reads it."""
    message = "the client left before the answer began"
    return ApiError(CLIENT_CLOSED_REQUEST, message, code="client_left")


def from_http_exception(error: HTTPException, request: Request) -> ApiError:
    """Return the framework's errors (404, 405, ...) as errors of this API."""
    if isinstance(error, ApiError):
        return error
    status = HTTPStatus(error.status_code)
    message, asked = error.detail, f"{request.method} {request.scope['path'][:64]}"
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        message = f"this server has no {asked}; GET /docs shows its endpoints"
    if status is HTTPStatus.BAD_REQUEST and isinstance(cause := error.__cause__, Exception):
        message = f"the body cannot be read: {_unreadable(cause)}"
    return ApiError(status, message, code=status.name.lower(), headers=error.headers)


def _unreadable(cause: Exception) -> str:
    """Return why the body could not be read, although its JSON has no syntax error."""
    match cause:
        case RecursionError():
            return "its objects and lists are nested too deeply"
        case UnicodeDecodeError():
            return "it is not UTF-8"
        case ValueError():
            return f"a number has more than {sys.get_int_max_str_digits()} digits"
    return type(cause).__name__


def from_validation_error(error: RequestValidationError, request: Request, status: int) -> ApiError:
    """Return the error for wrong fields, which names them.

    A body that is not JSON has no fields: that is 400, or 415 if it does not claim to be JSON.

    Args:
        error: names the fields.
        request: has the body's content type.
        status: status of the answer to wrong fields.
    """
    problems = error.errors()[:_MAX_PROBLEMS]
    first: Mapping[str, Any] = problems[0]
    if first["type"] == "json_invalid":
        reason = first["ctx"]["error"]
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    content_type = request.headers.get("content-type", "")
    if _field(first) is None and "json" not in content_type and first["type"] != "missing":
        return ApiError(
            415, "send the body as JSON, with Content-Type: application/json",
            code="unsupported_media_type",
        )  # fmt: skip
    meant = _meant([_Problem(item, error.body) for item in problems])
    first = meant[0].problem
    code = {
        "extra_forbidden": "unknown_parameter",
        "missing": "missing_parameter",
        "unsupported": "unsupported_parameter",
    }
    return ApiError(
        status,
        "; ".join(dict.fromkeys(map(str, meant))),
        code=code.get(first["type"], "invalid_value"),
        param=_field(first),
    )


def _field(problem: Mapping[str, Any]) -> str | None:
    """Return the field's name: `stop` for ("body", "stop", "list[str]", 0)."""
    names = [part for part in problem["loc"][1:2] if isinstance(part, str)]
    if problem["type"] == "combination":  # several fields: the validator names one
        return str(problem["ctx"]["field"])
    return names[0] if names else None


class _Problem:
    """One thing that is wrong with a body.

    Attributes:
        problem: pydantic's description.
        steps: the path to it: names and indexes within the body, and between them, as None and a
            name, the types that were tried there, of which one would suffice.
        message: what is wrong.
    """

    def __init__(self, problem: Mapping[str, Any], body: Any) -> None:
        self.problem = problem
        self.steps: list[tuple[str | int | None, str]] = []
        *_, last = enumerate(problem["loc"])
        for position, name in enumerate(problem["loc"][1:], 1):
            # `name in range(...)` would compare a text with every number.
            listed = isinstance(body, list) and isinstance(name, int) and name < len(body)
            if listed or (isinstance(body, dict) and name in body):
                body = body[name]
            elif problem["type"] != "missing" or (position, name) != last:
                self.steps.append((None, str(name)))
                continue
            self.steps.append((name, ""))
        self.message = _message(problem)

    @property
    def path(self) -> list[str | int]:
        """Its place, such as ["messages", 3, "content"]."""
        return [name for name, _ in self.steps if name is not None]

    @property
    def progress(self) -> tuple[int, int, bool]:
        """How far a type matched: the intended one matches furthest."""
        path = self.path
        index = next((name for name in reversed(path) if isinstance(name, int)), 0)
        return len(path), index, not self.is_of_another_type

    @property
    def is_of_another_type(self) -> bool:
        """Whether the value's type is wrong, rather than a part of it."""
        return str(self.problem["type"]).endswith("_type")

    def __str__(self) -> str:
        where = ".".join(map(str, self.path)) or _field(self.problem) or "body"
        return f"{where}: {self.message}"


def _meant(problems: Sequence[_Problem], depth: int = 0) -> list[_Problem]:
    """Return the problems, without those of types that were tried but not meant.

    A message may be a text or a list of parts. If a part is wrong, nobody needs to know that the
    list is no text.
    """
    groups: dict[tuple[str | int | None, str] | None, list[_Problem]] = {}
    for problem in problems:
        step = problem.steps[depth] if depth < len(problem.steps) else None
        groups.setdefault(step, []).append(problem)
    by_step = {
        step: group if step is None else _meant(group, depth + 1) for step, group in groups.items()
    }
    tried = [group for step, group in by_step.items() if step is not None and step[0] is None]
    if len(tried) < 2:
        return [problem for group in by_step.values() for problem in group]
    best = max(tried, key=lambda group: max(problem.progress for problem in group))
    if all(len(group) == 1 and group[0].is_of_another_type for group in tried):
        # No type matches at all: the message names all of them.
        told = (group[0].message.removeprefix(_SHOULD_BE).split(" or ") for group in tried)
        words = dict.fromkeys(itertools.chain.from_iterable(told))
        best[0].message = _SHOULD_BE + " or ".join(words)
    rest = [group for step, group in by_step.items() if step is None or step[0] is not None]
    return [problem for group in (*rest, best) for problem in group]


def _message(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        return "no such field"
    if problem["type"] in _OBJECTS:  # the library's message names a class
        return f"{_SHOULD_BE}an object"
    if problem["type"] == "too_long" and isinstance(problem["input"], str):
        return f"String should have at most {problem['ctx']['max_length']} characters"
    words = str(problem["msg"]).removeprefix("Value error, ")  # the library's prefix for ours
    return words.partition(" after validation")[0]
