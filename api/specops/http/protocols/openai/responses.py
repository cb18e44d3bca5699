"""POST /v1/responses: the assistant's next turn, in OpenAI's newer protocol.

Nothing is stored: a request has the whole conversation.
"""

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cached_property, partial
from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Response as HttpResponse
from pydantic import BaseModel, BeforeValidator, Field

from specops.engine.engine import Engine
from specops.http.answering.prompt import (
    Conversation,
    Message,
    Mode,
    Reasoning,
    ToolChoice,
    ToolName,
    conversation,
    thinks_at,
)
from specops.http.answering.schema import (
    AnyText,
    Body,
    EngineOptions,
    FreeObject,
    Integer,
    Items,
    JsonObject,
    NamedSchema,
    Some,
    Text,
    Tools,
    Unsupported,
    known_fields,
)
from specops.http.answering.submit import chat_tokens, check_model, generate_chat
from specops.http.answering.writer import BlockWriter, Generation, call_id, token_logprobs
from specops.http.errors import ApiError, InvalidField
from specops.http.protocol import Prompt, Protocol
from specops.http.protocols.openai.common import RESPONSES, InputTokens
from specops.http.protocols.openai.items import FIELD, FunctionNames, History, Item, ResponsesTool
from specops.http.sse import named_event
from specops.http.state import Ctx
from specops.request import Grammar
from specops.text.json_values import MAX_PARTS, loads
from specops.text.tools.blocks import Block

# A message is an object with at least two names, and a body has room for no more of those. It has
# room for three times as many empty objects, which would take 22 ms to check and free.
_MAX_ITEMS = MAX_PARTS // 3
_ECHOED = "repeated in the answer, without effect"
_LOGPROBS = "message.output_text.logprobs"  # a value in `include`


def _few(items: object) -> object:
    # Not `maxItems` in /openapi.json: a body cannot have more anyway.
    if isinstance(items, list) and len(items) > _MAX_ITEMS:
        raise ValueError(f"at most {_MAX_ITEMS} items")
    return items


