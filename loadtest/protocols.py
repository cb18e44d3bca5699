"""The protocols of the load test: the service's own `/generate`, OpenAI's, Anthropic's, Ollama's.

Each makes the body of a request and reads the answer, whole or event by event. They do not know
Locust.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar

from record import Reply


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for, in any protocol.

    Attributes:
        model: the served model's name.
        turns: the texts of the user and of the assistant in turn; the last one is the user's.
        system: the system message of a chat, perhaps an empty one; None: a text to continue.
        tokens: the longest answer, in tokens.
        drafter: source of draft tokens; empty: the server's default. Only `/generate` has it.
        ignore_eos: whether the answer goes on until it is as long as that.
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
        """A number for what is asked; equal ones are as good as always equal prompts."""
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
        text: what it adds to the answer.
        tokens: number of tokens in the text; None if the protocol does not say.
        whole: the counts of the whole answer, from the last events; times and text are not its.
        error: what went wrong.
    """

    text: str = ""
    tokens: int | None = None
    whole: Reply | None = None
    error: str | None = None


class ApiProtocol:
    """A protocol: `path` and how to speak it."""

    path: str
    has_ignore_eos = False

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request."""
        raise NotImplementedError

    def answer(self, body: Mapping[str, Any]) -> Reply:
        """Read a whole answer."""
        raise NotImplementedError

    def read(self, event: Mapping[str, Any]) -> Progress:
        """Read an event of a stream."""
        raise NotImplementedError


class Generate(ApiProtocol):
    """`POST /generate`: every event lists its tokens."""

    path = "/generate"
    has_ignore_eos = True

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request."""
        body = {"prompt": ask.prompt, "max_new_tokens": ask.tokens, "details": True}
        if ask.system is not None:
            body["system"] = ask.system
        if ask.drafter:
            body["drafter"] = ask.drafter
        if ask.ignore_eos:
            body["ignore_eos"] = True
        return body | {"stream": True} if ask.stream else body

    def answer(self, body: Mapping[str, Any]) -> Reply:
        """Read a whole answer."""
        told = body.get("details") or {}
        return Reply(
            body["generated_text"],
            body["prompt_tokens"],
            body["generated_tokens"],
            cached_tokens=told.get("cached_prompt_tokens"),
            passes=told.get("sequence_steps"),
            found_in=told.get("accepted_found_in") or {},
        )

    def read(self, event: Mapping[str, Any]) -> Progress:
        """Read an event of a stream."""
        if "error" in event:
            return Progress(error=str(event["error"].get("code")))
        if "finish_reason" in event:
            return Progress(whole=self.answer(event))
        return Progress(text=event["text"], tokens=len(event["tokens"]))


