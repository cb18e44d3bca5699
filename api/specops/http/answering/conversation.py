"""Continuing a conversation: the part that all chat protocols share."""

from __future__ import annotations

import secrets
import string
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from specops.engine.engine import Engine
from specops.http.answering.job import Job
from specops.http.answering.speech import Speech
from specops.http.answering.submit import Tokens, built, computed, start
from specops.http.errors import InvalidField
from specops.http.schemas.conversation import Conversation, Message
from specops.http.schemas.options import EngineOptions
from specops.http.state import Context
from specops.text.chat_template import ChatTemplateError, ChatTemplateLimitError, with_system
from specops.text.json_values import loads
from specops.text.tools.reader import Block

_ANSWERS_SHARE = 4  # of the context is kept for an answer before messages are left out
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
    if not asked.before:
        return engine.encode_chat(render(engine, asked))
    with _template_errors(engine, asked):
        if engine.chat_template is None:
            raise ChatTemplateError(f"{engine.info.name} has no chat template that can be used")
        text = engine.chat_template.after_answer(asked.messages, asked.template_options)
    return (*asked.before, *engine.encode_chat(text))


def fitting(engine: Engine, asked: Conversation, room: int) -> tuple[Tokens, int]:
    """Leave out the oldest messages where a conversation is too long, as Ollama does.

    System messages, the user's last message and the last message of all stay. What stays begins
    with a message of the user, if that is enough, because some templates want it so.

    Args:
        room: most tokens of the prompt.

    Returns:
        The prompt's tokens, which are too many if what has to stay is too long, and the number of
        messages that were left out.
    """
    tokens = encode(engine, asked)
    if len(tokens) <= room:
        return tokens, 0
    messages = list(asked.messages)
    roles = [message["role"] for message in messages]
    last = len(messages) - 1
    asked_last = max((i for i, role in enumerate(roles) if role == "user"), default=last)
    starts = [
        *(i for i in range(1, asked_last + 1) if roles[i] == "user"),
        *(i for i in range(asked_last + 1, last) if roles[i] == "assistant"),
    ]
    if not starts or starts[-1] != last:
        starts.append(last)

    def kept(start: int) -> list[Message]:
        earlier = [message for message in messages[:start] if message["role"] == "system"]
        question = [messages[asked_last]] if asked_last < start else []
        return [*earlier, *question, *messages[start:]]

    @cache
    def tokens_from(place: int) -> Tokens:
        return encode(engine, replace(asked, messages=kept(starts[place])))

    # Later starts have shorter prompts. Each try renders and encodes what would stay.
    places = range(len(starts))
    place = bisect_left(places, True, key=lambda place: len(tokens_from(place)) <= room)
    place = min(place, places[-1])
    return tokens_from(place), len(messages) - len(kept(starts[place]))


async def converse(
    ctx: Context,
    body: EngineOptions,
    make: Callable[[], Conversation],
    *,
    recalled_bytes: int = 0,
) -> Job:
    """Have the engine continue the conversation that `make` returns.

    Args:
        recalled_bytes: of what `make` reads besides the body.

    Raises:
        InvalidField: this server cannot use a field's value.
        NotReady, QueueFull, PromptTooLong, UnknownToken: see `AsyncEngine.submit`.
    """
    engine = ctx.engine
    template = engine.chat_template
    asked = await built(ctx, make, besides=recalled_bytes)
    speech = await computed(
        ctx, lambda: _speech(engine, asked), 0, renders=bool(template and template.thinking)
    )

    def encoded() -> list[Tokens]:
        if not asked.truncates:
            return [encode(engine, asked)]
        most = min(ctx.settings.max_new_tokens, engine.info.context // _ANSWERS_SHARE)
        answer = min(most, body.limit or most)
        tokens, left_out = fitting(engine, asked, engine.info.context - answer)
        if left_out:
            ctx.ignored.append(f"messages[0:{left_out}]")
        return [tokens]

    return await start(
        ctx,
        body,
        encoded,
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
