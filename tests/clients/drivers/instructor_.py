"""Instructor, which is for structured output; it wraps a client of another package."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import instructor
from pydantic import BaseModel, Field

from tests.clients.drivers import SHORT, STRUCTURED, Form, Server, anthropic_messages, openai_chat


class Answer(BaseModel):
    """The answer to a question."""

    question: str = Field(max_length=40)
    answer: str = Field(max_length=80)


def client(server: Server) -> instructor.Instructor:
    if server.model == "anthropic":
        return instructor.from_anthropic(anthropic_messages.client(server))
    return instructor.from_openai(openai_chat.client(server))


def request(question: str, max_tokens: int = SHORT) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "max_retries": 0,
        "extra_body": {"temperature": 0},  # Anthropic's package has no name for it any more
    }


def ask(server: Server, messages: list[dict[str, str]]) -> str:
    body = request("") | {"messages": messages}
    return client(server).create(response_model=Answer, **body).answer


def stream(server: Server, question: str, max_tokens: int) -> Iterator[str]:
    parts = client(server).create_partial(response_model=Answer, **request(question, max_tokens))
    said = ["", *(part.answer or part.question or "" for part in parts)]
    return (now.removeprefix(before) for before, now in pairwise(said))


def structured(server: Server, form: type[Form], question: str) -> Form:
    return client(server).create(response_model=form, **request(question, STRUCTURED))
