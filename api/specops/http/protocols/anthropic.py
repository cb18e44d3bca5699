"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's protocol."""

from __future__ import annotations

import hashlib
import re
import uuid
from functools import cached_property
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, BeforeValidator, Field

from specops.engine.engine import Engine
from specops.http.answering.prompt import (
    Conversation,
    Message,
    Mode,
    Parameters,
    TaggedPart,
    ToolChoice,
    ToolName,
    call_message,
    conversation,
    not_text,
    placeholder,
    result_message,
)
from specops.http.answering.schema import (
    WHOLE,
    Body,
    EngineOptions,
    FreeObject,
    Integer,
    Items,
    Some,
    StopList,
    Text,
    Tools,
    answer_headers,
    json_grammar,
)
from specops.http.answering.submit import chat_tokens, check_model, generate_chat
from specops.http.answering.writer import BlockWriter, Generation, arguments, call_id, json_answer
from specops.http.errors import EVENTS, GENERATING, ApiError, InvalidField, error_responses
from specops.http.protocol import OPENAI_TYPES, Prompt, Protocol
from specops.http.sse import named_event
from specops.http.state import Ctx
from specops.request import Grammar
from specops.system import logs
from specops.text.tools.blocks import Block
from specops.text.tools.formats import Tool

_FIELD = "messages"
_MODES: dict[str, Mode] = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}


# The blocks that this server reads: texts, and the other parts of an answer.
_TEXTS = ("text", "search_result", "compaction", "document")
_BESIDE_TEXT = ("tool_use", "tool_result", "thinking")
_READ = frozenset((*_TEXTS, *_BESIDE_TEXT))
# Calls that Anthropic's servers run, and their results.
_SERVERS = re.compile(r"\w+_tool_(use|result)|container_upload|tool_reference")


def _read(blocks: Any) -> Any:
    """Drop the fields of unread blocks: results of servers' tools can have any form."""
    if not isinstance(blocks, list):
        return blocks
    kinds = [block.get("type") if isinstance(block, dict) else None for block in blocks]
    return [
        {"type": kind} if isinstance(kind, str) and kind not in _READ else block
        for kind, block in zip(kinds, blocks, strict=True)
    ]


class ContentBlock(TaggedPart):
    """A part of a turn: text, reasoning, a tool call or its result.

    Blocks of other kinds in an answer come from another server, and are left out.
    """

    ignored_fields = frozenset({"cache_control", "citations", "context"})
    source, called = _FIELD, "a block"

    type: str = Field(
        description="text, document (of text), search_result, tool_use, tool_result, thinking or "
        "redacted_thinking; others are left out of answers, and refused in questions"
    )
    text: Text | None = None
    thinking: Text | None = None
    signature: Text | None = Field(None, description="of reasoning, as in the answer")
    id: Text | None = Field(None, description="a call's id")
    name: Text | None = Field(None, description="the called tool's name")
    input: FreeObject | None = Field(None, description="the called tool's arguments")
    tool_use_id: Text | None = Field(None, description="id of the call that a result answers")
    content: Text | Annotated[Items[ContentBlock], BeforeValidator(_read)] | None = Field(
        None, description="a result's content"
    )
    is_error: bool | None = None
    title: Text | None = Field(None, description="title of a document or a search result")
    origin: FreeObject | Text | None = Field(
        None, alias="source", description="a document's text, or a search result's address"
    )

    def only_text(self) -> str:
        """Return the block's text.

        Raises:
            InvalidField: the block has no text.
        """
        match self.type:
            case "text":
                return str(self.required("text"))
            case "search_result":
                text = _text(self.required("content"))
                return "\n".join(filter(None, (self.title, str(self.origin or ""), text)))
            case "compaction":  # a summary of earlier turns
                return _text(self.content)
            case "document" if (data := _document(self.origin)) is not None:
                return f"{self.title}\n{data}" if self.title else data
        raise not_text(self.type, _FIELD)

    def result_text(self, ignored: list[str]) -> str:
        """Return the text of a tool's result, with placeholders for blocks that are not text."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = []
        for block in self.content:
            if block.has_text:
                texts.append(block.only_text())
            else:
                ignored.append(f"{_FIELD}.{block.type}")
                texts.append(placeholder(block.type))
        return "\n".join(texts)

    @property
    def has_text(self) -> bool:
        """Whether a model reads this block as text."""
        return self.type in _TEXTS and (
            self.type != "document" or _document(self.origin) is not None
        )


Blocks = Annotated[Items[ContentBlock], BeforeValidator(_read)]


def _document(origin: Any) -> str | None:
    """Return a document's text; None if it is a file."""
    if not isinstance(origin, dict):
        return None
    match origin:
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return text
        case {"type": "content", "content": [*parts]}:
            texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
            whole = [text for text in texts if isinstance(text, str)]
            return "\n".join(whole) if len(whole) == len(parts) else None
    return None


