"""Makes the clients' requests: conversations with sessions, and single questions.

One, two and three replicas get the same requests. Every prompt begins with one of a few preambles,
like the prompts of an application's users.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.prompts import code

PREAMBLES = 4
OUTPUT = 24  # tokens of every answer
_PREAMBLE_BYTES = 640  # longer than the gateway's key: a preamble determines the key
_QUESTION_LINES = 4
_TURNS, _SINGLES = 4, 2  # turns per conversation; single questions between conversations


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation with a session, or a single question without one.

    Each question is sent together with the conversation so far.
    """

    session: str | None
    preamble: str
    questions: tuple[str, ...]


def talks(clients: int, rounds: int) -> list[list[Talk]]:
    """Each client's talks, in order."""
    texts = ["".join(item.text.splitlines(True)[:_QUESTION_LINES]) for item in code(200)]
    begins = ["".join(random.Random(n).sample(texts, len(texts))) for n in range(PREAMBLES)]
    shared = [f"# {number}\n{text[:_PREAMBLE_BYTES]}\n\n" for number, text in enumerate(begins)]
    return [list(_of_client(number, rounds, shared, texts)) for number in range(clients)]


def _of_client(
    number: int, rounds: int, preambles: Sequence[str], texts: Sequence[str]
) -> Iterator[Talk]:
    chance = random.Random(number)

    def question(turn: int) -> str:
        return f"# {number} {turn} {chance.randrange(10**6)}\n{chance.choice(texts)}"

    for turn in range(rounds):
        questions = tuple(question(turn) for _ in range(_TURNS))
        yield Talk(f"{number}.{turn}", chance.choice(preambles), questions)
        for _ in range(_SINGLES):
            yield Talk(None, chance.choice(preambles), (question(turn),))


def requests(plan: Sequence[Sequence[Talk]]) -> int:
    """Number of requests in all talks."""
    return sum(len(talk.questions) for client in plan for talk in client)


def body(prompt: str, stream: bool) -> dict[str, Any]:
    """A request for an answer of exactly `OUTPUT` tokens."""
    return {
        "prompt": prompt, "max_new_tokens": OUTPUT, "ignore_eos": True, "temperature": 0,
        "stream": stream,
    }  # fmt: skip
