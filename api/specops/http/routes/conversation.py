"""A conversation on its way through the engine: the part that all chat protocols share.

Each protocol turns its request into a `Conversation` and writes what `Talk` tells in its own words.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastapi import Request

from specops.engine.engine import Engine
from specops.http.errors import InvalidField
from specops.http.routes.job import Job, Prompts, Tokens, computed, start
from specops.http.schemas.conversation import Conversation
from specops.http.schemas.options import EngineOptions
from specops.http.state import AppState
from specops.request import Grammar, GrammarKind, Output, Piece, SamplingParams
from specops.text.chat_template import ChatTemplateError, begun_answer
from specops.text.tools.formats import GENERIC
from specops.text.tools.grammar import CallGrammar
from specops.text.tools.reader import AnswerReader, Block, Delta

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates take no other


@dataclass(frozen=True, slots=True)
class Step:
    """What one step brought for one answer."""

    index: int
    deltas: list[Delta]
    output: Output


def render(engine: Engine, asked: Conversation) -> str:
    """Write a conversation's prompt, as the model's chat template does.

    Raises:
        InvalidField: the template does not take the messages, or there is none.
    """
    try:
        return engine.render_chat(list(asked.messages), asked.tools, asked.template_options)
    except ChatTemplateError as error:
        code = "invalid_value" if engine.chat_template else "no_chat_template"
        raise InvalidField(asked.source, str(error), code=code) from error


def encode(engine: Engine, asked: Conversation) -> Tokens:
    """Write a conversation's prompt and make tokens of it."""
    return engine.encode_chat(render(engine, asked))


class Speech:
    """How the model writes thoughts and calls of tools in answers to a conversation."""

    def __init__(self, engine: Engine, conversation: Conversation) -> None:
        template, tokenizer = engine.chat_template, engine.tokenizer
        self._asked = conversation
        self._calls = template.calls if template and conversation.tools else None
        self._thinking = template.thinking if template else None
        answer = begun_answer(conversation.messages)  # thoughts, if any, are in it
        self._begun = bool(
            template and not answer and template.begins_thinking(conversation.template_options)
        )
        tags = (*(self._calls.markers if self._calls else ()), *(self._thinking or ()))
        found = {tag: tokenizer.token(tag) for tag in tags}
        # Text leaves special tokens out.
        self._special = {
            tag: token
            for tag, token in found.items()
            if token is not None and not tokenizer.decode([token])
        }
        self._tags = {token: tag for tag, token in self._special.items()}

    def reader(self) -> AnswerReader:
        """A reader of one answer."""
        names = frozenset(tool.name for tool in self._asked.tools)
        return AnswerReader(self._calls, names, self._thinking, begun=self._begun)

    def text(self, pieces: Iterable[Piece]) -> str:
        """The pieces' text, with the special tokens that a reader knows."""
        return "".join(piece.text or self._tags.get(piece.token, "") for piece in pieces)

    def grammar(self, said: Grammar | None) -> Grammar | None:
        """What answers follow.

        Thoughts and calls stand beside a text that follows a grammar. Without one answers are free,
        but where a call is required, must be right, or may only be one.

        Args:
            said: what the text of an answer follows.
        """
        asked = self._asked
        strict = any(tool.strict for tool in asked.tools)
        bound = bool(asked.tools) and (asked.required or strict or not asked.parallel)
        besides = bool(asked.tools) or self._thinking is not None
        if not (bound or (said and besides)):
            return said
        calls = self._calls or GENERIC
        writer = CallGrammar(calls, self._special, self._thinking, self._begun)
        tools = [tool for tool in asked.tools if asked.named in (None, tool.name)]
        text = writer.lark(
            tools, required=asked.required, parallel=asked.parallel, formed=said is not None
        )
        return Grammar(GrammarKind.LARK, text, None if asked.required else said)


class Talk:
    """The answers to a conversation, as they come."""

    def __init__(self, job: Job, engine: Engine, speech: Speech) -> None:
        self.job = job
        self.engine = engine
        self._speech = speech
        self._readers = [speech.reader() for _ in job.answers]

    async def steps(self) -> AsyncIterator[Step | None]:
        """What each step brought; None after a silent while.

        Raises:
            ApiError: one of the answers did not end as it should.
        """
        async for item in self.job.outputs():
            if item is None:
                yield None
                continue
            index, output = item
            reader = self._readers[index]
            deltas = reader.push(self._speech.text(output.pieces))
            if output.finish:
                deltas += reader.finish()
            yield Step(index, deltas, output)

    async def finished(self) -> list[list[Block]]:
        """Wait for all answers; return each one's blocks.

        Raises:
            ApiError: one of them did not end as it should.
        """
        answers = await self.job.finished()
        for answer, reader in zip(answers, self._readers, strict=True):
            reader.push(self._speech.text(answer.pieces))
            reader.finish()
        return [reader.blocks for reader in self._readers]

    def blocks(self, index: int) -> list[Block]:
        """What has come of an answer so far."""
        return self._readers[index].blocks

    def finish_reason(self, index: int) -> Literal["stop", "length", "tool_calls"]:
        """Why an answer ended, as OpenAI names it."""
        reason = self.job.answers[index].finish_reason
        called = any(block.kind == "call" for block in self.blocks(index))
        return "tool_calls" if called and reason == "stop" else reason


async def converse(
    state: AppState, request: Request, body: EngineOptions, conversation: Conversation
) -> Talk:
    """Have a conversation gone on with.

    Raises:
        InvalidField: a field's value does not suit this server.
        NotReady, QueueFull, PromptTooLong: see `AsyncEngine.submit`.
    """
    engine = state.service.engine
    template = engine.chat_template
    speech = await computed(
        lambda: Speech(engine, conversation),
        0,
        state.settings,
        renders=bool(template and template.thinking),
    )
    grammar = speech.grammar(conversation.sampling(0).grammar)

    def sampling(choice: int) -> SamplingParams:
        return replace(conversation.sampling(choice), grammar=grammar)

    # Agents ask for as many tokens as other models give: a limit is no wish for a length.
    most = state.settings.max_new_tokens
    limit = most if conversation.limit is None else min(conversation.limit, most)
    job = await start(
        state,
        request,
        body,
        Prompts(
            lambda engine: [encode(engine, conversation)],
            1,
            conversation.size,
            conversation.messages,
            rendered=True,
        ),
        sampling=sampling,
        choices=conversation.choices,
        skipped=conversation.skipped,
        max_new_tokens=limit,
        stop=conversation.stops,
        stream=conversation.stream,
        logprobs=conversation.logprobs,
    )
    return Talk(job, engine, speech)


def call_id() -> str:
    """A new call's id."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))


def said(blocks: Iterable[Block], kind: str) -> str:
    """What an answer's blocks of a kind say, one below the other."""
    return "\n\n".join(block.text for block in blocks if block.kind == kind)


def arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object; an answer that was cut off has none that could be read."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
