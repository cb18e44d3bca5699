"""A module for each Python client, with the functions that `Driver` names.

They run in the clients' own environment, where the service is not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

Form = TypeVar("Form", bound=BaseModel)
KEY = "any"
SHORT, LONG = 64, 1000  # tokens: of answers, and of the one that is cancelled
STRUCTURED = 256


@dataclass(frozen=True)
class Server:
    """Where the service is, and how this client names the model."""

    address: str
    model: str


class Driver(Protocol):
    """What each module has; a client that lacks something has no function for it.

    Everything is asked at a temperature of 0 and without a system message. Functions raise what the
    client raises.
    """

    def chat(self, server: Server, question: str) -> str:
        """Return the whole answer."""
        ...

    def stream(self, server: Server, question: str) -> list[str]:
        """Return the answer in the pieces in which it came."""
        ...

    def tools(self, server: Server, question: str) -> dict[str, Any]:
        """Have `get_weather` called, send the results; return `calls` (each has `name` and
        `arguments`) and the `answer`."""
        ...

    def structured(self, server: Server, form: type[Form], question: str) -> Form:
        """Ask for a form as the client's users do."""
        ...

    def embeddings(self, server: Server, texts: Sequence[str]) -> list[list[float]]:
        """Return a vector for each text."""
        ...

    def too_long(self, server: Server, messages: list[dict[str, str]]) -> str:
        """Send a conversation that does not fit, and return the answer if there is one."""
        ...

    def cancel(self, server: Server, question: str) -> None:
        """Read the beginning of a long answer, then leave it as the client's users do."""
        ...
