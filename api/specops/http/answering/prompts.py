"""Prompts as tokens: of texts, of tokens, of gaps to fill in, and of conversations.

Args of functions:
    engine: the loaded model.
    prompt: as the client sent it.
    field: the body's field, for errors.
    asked: the conversation.
    any_length: the prompt may be longer than the context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from specops.engine.engine import Engine
from specops.http.answering.conversation import Conversation, Message
from specops.http.errors import InvalidField
from specops.request import PromptTooLong
from specops.text.chat_template import (
    ChatTemplateError,
    ChatTemplateLimitError,
    answer_prefill,
    with_system,
)
from specops.text.fill_in import FillIn

Tokens = tuple[int, ...]


class ChatPrompt(NamedTuple):
    """A conversation's prompt, and whether it ends with the tag that begins reasoning."""

    tokens: Tokens
    starts_in_reasoning: bool


def prompt_tokens(
    prompt: str | list[int], engine: Engine, field: str, *, any_length: bool = False
) -> tuple[int, ...]:
    """Return the tokens of a text; tokens are only checked.

    Raises:
        InvalidField: a token does not exist.
        PromptTooLong: see `Engine.encode`.
    """
    if isinstance(prompt, str):
        return engine.encode(prompt, any_length=any_length)
    if wrong := [token for token in prompt if token >= engine.info.vocab_size]:
        raise InvalidField(
            field,
            f"token {wrong[0]} is out of vocabulary, which has {engine.info.vocab_size} tokens",
        )
    return tuple(prompt)


def mixed_tokens(
    prompt: str | list[int | str], engine: Engine, field: str, *, any_length: bool = False
) -> Tokens:
    """Return the tokens of a text, or of tokens and texts in a row.

    Only a text that begins the prompt gets the special tokens that the model expects there.

    Raises:
        InvalidField: a token does not exist.
        PromptTooLong: see `Engine.encode`.
    """
    if isinstance(prompt, str):
        return engine.encode(prompt, any_length=any_length)
    if all(isinstance(item, int) for item in prompt):  # how many they are is known
        return prompt_tokens(prompt, engine, field)  # type: ignore[arg-type]

    def parts() -> Iterator[Sequence[int]]:
        for place, item in enumerate(prompt):
            if isinstance(item, str):
                yield from engine.tokenizer.parts(item, special_tokens=place == 0)
            else:
                yield prompt_tokens([item], engine, field)

    return engine.collected(parts(), any_length=any_length)


def fill_in(suffix: str | None, engine: Engine) -> FillIn | None:
    """Return how the model is asked to fill in a gap; None if the client does not ask for it.

    Raises:
        InvalidField: the model was not trained for that.
    """
    form = FillIn.of(engine.tokenizer) if suffix else None
    if suffix and form is None:
        message = "this model cannot fill in a gap: its tokenizer has no tokens for that"
        raise InvalidField("suffix", message, code="unsupported_parameter")
    return form


def render(engine: Engine, asked: Conversation) -> str:
    """Return the prompt that the model's chat template writes.

    Conversations without a system message get the model's own.

    Raises:
        InvalidField: the template refuses the messages, takes too much for them, or there is none.
        ProgramProcessError: the template's process failed; another try may succeed.
    """
    with template_errors(engine, asked):
        messages = with_system(asked.messages, engine.info.system)
        return engine.render_chat(messages, asked.tools, asked.template_options, asks=asked.asks)


@contextmanager
def template_errors(engine: Engine, asked: Conversation) -> Iterator[None]:
    """Turn a failure of the template into an error of the field with the messages."""
    try:
        yield
    except ChatTemplateLimitError as error:  # it would exceed them again: no client should retry
        raise InvalidField(asked.source, str(error), code="template_limit") from error
    except ChatTemplateError as error:
        code = "invalid_value" if engine.chat_template else "no_chat_template"
        raise InvalidField(asked.source, str(error), code=code) from error


def encode(engine: Engine, asked: Conversation, *, any_length: bool = False) -> ChatPrompt:
    """Return a conversation's prompt.

    Raises:
        InvalidField, ProgramProcessError: see `render`.
        PromptTooLong: see `Engine.encode`.
    """
    template = engine.chat_template
    if not asked.before:
        text = render(engine, asked)
    else:
        if template is None:
            message = f"{engine.info.name} has no usable chat template"
            raise InvalidField(asked.source, message, code="no_chat_template")
        with template_errors(engine, asked):
            text = template.after_answer(asked.messages, asked.template_options)
    prefill = answer_prefill(asked.messages) if asked.asks else ""
    starts_in_reasoning = template is not None and template.opens_reasoning(text, prefill)
    tokens = engine.encode_chat(text, begins=not asked.before, any_length=any_length)
    return ChatPrompt((*asked.before, *tokens), starts_in_reasoning)


def truncate_to_fit(engine: Engine, asked: Conversation, room: int) -> tuple[ChatPrompt, int]:
    """Return a prompt without the oldest messages if it is too long and they may be left out.

    System messages, the user's last message and the last message of all stay. What stays begins
    with a message of the user, if that is enough, because some templates want it so.

    Args:
        room: most tokens of the prompt.

    Returns:
        The prompt, which is too long if what has to stay is, and the number of messages that were
        left out.

    Raises:
        InvalidField, PromptTooLong, ProgramProcessError: see `encode`.
    """
    if not asked.truncates:
        return encode(engine, asked), 0
    with suppress(PromptTooLong):
        if len((prompt := encode(engine, asked)).tokens) <= room:
            return prompt, 0
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
    def prompt_from(index: int) -> ChatPrompt:
        return encode(engine, replace(asked, messages=kept(starts[index])))

    def fits(index: int) -> bool:
        with suppress(PromptTooLong):
            return len(prompt_from(index).tokens) <= room
        return False

    # Later starts have shorter prompts. Each try renders and encodes what would stay.
    indexes = range(len(starts))
    index = bisect_left(indexes, True, key=fits)
    index = min(index, indexes[-1])
    return prompt_from(index), len(messages) - len(kept(starts[index]))