class NamedFunction(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: ToolName
    namespace: Text | None = None


class AllowedTool(Body):
    """A tool that may be called: a function, or one of OpenAI's built-ins, which are skipped."""

    type: Text
    name: ToolName | None = None
    namespace: Text | None = None


class AllowedTools(Body):
    """A choice of some tools: the model may or must call one of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Some[AllowedTool]


_Chosen = Annotated[NamedFunction | AllowedTools, Field(discriminator="type")]


class FlatSchema(NamedSchema):
    """A JSON schema with this protocol's fields around it."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """The form of the answer's text."""

    ignored_fields = frozenset({"verbosity"})

    format: Annotated[AnyText | JsonObject | FlatSchema, Field(discriminator="type")] | None = None


class ResponsesRequest(EngineOptions):
    """A conversation that the assistant continues."""

    ignored_fields = frozenset(
        {
            *("service_tier", "prompt_cache_retention", "stream_options", "client_metadata"),
            *("context_management", "moderation", "prompt_cache_options", "access_programs"),
            *("background_options", "image"),
        }
    )

    limit_field = "max_output_tokens"

    model: Text | None = Field(None, description="as in GET /v1/models")
    input: Text | Annotated[Items[Item], BeforeValidator(_few)] = Field(
        description="the question, or all items of the conversation"
    )
    instructions: Text | None = Field(None, description="the system message")
    max_output_tokens: Integer = Field(
        None, ge=1, description="default: as many as the context and the server allow"
    )
    tools: Tools[ResponsesTool] | None = Field(
        None,
        description="functions that may be called, and namespaces of these; others are skipped",
    )
    tool_choice: Mode | _Chosen | None = Field(
        None, description="a mode, a tool to call, or the tools that may be called"
    )
    parallel_tool_calls: bool | None = Field(True, description="false: one call at most")
    reasoning: Reasoning | None = Field(None, description="`effort` `none`: no reasoning")
    text: TextOptions | None = Field(None, description="`format`: the form of the answer")
    store: bool | None = Field(True, description="false: keep no items")
    include: Items[Text] | None = Field(
        None, description=f"`{_LOGPROBS}`: probabilities of the answer's tokens; others: no effect"
    )
    top_logprobs: Integer = Field(
        None,
        ge=0,
        le=20,
        description="this many alternatives, if `include` requests probabilities",
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto`: drop the oldest items of an input that is too long"
    )
    max_tool_calls: int | None = Field(None, description=_ECHOED)
    metadata: FreeObject | None = Field(None, description=_ECHOED)
    prompt_cache_key: Text | None = Field(None, description=_ECHOED)
    safety_identifier: Text | None = Field(None, description=_ECHOED)
    user: Text | None = Field(None, description=_ECHOED)

    previous_response_id: Annotated[Any, Unsupported(None)] = Field(
        None, description="not supported: nothing is stored"
    )
    conversation_id: Annotated[Any, Unsupported(None)] = Field(
        None, alias="conversation", description="not supported: nothing is stored"
    )
    background: Annotated[Any, Unsupported(None, False)] = Field(None, description="not supported")
    prompt: Annotated[Any, Unsupported(None)] = Field(None, description="not supported")

    @property
    def effort(self) -> str | None:
        """How much the model should reason; `none`: not at all."""
        return self.reasoning.effort if self.reasoning else None

    @cached_property
    def constraints(self) -> dict[str, Grammar]:
        """Each field that constrains the answer, and its grammar."""
        form = self.text and self.text.format
        own = {"text": form.grammar} if isinstance(form, FlatSchema | JsonObject) else {}
        return own | super().constraints

    @property
    def token_logprobs(self) -> int | None:
        """Number of likeliest tokens to report for each position; None: no probabilities."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else None

    @cached_property
    def functions(self) -> FunctionNames:
        """The functions' names, as the model and the client know them."""
        return FunctionNames(self.tools or ())

    @property
    def references(self) -> list[str]:
        """The ids in the input's references, each once."""
        items = () if isinstance(self.input, str) else self.input
        return list(dict.fromkeys(item.id for item in items if item.id and item.refers))

    def conversation(self, recalled: dict[str, bytes]) -> Conversation:
        """Return the conversation in the form that all protocols share.

        Args:
            recalled: JSON of earlier answers' items, by id. Only the first reference to an item
                is resolved.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        ignored = [f"include.{name}" for name in self.include or () if name != _LOGPROBS]
        if self.top_logprobs and self.token_logprobs is None:
            ignored.append("top_logprobs")
        return conversation(
            self._messages(recalled, ignored),
            FIELD,
            self.functions.tools,
            self._choice(),
            thinks=thinks_at(self.effort),
            ignored=ignored,
            truncates=self.truncation == "auto",
            max_reasoning_tokens=self.reasoning.max_tokens if self.reasoning else None,
        )

    def _choice(self) -> ToolChoice:
        once = self.parallel_tool_calls is False
        match self.tool_choice:
            case NamedFunction(name=name, namespace=namespace):
                return ToolChoice("required", [self.functions.called(namespace, name)], once=True)
            case AllowedTools(mode=mode, tools=tools):
                names = [
                    self.functions.called(tool.namespace, tool.name or "")
                    for tool in tools
                    if tool.type == "function"
                ]
                if not names and mode == "required":
                    message = "a call is required, but no tool that is allowed is a function"
                    raise InvalidField("tool_choice", message)
                return ToolChoice(mode, names, once) if names else ToolChoice("none")
            case mode:
                return ToolChoice(mode, once=once)

    def _messages(self, recalled: dict[str, bytes], ignored: list[str]) -> list[Message]:
        """Return the messages for a chat template.

        Args:
            recalled: see `conversation`.
            ignored: receives the names of the items and parts left out.
        """
        system: list[Message] = []
        if self.instructions:
            system.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        history = History(ignored, self.functions)
        unread = dict(recalled)
        for item in self.input:
            text = unread.pop(item.required("id"), None) if item.refers else None
            history.add(item if text is None else Item.model_validate(loads(text.decode())))
        # An empty input becomes an empty question: templates need a message.
        return [*system, *(history.messages or [{"role": "user", "content": ""}])]


class ResponsesUsage(BaseModel):
    """Tokens in and out."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class Response(BaseModel):
    """The answer, with the request's options."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]] = Field(description="items: message, reasoning, function_call")
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: dict[Literal["effort", "summary"], str | None]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponsesUsage | None = None
    user: str | None


PATH = "/v1/responses"
_SENT_BACK = (
    *("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key"),
    *("safety_identifier", "user"),
)
_DRAWN = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_STEMS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
router = APIRouter(tags=["openai"])
PROTOCOL = Protocol(
    router=router,
    prefixes=(PATH,),
    prompts={PATH: Prompt("input", "chat")},
    too_long_message="Your input exceeds the context window of this model. This model's maximum "
    "context length is {context} tokens. However, your input resulted in {prompt} tokens, and "
    "the answer needs at least one. Please adjust your input and try again. "
    "(context_length_exceeded)",
)


@router.post(PATH, response_model=Response, responses=RESPONSES)
async def responses(body: ResponsesRequest, ctx: Ctx) -> HttpResponse:
    """Continue a conversation; the request has all of it.

    With `stream` the answer is a series of server-sent events, from `response.created` to
    `response.completed`, `response.incomplete` or `response.failed`.
    """
    engine = check_model(ctx, body.model or "")
    recalled = ctx.app.items.get(ctx.client, body.references)
    more = sum(map(len, recalled.values()))
    generation = await generate_chat(ctx, body, lambda: body.conversation(recalled), more=more)
    keep = partial(ctx.app.items.keep, ctx.client) if body.store is not False else None
    return await _Writer(generation, engine, body, keep).response(stream=body.streams)


@router.post(f"{PATH}/input_tokens", responses=RESPONSES)
async def input_tokens(body: ResponsesRequest, ctx: Ctx) -> InputTokens:
    """Count the tokens of a conversation's prompt."""
    engine = check_model(ctx, body.model or "")
    recalled = ctx.app.items.get(ctx.client, body.references)
    more = sum(map(len, recalled.values()))
    count = await chat_tokens(ctx, body, engine, lambda: body.conversation(recalled), more=more)
    return InputTokens(input_tokens=count)


@router.post(f"{PATH}/compact", include_in_schema=False)
async def compact() -> None:
    """Refuse to compact a conversation.

    Raises:
        ApiError: always.
    """
    raise ApiError(
        501,
        "this server does not compact conversations: send a shorter one, let the model summarize "
        "it, or set `truncation` to auto, which leaves out the oldest items",
        code="not_supported",
    )


class _Writer(BlockWriter):
    def __init__(
        self,
        generation: Generation,
        engine: Engine,
        body: ResponsesRequest,
        keep: Callable[[list[dict[str, Any]]], None] | None,
    ) -> None:
        super().__init__(generation)
        self._model, self._tokenizer = engine.info.name, engine.tokenizer
        self._body = body
        self._keep = keep
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[dict[str, Any]] = []  # one per block: the fields that never change
        self._sent = 0  # events
        self._placed = 0  # tokens whose block is known
        self._logprobs: defaultdict[int, list[Any]] = defaultdict(list)  # of tokens, by block
        self._told: Counter[int] = Counter()  # by block: how many of these deltas have reported

    def whole(self, error: ApiError | None = None) -> Response:
        body, answer = self._body, self.answer
        complete = answer.last is not None and error is None
        cut = complete and answer.finish_reason == "length"
        blocks = answer.blocks
        output = [self._item(index) for index in range(len(blocks))]
        for item, block in zip(output, blocks, strict=True):
            whole = complete and not (cut and block is blocks[-1])
            item["status"] = "completed" if whole else "incomplete"
        if complete and self._keep is not None:
            self._keep(output)
        form = body.text and body.text.format
        status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
        if error:
            status = "failed"
        elif complete:
            status = "incomplete" if cut else "completed"
        return Response(
            id=self._id,
            created_at=self._created,
            completed_at=int(time.time()) if complete else None,
            status=status,
            error={"code": "server_error", "message": error.detail} if error else None,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            metadata=body.metadata or {},
            model=self._model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": body.effort, "summary": None},
            text={"format": known_fields(form) if form else {"type": "text"}},
            tool_choice=_choice(body),
            tools=[tool.echoed() for tool in body.tools or ()],
            top_logprobs=body.token_logprobs or 0,
            truncation=body.truncation or "disabled",
            usage=self._usage() if complete else None,
            **{name: getattr(body, name) for name in _SENT_BACK},
            **{name: getattr(answer.request.sampling, name) for name in _DRAWN},
        )

    def begin(self) -> bytes:
        begun = self.whole().model_dump()
        begun |= {"status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def begin_block(self, index: int) -> bytes:
        block = self.answer.blocks[index]
        item = self._item(index) | {"status": "in_progress"}
        item["arguments" if block.kind == "call" else "content"] = (
            "" if block.kind == "call" else []
        )
        events = self._event("response.output_item.added", output_index=index, item=item)
        return events if block.kind == "call" else events + self._part_event("added", index, "")

    def block_delta(self, index: int, text: str) -> bytes:
        told, self._told[index] = self._told[index], len(self._tokens(index))
        return self._written("delta", index, told, delta=text)

    def end_block(self, index: int, *, complete: bool) -> bytes:
        block = self.answer.blocks[index]
        if block.kind == "call":
            name = self._item(index)["name"]
            events = self._written("done", index, arguments=block.text, name=name)
        else:
            events = self._written("done", index, text=block.text)
            events += self._part_event("done", index, block.text)
        item = self._item(index) | {"status": "completed" if complete else "incomplete"}
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def end(self) -> bytes:
        done = self.whole().model_dump()
        return self.end_open_block(complete=done["status"] == "completed") + self._event(
            f"response.{done['status']}", response=done
        )

    def failed(self, error: ApiError) -> bytes:
        if not self._sent:
            raise error
        return self._event("response.failed", response=self.whole(error).model_dump())

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return named_event({"type": kind, "sequence_number": self._sent - 1, **fields})

    def _part_event(self, what: str, index: int, text: str) -> bytes:
        """Return the event of an item's only part."""
        part = _part(self.answer.blocks[index], text, self._tokens(index) if text else [])
        where = {"item_id": self._item(index)["id"], "output_index": index, "content_index": 0}
        return self._event(f"response.content_part.{what}", part=part, **where)

    def _written(self, what: str, index: int, told: int = 0, **fields: str) -> bytes:
        """Return the event of an item's text, or of a call's arguments.

        Args:
            what: `delta` or `done`.
            index: the block's.
            told: number of tokens whose probabilities were already reported.
            fields: the event's other fields.
        """
        block = self.answer.blocks[index]
        where: dict[str, Any] = {"item_id": self._item(index)["id"], "output_index": index}
        if block.kind != "call":
            where["content_index"] = 0
        if block.kind == "text":
            where["logprobs"] = self._tokens(index)[told:]
        return self._event(f"response.{_STEMS[block.kind]}.{what}", **fields, **where)

    def _item(self, index: int) -> dict[str, Any]:
        """Return an item of the output, as far as it is written."""
        blocks = self.answer.blocks
        for block in blocks[len(self._items) :]:
            self._items.append(self._fixed(block))
        block = blocks[index]
        if block.kind == "call":
            return self._items[index] | {"arguments": block.text}
        return self._items[index] | {"content": [_part(block, block.text, self._tokens(index))]}

    def _fixed(self, block: Block) -> dict[str, Any]:
        """Return an item's fields that do not change while it is written."""
        key = uuid.uuid4().hex
        match block.kind:
            case "text":
                return {"id": f"msg_{key}", "type": "message", "role": "assistant"}
            case "reasoning":
                return {"id": f"rs_{key}", "type": "reasoning", "summary": []}
        namespace, name = self._body.functions.sent.get(block.name, ("", block.name))
        called = {"name": name, "namespace": namespace} if namespace else {"name": name}
        return {"id": f"fc_{key}", "type": "function_call", "call_id": call_id(), **called}

    def _tokens(self, index: int) -> list[Any]:
        """Return a block's token probabilities, for the tokens known to belong to it."""
        if self.answer.request.logprobs is not None and (reader := self.answer.reader):
            placed = zip(self.answer.pieces, reader.placed, strict=False)
            for piece, block in islice(placed, self._placed, None):
                told = token_logprobs([piece], self._tokenizer)
                self._logprobs[block] += [token.model_dump() for token in told]
                self._placed += 1
        return self._logprobs[index]

    def _usage(self) -> ResponsesUsage:
        answer = self.answer
        prompt, generated = len(answer.request.prompt_tokens), answer.stats.generated_tokens
        return ResponsesUsage(
            input_tokens=prompt,
            input_tokens_details={
                "cached_tokens": answer.stats.cached_prompt_tokens,
                "cache_write_tokens": 0,  # only services that charge for them count them
            },
            output_tokens=generated,
            output_tokens_details={"reasoning_tokens": answer.reasoning_tokens},
            total_tokens=prompt + generated,
        )


def _part(block: Block, text: str, logprobs: list[Any]) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump()
