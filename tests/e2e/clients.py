"""Clients of the API for the tests of containers: one answer, or a stream to watch."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

PROMPT = "def add(a, b):\n"
TIMEOUT = 120.0  # after so many seconds of silence a client gives up


def generate(url: str, **fields: Any) -> dict[str, Any]:
    """The answer to a request for exactly `max_new_tokens` tokens."""
    body = {"prompt": PROMPT, "ignore_eos": True, **fields}
    response = httpx.post(f"{url}/generate", json=body, timeout=TIMEOUT)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@dataclass
class Stream:
    """A streamed answer without speculation, so that it takes longer."""

    url: str
    max_new_tokens: int
    events: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    def follow(self) -> None:
        """Read the stream to its end; raises httpx.TransportError if it breaks off or stops."""
        body = {"prompt": PROMPT, "max_new_tokens": self.max_new_tokens, "ignore_eos": True}
        body |= {"drafter": "none", "stream": True}
        request = httpx.stream("POST", f"{self.url}/generate", json=body, timeout=TIMEOUT)
        with request as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.complete = True
                elif line.startswith("data: "):
                    self.events.append(json.loads(line.removeprefix("data: ")))
