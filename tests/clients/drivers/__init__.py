"""A module for each Python client, with the functions that `Driver` names.

They run in the clients' own environment, where the service is not installed.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

Form = TypeVar("Form", bound=BaseModel)
KEY = "any"
SHORT, LONG = 64, 1000  # tokens: of answers, and of the one that is cancelled
STRUCTURED = 256
# The functions of features that have none of their own name; forms are `structured`.
FUNCTIONS = {"chat": "ask", "too_long": "ask", "cancel": "stream"}


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

    def ask(self, server: Server, messages: list[dict[str, str]]) -> str:
        """Return the whole answer to a conversation, which may be too long."""
        ...

    def stream(
        self, server: Server, question: str, max_tokens: int
    ) -> Iterator[str] | AsyncIterator[str]:
        """Yield the answer in the pieces in which it comes; who closes it leaves the stream."""
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
