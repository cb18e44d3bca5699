"""The protocols of the load test: the service's `/generate`, OpenAI's, Anthropic's, Ollama's.

Each makes the body of a request, and reads the answer as a whole or event by event. This module
does not depend on Locust.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from record import Reply


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, independent of the protocol.

    Attributes:
        model: name of the served model.
        turns: the texts of user and assistant in turn; the last one is the user's.
        system: the system message of a chat, possibly empty; None: a text to continue.
        tokens: maximum tokens of the answer.
        stream: whether to stream the answer.
        drafter: the drafter; empty: the server's default. Only `/generate` has it.
        ignore_eos: whether the answer always has the maximum number of tokens.
    """

    model: str
    turns: tuple[str, ...]
    system: str | None
    tokens: int
    stream: bool
    drafter: str = ""
    ignore_eos: bool = False

    @property
    def prompt(self) -> str:
        """The conversation as one text, for protocols without messages."""
        return "\n\n".join(self.turns)

    @property
    def digest(self) -> int:
        """A hash of the prompt; equal hashes practically always mean equal prompts."""
        asked = "\0".join((self.system or "", *self.turns)).encode()
        return int.from_bytes(blake2b(asked, digest_size=8).digest(), "big", signed=True)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as messages, without a system message."""
        roles = ("user", "assistant")
        return [{"role": roles[n % 2], "content": text} for n, text in enumerate(self.turns)]

    @property
    def all_messages(self) -> list[dict[str, str]]:
        """The conversation as messages, with its system message if it has one."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]


@dataclass(frozen=True, slots=True)
class Progress:
    """The content of one event of a stream.

    Attributes:
        text: the text that it adds to the answer.
        tokens: number of tokens in the text; None if the protocol does not say.
        whole: the counts of the whole answer, from the last events, without times and text.
        error: the error, if any.
    """

    text: str = ""
    tokens: int | None = None
    whole: Reply | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ApiProtocol:
    """A protocol.

    Attributes:
        path: path of the endpoint.
        body: makes the body of a request.
        answer: reads a whole answer, or the stream's event that has its counts.
        added: returns the text that an event adds, reasoning included.
        counted: the field that only the event with the counts has, as names joined by dots.
        has_ignore_eos: whether the protocol has a field to ignore the end token.
    """

    path: str
    body: Callable[[Ask], dict[str, Any]]
    answer: Callable[[Mapping[str, Any]], Reply]
    added: Callable[[Mapping[str, Any]], str] = lambda event: ""
    counted: str = "usage"
    has_ignore_eos: bool = False

    def read(self, event: Mapping[str, Any]) -> Progress:
        """Read an event of a stream."""
        error: Any = event.get("error")
        if isinstance(error, Mapping):
            error = error.get("code") or error.get("type")
        if event.get("type") in ("error", "response.failed"):
            error = error or event["type"]
        if error:
            return Progress(error=str(error))
        found: Any = event
        for name in self.counted.split("."):
            found = found.get(name) if found else None
        tokens = len(event["tokens"]) if "tokens" in event else None
        whole = None if found is None else self.answer(event)
        return Progress(self.added(event), tokens, whole)


def _given(**fields: Any) -> dict[str, Any]:
    """A body without the fields that are None."""
    return {name: value for name, value in fields.items() if value is not None}


def _joined(parts: Iterable[Mapping[str, Any]], *names: str) -> str:
    """The concatenated texts of parts; each has a text under one of the names, or none."""
    return "".join(part.get(name) or "" for part in parts for name in names)


def _told(timings: Mapping[str, Any]) -> dict[str, Any]:
    """The passes and accepted draft tokens in `timings`."""
    return {"passes": timings.get("steps"), "found_in": timings.get("accepted_found_in") or {}}


# -- /generate: every event lists its tokens -------------------------------------------------------


def _generate(ask: Ask) -> dict[str, Any]:
    chosen = {"drafter": ask.drafter or None, "ignore_eos": ask.ignore_eos or None}
    sized = {"max_new_tokens": ask.tokens, "details": True, "stream": ask.stream}
    return _given(prompt=ask.prompt, system=ask.system, **sized, **chosen)


def _generated(body: Mapping[str, Any]) -> Reply:
    told = body.get("details") or {}
    return Reply(
        body["generated_text"],
        body["prompt_tokens"],
        body["generated_tokens"],
        cached_tokens=told.get("cached_prompt_tokens"),
        passes=told.get("sequence_steps"),
        found_in=told.get("accepted_found_in") or {},
    )


# -- OpenAI: the usage comes at the end of a stream ------------------------------------------------


