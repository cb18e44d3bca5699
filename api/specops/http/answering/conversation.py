"""Continuing a conversation: the part that all chat protocols share."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request

from specops.engine.engine import Engine
from specops.http.answering.job import Job
from specops.http.answering.speech import Speech
from specops.http.answering.submit import Tokens, built, computed, start
from specops.http.errors import InvalidField
from specops.http.schemas.conversation import Conversation
from specops.http.schemas.options import EngineOptions
from specops.http.state import AppState
from specops.text.chat_template import ChatTemplateError, ChatTemplateLimitError, with_system
from specops.text.json_values import loads
from specops.text.tools.reader import Block

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates accept no other length


def render(engine: Engine, asked: Conversation) -> str:
    """Return the prompt that the model's chat template writes.

    Conversations without a system message get the model's own.

    Raises:
        InvalidField: the template refuses the messages, takes too much for them, or there is none.
        TemplateProcessError: the template's process failed; another try may succeed.
    """
    with _template_errors(engine, asked):
        messages = with_system(asked.messages, engine.info.system)
        return engine.render_chat(messages, asked.tools, asked.template_options)


@contextmanager
def _template_errors(engine: Engine, asked: Conversation) -> Iterator[None]:
    try:
        yield
    except ChatTemplateLimitError as error:  # it would exceed them again: no client should retry
        raise InvalidField(asked.source, str(error), code="template_limit") from error
    except ChatTemplateError as error:
        code = "invalid_value" if engine.chat_template else "no_chat_template"
        raise InvalidField(asked.source, str(error), code=code) from error


def _speech(engine: Engine, asked: Conversation) -> Speech:
    with _template_errors(engine, asked):
        return Speech(engine, asked)


def encode(engine: Engine, asked: Conversation) -> Tokens:
    """Return the tokens of a conversation's prompt."""
    return engine.encode_chat(render(engine, asked))


async def converse(
    state: AppState, request: Request, body: EngineOptions, make: Callable[[], Conversation]
) -> Job:
    """Have the engine continue the conversation that `make` returns.

    Raises:
        InvalidField: this server cannot use a field's value.
        NotReady, QueueFull, PromptTooLong, UnknownToken: see `AsyncEngine.submit`.
    """
    engine = state.service.engine
    template = engine.chat_template
    asked = await built(make, request, state.settings)
    speech = await computed(
        lambda: _speech(engine, asked),
        0,
        state.settings,
        renders=bool(template and template.thinking),
    )
    return await start(
        state,
        request,
        body,
        lambda: [encode(engine, asked)],
        size=asked.size,
        shown=asked.messages,
        rendered=True,
        speech=speech,
        skipped=asked.skipped,
    )


def call_id() -> str:
    """Return an id for a new call."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


def joined_text(blocks: Iterable[Block], kind: str) -> str:
    """Return the text of all blocks of a kind, with empty lines between them."""
    return "\n\n".join(block.text for block in blocks if block.kind == kind)


def arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; empty where the answer was cut off within them."""
    try:
        value = loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
