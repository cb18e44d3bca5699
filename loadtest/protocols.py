"""The protocols of the load test: the service's own `/generate`, OpenAI's completions and chats.

Each makes the body of a request and reads the events of its answer. They do not know Locust.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

CHAT = "chat"  # the category of questions
SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True, slots=True)
class Progress:
    """The content of one event of a stream: new tokens, or the whole count at the end."""

    tokens: int = 0  # tokens in this event; 1 for any text if the protocol does not say
    generated: int | None = None  # all tokens of the answer, from its last event
    speed: float = 0.0  # tokens after the first, per second, by the server's clock; 0: not told
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, or, in the category `chat`, a question."""

    category: str
    text: str

    @property
    def is_question(self) -> bool:
        """Whether the text is a question, which is answered and not continued."""
        return self.category == CHAT


class ApiProtocol(Protocol):
    """A protocol."""

    path: str

    def body(
        self, prompt: Prompt, tokens: int, drafter: str, model: str, *, stream: bool
    ) -> dict[str, Any]:
        """The request for at most `tokens` tokens."""

    def generated(self, answer: Mapping[str, Any]) -> int:
        """Tokens of a whole answer."""

    def read(self, event: Mapping[str, Any]) -> Progress:
        """Read an event of a stream."""


class Generate:
    """`POST /generate`: every event lists its tokens."""

    path = "/generate"

    def body(
        self, prompt: Prompt, tokens: int, drafter: str, model: str, *, stream: bool
    ) -> dict[str, Any]:
        """The request for at most `tokens` tokens."""
        asked: dict[str, Any] = {"prompt": prompt.text, "max_new_tokens": tokens}
        if prompt.is_question:
            asked["system"] = SYSTEM
        if drafter:
            asked["drafter"] = drafter
        return asked | {"stream": True} if stream else asked

    def generated(self, answer: Mapping[str, Any]) -> int:
        """Tokens of a whole answer."""
        return int(answer["generated_tokens"])

    def read(self, event: Mapping[str, Any]) -> Progress:
        """Read an event of a stream."""
        if "error" in event:
            return Progress(error=str(event["error"].get("code")))
        if "finish_reason" in event:
            speed = float(event.get("tokens_per_second", 0.0))
            return Progress(generated=int(event["generated_tokens"]), speed=speed)
        return Progress(tokens=len(event["tokens"]))


class Completions:
    """`POST /v1/completions`, with the usage at the end of a stream."""

    path = "/v1/completions"

    def body(
        self, prompt: Prompt, tokens: int, drafter: str, model: str, *, stream: bool
    ) -> dict[str, Any]:
        """The request for at most `tokens` tokens; the drafter is the server's choice."""
        asked: dict[str, Any] = {"model": model, "max_tokens": tokens, "temperature": 0}
        asked |= self.asked(prompt)
        if stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked

    def asked(self, prompt: Prompt) -> dict[str, Any]:
        """The part of a request that holds the prompt."""
        return {"prompt": prompt.text}

    def text(self, choice: Mapping[str, Any]) -> str:
        """The text that a choice in a stream adds to its answer; it may be empty."""
        return str(choice.get("text") or "")

    def generated(self, answer: Mapping[str, Any]) -> int:
        """Tokens of a whole answer."""
        return int(answer["usage"]["completion_tokens"])

    def read(self, event: Mapping[str, Any]) -> Progress:
        """Read an event of a stream."""
        if "error" in event:
            return Progress(error=str(event["error"].get("code")))
        usage = event.get("usage")
        text = any(self.text(choice) for choice in event.get("choices", []))
        return Progress(
            tokens=1 if text else 0,
            generated=int(usage["completion_tokens"]) if usage else None,
            speed=float(event.get("timings", {}).get("predicted_per_second", 0.0)),
        )


class Chats(Completions):
    """`POST /v1/chat/completions`: the prompt as the user's only message."""

    path = "/v1/chat/completions"

    def asked(self, prompt: Prompt) -> dict[str, Any]:
        """The part of a request that holds the prompt."""
        told = [{"role": "system", "content": SYSTEM}] if prompt.is_question else []
        return {"messages": [*told, {"role": "user", "content": prompt.text}]}

    def text(self, choice: Mapping[str, Any]) -> str:
        """The text that a choice in a stream adds to its answer; it may be empty."""
        return str(choice.get("delta", {}).get("content") or "")


PROTOCOLS: dict[str, ApiProtocol] = {
    "generate": Generate(),
    "openai": Completions(),
    "chat": Chats(),
}