def _openai(ask: Ask, **asked: Any) -> dict[str, Any]:
    usage = {"include_usage": True} if ask.stream else None
    sized = {"model": ask.model, "max_tokens": ask.tokens, "temperature": 0}
    more = {"stream": ask.stream, "stream_options": usage, "ignore_eos": ask.ignore_eos or None}
    return _given(**asked, **sized, **more)


def _choices(body: Mapping[str, Any]) -> str:
    said = [
        choice.get("delta") or choice.get("message") or choice for choice in body.get("choices", ())
    ]
    return _joined(said, "reasoning_content", "content", "text")


def _completed(body: Mapping[str, Any]) -> Reply:
    usage = body["usage"]
    return Reply(
        _choices(body),
        usage["prompt_tokens"],
        usage["completion_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        **_told(body.get("timings") or {}),
    )


def _respond(ask: Ask) -> dict[str, Any]:
    sized = {"model": ask.model, "max_output_tokens": ask.tokens, "temperature": 0}
    asked = {"input": ask.messages, "instructions": ask.system or None}
    return _given(**asked, **sized, stream=ask.stream, store=False)


def _responded(body: Mapping[str, Any]) -> Reply:
    body = body.get("response", body)
    parts = (part for item in body.get("output", ()) for part in item.get("content") or ())
    text, usage = _joined(parts, "text"), body["usage"]
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens")
    return Reply(text, usage["input_tokens"], usage["output_tokens"], cached_tokens=cached)


# -- Anthropic: cached tokens are counted separately -----------------------------------------------


def _message(ask: Ask) -> dict[str, Any]:
    sized = {"model": ask.model, "max_tokens": ask.tokens, "temperature": 0}
    return _given(messages=ask.messages, system=ask.system or None, **sized, stream=ask.stream)


def _messaged(body: Mapping[str, Any]) -> Reply:
    usage, text = body["usage"], _joined(body.get("content", ()), "text")
    cached = usage.get("cache_read_input_tokens")
    read = usage["input_tokens"] + (cached or 0)
    return Reply(text, read, usage["output_tokens"], cached_tokens=cached)


# -- Ollama: a line of JSON per step ---------------------------------------------------------------


def _ollama(ask: Ask, **asked: Any) -> dict[str, Any]:
    sized = {"num_predict": ask.tokens, "temperature": 0}
    return _given(model=ask.model, stream=ask.stream, options=sized, **asked)


def _line(body: Mapping[str, Any]) -> str:
    return _joined([body.get("message", body)], "thinking", "content", "response")


def _counted(body: Mapping[str, Any]) -> Reply:
    return Reply(_line(body), body.get("prompt_eval_count", 0), body["eval_count"])


# -- llama-server's /infill: the requests come from a typing trace ---------------------------------


def _filled_in(body: Mapping[str, Any]) -> Reply:
    told = body.get("timings") or {}
    sizes = body["tokens_evaluated"], body["tokens_predicted"]
    return Reply(body["content"], *sizes, cached_tokens=told.get("cache_n"), **_told(told))


INFILL_FIELDS = {"response_fields": ["content", "tokens_evaluated", "tokens_predicted", "timings"]}
INFILL = ApiProtocol("/infill", lambda ask: INFILL_FIELDS, _filled_in)
PROTOCOLS = {
    "generate": ApiProtocol(
        "/generate",
        _generate,
        _generated,
        lambda event: event.get("text", ""),
        counted="finish_reason",
        has_ignore_eos=True,
    ),
    "openai": ApiProtocol(
        "/v1/completions",
        lambda ask: _openai(ask, prompt=ask.prompt),
        _completed,
        _choices,
        has_ignore_eos=True,
    ),
    "chat": ApiProtocol(
        "/v1/chat/completions",
        lambda ask: _openai(ask, messages=ask.all_messages),
        _completed,
        _choices,
        has_ignore_eos=True,
    ),
    "responses": ApiProtocol(
        "/v1/responses",
        _respond,
        _responded,
        lambda event: event["delta"] if event["type"].endswith(".delta") else "",
        counted="response.usage",
    ),
    "messages": ApiProtocol(
        "/v1/messages",
        _message,
        _messaged,
        lambda event: _joined([event.get("delta", {})], "text", "thinking"),
    ),
    "ollama-generate": ApiProtocol(
        "/api/generate",
        lambda ask: _ollama(
            ask, prompt=ask.prompt, system=ask.system, raw=True if ask.system is None else None
        ),
        _counted,
        _line,
        counted="eval_count",
    ),
    "ollama-chat": ApiProtocol(
        "/api/chat",
        lambda ask: _ollama(ask, messages=ask.all_messages),
        _counted,
        _line,
        counted="eval_count",
    ),
}


def stream_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each event of a stream: server-sent events, or lines of JSON."""
    for line in lines:
        data = line.removeprefix(b"data:").strip()
        if data.startswith(b"{"):
            yield json.loads(data)