class Turn(Body):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Blocks

    def messages(self, ignored: list[str]) -> list[Message]:
        """Return the messages for a chat template: each result becomes a separate message.

        Args:
            ignored: receives the names of the blocks left out.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        blocks = [block for block in self.content if block.type != "redacted_thinking"]
        results = [
            result_message(block.required("tool_use_id"), block.result_text(ignored))
            for block in blocks
            if block.type == "tool_result"
        ]
        rest = []
        for block in blocks:
            if self._is_ignored(block):
                ignored.append(f"{_FIELD}.{block.type}")
            elif block.type != "tool_result":
                rest.append(block)
        if self.role != "assistant":
            text = _text(rest)
            turn: Message = {"role": self.role, "content": text}
            return [*results, turn] if text or not results else results
        calls = [
            (block.required("id"), block.required("name"), block.required("input"))
            for block in rest
            if block.type == "tool_use"
        ]
        reasoning = [block.thinking or "" for block in rest if block.type == "thinking"]
        text = _text([block for block in rest if block.type not in ("tool_use", "thinking")])
        return [*results, call_message(text, calls, "".join(reasoning))]

    def _is_ignored(self, block: ContentBlock) -> bool:
        if self.role == "assistant":
            return not (block.has_text or block.type in _BESIDE_TEXT)
        return block.type != "tool_result" and _SERVERS.fullmatch(block.type) is not None


class MessagesTool(Body):
    """A tool that the model may call; a `type` other than `custom` is a built-in of Anthropic's."""

    ignored_fields = frozenset({"cache_control"})

    name: ToolName | None = Field(None, description="Anthropic's toolsets have none")
    type: Text | None = None
    description: Text | None = None
    input_schema: Parameters | None = None
    strict: bool | None = Field(False, description="arguments follow the schema")

    def tool(self) -> Tool | None:
        """Return the function, or None for one of Anthropic's built-in tools.

        Raises:
            InvalidField: the function's name is missing.
        """
        if self.type not in (None, "custom"):
            return None
        if self.name is None:
            raise InvalidField("tools", "a tool has no name", code="missing_parameter")
        return Tool(self.name, self.description or "", self.input_schema, bool(self.strict))


class Choice(Body):
    """Whether the model must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = Field(None, description="where `type` is `tool`")
    disable_parallel_tool_use: bool | None = False


class Thinking(Body):
    """Whether the model reasons, if it can, and for how long."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer = Field(None, ge=0, description="maximum tokens of reasoning")