class Completions(ApiProtocol):
    """`POST /v1/completions`, with the usage at the end of a stream."""

    path = "/v1/completions"
    has_ignore_eos = True

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request; the drafter is the server's choice."""
        body: dict[str, Any] = {"model": ask.model, "max_tokens": ask.tokens, "temperature": 0}
        body |= self.asked(ask)
        if ask.ignore_eos:
            body["ignore_eos"] = True
        if ask.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def asked(self, ask: Ask) -> dict[str, Any]:
        """The part of a request that holds the prompt."""
        return {"prompt": ask.prompt}

    def text(self, choice: Mapping[str, Any]) -> str:
        """The text of a choice, or what it adds to its answer in a stream; it may be empty."""
        return str(choice.get("text") or "")

    def answer(self, body: Mapping[str, Any]) -> Reply:
        """Read a whole answer."""
        usage, told = body["usage"], body.get("timings") or {}
        return Reply(
            "".join(map(self.text, body.get("choices", []))),
            usage["prompt_tokens"],
            usage["completion_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            **_timings(told),
        )

    def read(self, event: Mapping[str, Any]) -> Progress:
        """Read an event of a stream."""
        if "error" in event:
            return Progress(error=str(event["error"].get("code")))
        whole = self.answer(event) if event.get("usage") else None
        return Progress("".join(map(self.text, event.get("choices", []))), whole=whole)


class Chats(Completions):
    """`POST /v1/chat/completions`."""

    path = "/v1/chat/completions"

    def asked(self, ask: Ask) -> dict[str, Any]:
        """The part of a request that holds the prompt."""
        return {"messages": ask.all_messages}

    def text(self, choice: Mapping[str, Any]) -> str:
        """The text of a choice, reasoning included."""
        message = choice.get("delta") or choice.get("message") or {}
        return "".join(message.get(name) or "" for name in ("reasoning_content", "content"))


class Messages(ApiProtocol):
    """`POST /v1/messages`, Anthropic's."""

    path = "/v1/messages"

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request."""
        body = {"model": ask.model, "max_tokens": ask.tokens, "temperature": 0}
        body |= {"messages": ask.messages, "stream": ask.stream}
        return body | {"system": ask.system} if ask.system else body

    def answer(self, body: Mapping[str, Any]) -> Reply:
        """Read a whole answer."""
        text = "".join(block.get("text", "") for block in body["content"])
        return self._counted(text, body["usage"])

    def _counted(self, text: str, usage: Mapping[str, Any]) -> Reply:
        """Count the tokens of a prompt: Anthropic counts those from a cache apart."""
        cached = usage.get("cache_read_input_tokens")
        written = usage["output_tokens"]
        return Reply(text, usage["input_tokens"] + (cached or 0), written, cached_tokens=cached)

    def read(self, event: Mapping[str, Any]) -> Progress:
        """Read an event of a stream."""
        if "error" in event:
            return Progress(error=str(event["error"].get("type")))
        delta = event.get("delta", {})
        if event["type"] == "content_block_delta":
            return Progress(text=delta.get("text") or delta.get("thinking") or "")
        if event["type"] == "message_delta":
            return Progress(whole=self._counted("", event["usage"]))
        return Progress()


class Responses(ApiProtocol):
    """`POST /v1/responses`, OpenAI's newer protocol."""

    path = "/v1/responses"

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request."""
        body = {"model": ask.model, "max_output_tokens": ask.tokens, "temperature": 0}
        body |= {"input": ask.messages, "stream": ask.stream, "store": False}
        return body | {"instructions": ask.system} if ask.system else body

    def answer(self, body: Mapping[str, Any]) -> Reply:
        """Read a whole answer."""
        parts = (part for item in body.get("output", []) for part in item.get("content") or [])
        text, usage = "".join(part.get("text") or "" for part in parts), body["usage"]
        cached = (usage.get("input_tokens_details") or {}).get("cached_tokens")
        return Reply(text, usage["input_tokens"], usage["output_tokens"], cached_tokens=cached)

    def read(self, event: Mapping[str, Any]) -> Progress:
        """Read an event of a stream."""
        if event["type"] in ("error", "response.failed"):
            return Progress(error=event["type"])
        if event["type"].endswith(".delta"):
            return Progress(text=event["delta"])
        if event["type"] in ("response.completed", "response.incomplete"):
            return Progress(whole=self.answer(event["response"]))
        return Progress()


class OllamaPrompts(ApiProtocol):
    """`POST /api/generate`, Ollama's: a line of JSON per step."""

    path = "/api/generate"

    def body(self, ask: Ask) -> dict[str, Any]:
        """The request."""
        options = {"num_predict": ask.tokens, "temperature": 0}
        return {"model": ask.model, "stream": ask.stream, "options": options, **self.asked(ask)}

    def asked(self, ask: Ask) -> dict[str, Any]:
        """The part of a request that holds the prompt."""
        more = {"raw": True} if ask.system is None else {"system": ask.system}
        return {"prompt": ask.prompt, **more}

    def text(self, body: Mapping[str, Any]) -> str:
        """The text of an answer or of a line."""
        return f"{body.get('thinking') or ''}{body.get('response') or ''}"

    def answer(self, body: Mapping[str, Any]) -> Reply:
        """Read a whole answer."""
        return Reply(self.text(body), body.get("prompt_eval_count", 0), body["eval_count"])

    def read(self, event: Mapping[str, Any]) -> Progress:
        """Read an event of a stream."""
        if "error" in event:
            return Progress(error=str(event["error"]))
        whole = None if event.get("eval_count") is None else self.answer(event)
        return Progress(self.text(event), whole=whole)


class OllamaChats(OllamaPrompts):
    """`POST /api/chat`, Ollama's."""

    path = "/api/chat"

    def asked(self, ask: Ask) -> dict[str, Any]:
        """The part of a request that holds the prompt."""
        return {"messages": ask.all_messages}

    def text(self, body: Mapping[str, Any]) -> str:
        """The text of an answer or of a line."""
        message = body.get("message", {})
        return f"{message.get('thinking') or ''}{message.get('content') or ''}"


class Infill(ApiProtocol):
    """`POST /infill`, llama-server's: a typing trace has its requests."""

    path = "/infill"
    fields: ClassVar = {
        "response_fields": ["content", "tokens_evaluated", "tokens_predicted", "timings"]
    }

    def answer(self, body: Mapping[str, Any]) -> Reply:
        """Read a whole answer."""
        told = body.get("timings") or {}
        return Reply(
            body["content"],
            body["tokens_evaluated"],
            body["tokens_predicted"],
            cached_tokens=told.get("cache_n"),
            **_timings(told),
        )


def _timings(told: Mapping[str, Any]) -> dict[str, Any]:
    """What `timings` tell of passes and of accepted draft tokens."""
    return {"passes": told.get("steps"), "found_in": told.get("accepted_found_in") or {}}


PROTOCOLS: dict[str, ApiProtocol] = {
    "generate": Generate(),
    "openai": Completions(),
    "chat": Chats(),
    "responses": Responses(),
    "messages": Messages(),
    "ollama-generate": OllamaPrompts(),
    "ollama-chat": OllamaChats(),
}


def stream_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each event of a stream: server-sent events, or lines of JSON."""
    for line in lines:
        data = line.removeprefix(b"data:").strip()
        if data.startswith(b"{"):
            yield json.loads(data)