class TokensRequest(Body):
    """A conversation whose tokens to count, or which to continue."""

    model: Text | None = Field(None, description="as in GET /v1/models")
    messages: Some[Turn] = Field(description="the conversation")
    system: Text | Blocks | None = None
    tools: Tools[MessagesTool] | None = Field(
        None, description="functions that the model may call; Anthropic's built-ins are skipped"
    )
    tool_choice: Choice | None = Field(None, description="`auto`, `any`, `none` or one tool")
    thinking: Thinking | None = Field(None, description="`disabled`: no reasoning")

    def conversation(self) -> Conversation:
        """Return the conversation in the form that all protocols share.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        ignored: list[str] = []
        messages = [message for turn in self.messages for message in turn.messages(ignored)]
        if system := _text(self.system):
            messages.insert(0, {"role": "system", "content": system})
        choice = self.tool_choice or Choice(type="auto", name=None)
        named = choice.name if choice.type == "tool" else None
        if choice.type == "tool" and named is None:
            message = "needs the `name` of the tool"
            raise InvalidField("tool_choice", message, code="missing_parameter")
        thinking = self.thinking
        return conversation(
            messages,
            _FIELD,
            self.tools,
            ToolChoice(
                _MODES[choice.type],
                None if named is None else [named],
                bool(choice.disable_parallel_tool_use or named),
            ),
            thinks=thinking.type != "disabled" if thinking else None,
            ignored=ignored,
            max_reasoning_tokens=thinking.budget_tokens if thinking else None,
        )


class Format(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    json_schema: FreeObject = Field(alias="schema")


class OutputConfig(Body):
    """How the model answers."""

    ignored_fields = frozenset({"effort"})

    format: Format | None = None


class MessagesRequest(TokensRequest, EngineOptions):
    """A conversation that the assistant continues."""

    ignored_fields = frozenset(
        {
            *("metadata", "service_tier", "container", "context_management", "mcp_servers"),
            *("cache_control", "inference_geo", "speed", "user_profile_id", "diagnostics"),
            *("betas", "fallbacks", "fallback_credit_token"),
        }
    )

    limit_field = "max_tokens"

    max_tokens: Annotated[int, WHOLE] = Field(ge=1, description="maximum tokens of the answer")
    stop_sequences: StopList | None = Field(
        None, description="strings that end the output; not part of it"
    )

    output_config: OutputConfig | None = Field(None, description="`format`: the form of the answer")
    output_format: Format | None = Field(None, description="older form of `output_config.format`")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(filter(None, self.stop_sequences or ()))

    @property
    def scheduling(self) -> dict[str, Any]:
        """Fields of `GenerationRequest`; a stream begins with the prompt's usage."""
        return super().scheduling | {"step_stats": self.streams}

    @cached_property
    def constraints(self) -> dict[str, Grammar]:
        """Each field that constrains the answer, and its grammar."""
        own = {}
        if self.output_config and (form := self.output_config.format):
            own["output_config"] = json_grammar(form.json_schema)
        if self.output_format:
            own["output_format"] = json_grammar(self.output_format.json_schema)
        return own | super().constraints


class TokensResponse(BaseModel):
    """The length of a conversation's prompt."""

    input_tokens: int


class MessagesUsage(BaseModel):
    """Tokens in and out."""

    input_tokens: int = Field(description="prompt tokens that were not in the cache")
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = Field(description="prompt tokens from the cache")


StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessagesResponse(BaseModel):
    """The assistant's turn."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]] = Field(description="blocks: text, thinking, tool_use")
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessagesUsage


def _text(content: str | list[ContentBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.only_text() for block in content)


PATH = "/v1/messages"
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
router = APIRouter(tags=["anthropic"])
_TYPES = {
    **OPENAI_TYPES,
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error(error: ApiError) -> dict[str, Any]:
    failed = "invalid_request_error" if error.status_code < 500 else "api_error"
    kind = _TYPES.get(error.status_code, failed)
    return {
        "type": "error",
        "error": {"type": kind, "message": error.detail},
        "request_id": logs.request_id.get(),
    }


PROTOCOL = Protocol(
    router=router,
    prefixes=(PATH,),
    shared={"/v1/": "anthropic-version"},
    prompts={PATH: Prompt("messages", "chat")},
    error_json=_error,
    event=b"event: error\ndata: %b\n\n",
    too_long_message="prompt is too long: {prompt} tokens > {longest} maximum",
)


class AnthropicErrorDetail(BaseModel):
    """What went wrong, in Anthropic's form."""

    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """The body of every failed response of `/v1/messages`."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str | None


_ERRORS = error_responses(*GENERATING, 404, model=AnthropicErrorResponse)


@router.post(PATH, response_model=MessagesResponse, responses=EVENTS | _ERRORS)
async def messages(body: MessagesRequest, ctx: Ctx) -> Response:
    """Continue a conversation.

    With `stream` the answer is a series of server-sent events: `message_start`, then each block's
    `content_block_start`, `content_block_delta` and `content_block_stop`, then `message_delta` with
    the reason for the end, and `message_stop`.
    """
    engine = check_model(ctx, body.model or "")
    generation = await generate_chat(ctx, body, body.conversation)
    return await _Writer(generation, engine, body).response(stream=body.streams)


@router.post(f"{PATH}/count_tokens", response_model=TokensResponse, responses=_ERRORS)
async def count_tokens(body: TokensRequest, ctx: Ctx) -> Response:
    """Count the tokens of a conversation's prompt."""
    engine = check_model(ctx, body.model or "")
    count = await chat_tokens(ctx, body, engine, body.conversation)
    return json_answer(TokensResponse(input_tokens=count), answer_headers(ctx))


class _Writer(BlockWriter):
    pause = named_event({"type": "ping"})

    def __init__(self, generation: Generation, engine: Engine, body: MessagesRequest) -> None:
        super().__init__(generation)
        self._engine = engine
        self._limit = body.max_tokens
        self._cached: int | None = None

    def whole(self) -> MessagesResponse:
        return self._message([_block(block, block.text) for block in self.answer.blocks])

    def begin(self) -> bytes:
        first = self._message([]).model_dump() | {"stop_reason": None}
        return named_event({"type": "message_start", "message": first})

    def begin_block(self, index: int) -> bytes:
        block = _block(self.answer.blocks[index], "")
        return named_event({"type": "content_block_start", "index": index, "content_block": block})

    def block_delta(self, index: int, text: str) -> bytes:
        kind, field = _DELTAS[self.answer.blocks[index].kind]
        delta = {"type": kind, field: text}
        return named_event({"type": "content_block_delta", "index": index, "delta": delta})

    def end_block(self, index: int, *, complete: bool) -> bytes:
        del complete  # the end of the message gives the reason
        block, signed = self.answer.blocks[index], b""
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": _signature(block.text)}
            signed = named_event({"type": "content_block_delta", "index": index, "delta": delta})
        return signed + named_event({"type": "content_block_stop", "index": index})

    def end(self) -> bytes:
        last = self.whole()
        delta = {"stop_reason": last.stop_reason, "stop_sequence": last.stop_sequence}
        usage = last.usage.model_dump()
        return (
            self.end_open_block()
            + named_event({"type": "message_delta", "delta": delta, "usage": usage})
            + named_event({"type": "message_stop"})
        )

    def _message(self, content: list[dict[str, Any]]) -> MessagesResponse:
        answer = self.answer
        if self._cached is None:  # the first and last event give the same number
            self._cached = answer.stats.cached_prompt_tokens
        cached = self._cached
        return MessagesResponse(
            id=f"msg_{uuid.uuid4().hex}",
            model=self._engine.info.name,
            content=content,
            stop_reason=self._stop_reason,
            stop_sequence=answer.last.stop if answer.last else None,
            usage=MessagesUsage(
                input_tokens=max(0, len(answer.request.prompt_tokens) - cached),
                output_tokens=answer.stats.generated_tokens,
                cache_read_input_tokens=cached,
            ),
        )

    @property
    def _stop_reason(self) -> StopReason:
        answer = self.answer
        if answer.last and answer.last.stop is not None:
            return "stop_sequence"
        reason = _REASONS[answer.chat_finish_reason]
        room = self._engine.info.context - len(answer.request.prompt_tokens)
        if reason == "max_tokens" and answer.request.max_new_tokens == room < self._limit:
            return "model_context_window_exceeded"
        return reason


def _block(block: Block, text: str) -> dict[str, Any]:
    """Return a block with this text in Anthropic's form."""
    match block.kind:
        case "text":
            return {"type": "text", "text": text}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": text and _signature(text)}
    return {"type": "tool_use", "id": call_id(), "name": block.name, "input": arguments(text)}


def _signature(reasoning: str) -> str:
    """Return the signature that clients keep with the reasoning and send back with it."""
    return hashlib.sha256(reasoning.encode("utf-8", "replace")).hexdigest()
