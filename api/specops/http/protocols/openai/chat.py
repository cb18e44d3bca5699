"""POST /v1/chat/completions: the assistant's next message, in OpenAI's protocol."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field, model_validator

from specops.engine.engine import Engine
from specops.http.answering.prompt import (
    ChatTool,
    Content,
    Conversation,
    Function,
    Mode,
    Reasoning,
    ToolChoice,
    call_message,
    conversation,
    joined,
    result_message,
    thinks_at,
)
from specops.http.answering.schema import (
    Body,
    FreeObject,
    Integer,
    Items,
    MostTokens,
    Some,
    Text,
    Tools,
    Unsupported,
    absent,
    conflict,
    names_of,
)
from specops.http.answering.submit import chat_tokens, check_model, generate_chat
from specops.http.answering.writer import (
    Generation,
    Step,
    TokenLogprob,
    call_id,
    joined_text,
    token_events,
    token_logprobs,
)
from specops.http.errors import InvalidField
from specops.http.protocol import Prompt, Protocol
from specops.http.protocols.openai.common import (
    RESPONSES,
    InputTokens,
    OpenAiRequest,
    OpenAiWriter,
    PromptLogprobs,
    Timings,
    Usage,
    timings,
    usage,
)
from specops.http.state import Ctx
from specops.request import TokenOutput
from specops.text.tools.blocks import Block

# The id of calls in OpenAI's older form, which has none. Mistral's templates need nine characters.
_FUNCTION_CALL = "functions"


class FunctionCall(Body):
    """The function that was called."""

    name: Text
    arguments: Text = Field(description="JSON")


class CustomCall(Body):
    """The custom tool that was called; its input is not JSON."""

    name: Text
    input: Text


class ToolCall(Body):
    """A call that the assistant made."""

    id: Text
    type: Literal["function", "custom"] = "function"
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    def parts(self) -> tuple[str, str, Any]:
        """Return the id, the name and the arguments."""
        if self.type == "custom" and self.custom is not None:
            return self.id, self.custom.name, {"input": self.custom.input}
        if self.function is None:
            message = f"a call of the type {self.type!r} has no {self.type}"
            raise InvalidField("messages", message, code="missing_parameter")
        return self.id, self.function.name, self.function.arguments


class Message(Body):
    """One turn of the conversation."""

    role: Text = Field(
        description="system, developer, user, assistant, tool, function, or a role of the "
        "template's"
    )
    content: Content | None = Field(
        None, description="null only if the role is assistant, tool or function"
    )
    name: Text | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: Text | None = Field(None, description="id of the call that a result answers")
    reasoning_content: Text | None = Field(
        None,
        validation_alias=names_of("reasoning_content"),
        description="the assistant's reasoning",
    )
    refusal: Text | None = Field(None, description="the assistant's refusal, in place of an answer")
    function_call: FunctionCall | None = Field(None, description="older form of `tool_calls`")

    def for_template(self, ignored: list[str]) -> dict[str, Any]:
        """Return the message for a chat template: plain text, and a role that templates know.

        Args:
            ignored: receives the names of the parts left out.
        """
        name = {} if self.name is None else {"name": self.name}
        if self.role in ("tool", "function"):
            call_id = self.tool_call_id if self.role == "tool" else _FUNCTION_CALL
            if call_id is None:
                message = "a message of the role 'tool' needs its tool_call_id"
                raise InvalidField("messages", message, code="missing_parameter")
            text = joined(self.content, "messages", ignored, result=True)
            return result_message(call_id, text, self.name)
        if self.role == "assistant":
            text = joined(self.content, "messages", ignored) or self.refusal or ""
            calls = [call.parts() for call in self.tool_calls or ()]
            if (call := self.function_call) is not None:
                calls.append((_FUNCTION_CALL, call.name, call.arguments))
            return call_message(text, calls, self.reasoning_content or "") | name
        if self.content is None:
            raise InvalidField("messages", "a message has no content", code="missing_parameter")
        # `developer` is OpenAI's newer name of `system`.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": joined(self.content, "messages")} | name


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: Function


class AllowedTools(Body):
    """The tools that may be called, among those that the prompt describes."""

    mode: Literal["auto", "required"]
    tools: Some[NamedTool]


class AllowedChoice(Body):
    """A choice of some tools: the model may or must call one of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


_Chosen = Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


class ChatRequest(OpenAiRequest):
    """A conversation that the assistant continues."""

    ignored_fields = OpenAiRequest.ignored_fields | {
        *("metadata", "store", "service_tier", "safety_identifier", "prediction"),
        *("verbosity", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        "moderation",
    }

    messages: Some[Message] = Field(description="the conversation")
    max_completion_tokens: MostTokens | None = Field(
        None, description="default and -1: as many as the context and the server allow"
    )
    max_tokens: MostTokens | None = Field(None, description="older name of max_completion_tokens")
    n_predict: Integer = Field(
        None, ge=-2, description="maximum tokens of the answer; 0: only compute the prompt"
    )
    logprobs: bool | None = Field(False, description="report each token's probability")
    top_logprobs: Integer = Field(
        None,
        ge=0,
        le=20,
        description="with `logprobs`: also report this many alternatives",
    )

    tools: Tools[ChatTool] | None = Field(
        None, description="functions that the model may call; other types are skipped"
    )
    tool_choice: Mode | _Chosen | None = None
    parallel_tool_calls: bool | None = Field(True, description="false: one call at most")
    reasoning_effort: str | None = Field(None, description="`none`: no reasoning")
    reasoning: Reasoning | None = Field(None, description="`reasoning_effort`, and a token budget")
    thinking_budget_tokens: Integer = Field(
        None,
        validation_alias=names_of("thinking_budget_tokens"),
        description="maximum tokens of reasoning, also by llama-server's and vLLM's names; -1: as "
        "many as the answer",
    )
    reasoning_format: Literal["auto", "deepseek", "deepseek-legacy", "none"] | None = Field(
        None,
        description="`none`: reasoning stays in `content`, between the model's marks; "
        "`deepseek-legacy`: so it does in a stream",
    )
    chat_template_kwargs: FreeObject | None = Field(
        None, description="additional variables for the chat template, such as `enable_thinking`"
    )
    truncate_prompt_tokens: Annotated[Any, Unsupported(None)] = Field(
        None, description="not supported: a conversation would be cut within a message"
    )
    return_tokens: bool | None = Field(
        False, description="streams: each choice has `tokens`, like the events of `/generate`"
    )
    functions: Annotated[Any, Unsupported(None, [])] = Field(
        None, description="not supported: use `tools`"
    )
    function_call: Annotated[Any, Unsupported(None, "none", "auto")] = Field(
        None, description="not supported: use `tool_choice`"
    )
    modalities: Annotated[Any, Unsupported(None, ["text"])] = Field(
        None, description="not supported: this server only writes text"
    )
    audio: Annotated[Any, Unsupported(None)] = Field(None, description="not supported")
    web_search_options: Annotated[Any, Unsupported(None)] = Field(None, description="not supported")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise conflict("top_logprobs", "requires `logprobs` to be true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise conflict("max_tokens", "cannot be combined with `max_completion_tokens`")
        return self

    @property
    def limit(self) -> int | None:
        """Maximum tokens of an answer; None: as many as the server allows."""
        names = (self.max_completion_tokens, self.max_tokens, self.n_predict)
        limit = next((value for value in names if value is not None), -1)
        return None if limit < 0 else limit

    @property
    def token_logprobs(self) -> int | None:
        """Number of likeliest tokens to report for each position."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> Conversation:
        """Return the conversation in the form that all protocols share.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        reasoning = self.reasoning or Reasoning.model_construct()
        if (budget := self.thinking_budget_tokens) is None:
            budget = reasoning.max_tokens
        inline = {"none", "deepseek-legacy"} if self.stream else {"none"}
        ignored: list[str] = []
        return conversation(
            [message.for_template(ignored) for message in self.messages],
            "messages",
            self.tools,
            self._choice(),
            thinks=thinks_at(self.reasoning_effort or reasoning.effort),
            ignored=ignored,
            max_reasoning_tokens=budget if (budget or 0) >= 0 else None,
            inline_reasoning=self.reasoning_format in inline,
            template_options=self.chat_template_kwargs,
        )

    def _choice(self) -> ToolChoice:
        once = self.parallel_tool_calls is False
        match self.tool_choice:
            case NamedTool(function=function):
                return ToolChoice("required", [function.name], once=True)
            case AllowedChoice(allowed_tools=allowed):
                names = [tool.function.name for tool in allowed.tools]
                return ToolChoice(allowed.mode, names, once)
            case mode:
                return ToolChoice(mode, once=once)


class ChatLogprobs(BaseModel):
    """The probabilities of the answer's tokens, one item per token."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerCall(BaseModel):
    """A call that the assistant makes."""

    id: str
    type: Literal["function"] = "function"
    function: dict[Literal["name", "arguments"], str] = Field(description="arguments are JSON")


class AnswerMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="null if the assistant only calls tools")
    refusal: None = None
    annotations: list[Any] = Field(default=[], description="empty: nothing was searched")
    reasoning_content: str | None = Field(
        None, exclude_if=absent, description="the assistant's reasoning, if any"
    )
    tool_calls: list[AnswerCall] | None = Field(None, exclude_if=absent)


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = Field(None, exclude_if=absent)


class ChatCompletion(BaseModel):
    """All answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] | None = Field(None, exclude_if=absent)


PATH = "/v1/chat/completions"
_DELTAS = {"text": "content", "reasoning": "reasoning_content"}
router = APIRouter(tags=["openai"])
PROTOCOL = Protocol(
    router=router,
    prefixes=(PATH,),
    prompts={PATH: Prompt("messages", "chat")},
)


@router.post(PATH, response_model=ChatCompletion, responses=RESPONSES)
async def chat_completions(body: ChatRequest, ctx: Ctx) -> Response:
    """Continue a conversation.

    The model's chat template renders the messages as a prompt. With `stream` the answer is a
    series of server-sent events with a `delta` in place of the message; the last one also has
    `timings`. With `include_usage`, a further one has these and `usage`, but no choices. `[DONE]`
    ends the stream.
    """
    engine = check_model(ctx, body.model or "")
    generation = await generate_chat(ctx, body, body.conversation)
    return await _Writer(generation, engine, body).response(stream=body.streams)


@router.post(f"{PATH}/input_tokens", responses=RESPONSES)
async def input_tokens(body: ChatRequest, ctx: Ctx) -> InputTokens:
    """Count the tokens of a conversation's prompt."""
    engine = check_model(ctx, body.model or "")
    return InputTokens(input_tokens=await chat_tokens(ctx, body, engine, body.conversation))


class _Writer(OpenAiWriter):
    def __init__(self, generation: Generation, engine: Engine, body: ChatRequest) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(generation, engine, "chatcmpl", kind, body)
        self._shows_tokens = bool(body.return_tokens)
        self._begun: set[int] = set()

    def whole(self) -> ChatCompletion:
        answers = self.generation.answers
        ids = [self.token_ids(index, answer.pieces) for index, answer in enumerate(answers)]
        return ChatCompletion(
            **self.heading,
            choices=[
                ChatChoice(
                    index=index,
                    message=_message(answer.blocks),
                    logprobs=self._logprobs(answer.pieces),
                    finish_reason=answer.chat_finish_reason,
                    token_ids=ids[index].get("token_ids"),
                )
                for index, answer in enumerate(answers)
            ],
            usage=usage(self.generation),
            timings=timings(answers),
            prompt_logprobs=self.prompt_logprobs(0),
            prompt_token_ids=ids[0].get("prompt_token_ids"),
        )

    def step(self, step: Step) -> bytes:
        index, events, pieces = step.index, b"", step.output.pieces
        ids = self.token_ids(index, pieces)
        if index not in self._begun:
            prompt = {} if self._begun else ids  # all answers have the same prompt
            self._begun.add(index)
            first = {"role": "assistant", "content": "", "refusal": None}
            events += self._chunk(index, first, prompt_token_ids=prompt.get("prompt_token_ids"))
        logprobs = self._logprobs(pieces)
        deltas = list(self._deltas(step))
        told: dict[str, Any] = {}
        if pieces and self._shows_tokens:
            told["tokens"] = token_events(step.output)
        if pieces and ids:
            told["token_ids"] = ids["token_ids"]
        shown = logprobs or told or step.output.prompt_computed
        if shown and not deltas:  # the text of these tokens is held back, or there are none yet
            deltas = [{"content": ""}]
        for delta in deltas:
            events += self._chunk(index, delta, logprobs, told)
            logprobs, told = None, {}
        if step.output.finish:
            finish = self.generation.answers[index].chat_finish_reason
            events += self._chunk(index, {}, finish=finish)
        return events

    def _deltas(self, step: Step) -> Iterator[dict[str, Any]]:
        """Yield a step's deltas in OpenAI's form: a call's name, then pieces of its arguments."""
        blocks = self.generation.answers[step.index].blocks
        for position, text in step.deltas:
            block = blocks[position]
            if block.kind != "call":
                yield {_DELTAS[block.kind]: text}
                continue
            number = sum(other.kind == "call" for other in blocks[:position])
            call: dict[str, Any] = {"index": number, "function": {"arguments": text}}
            if not text:
                call |= {"id": call_id(), "type": "function"}
                call["function"]["name"] = block.name
            yield {"tool_calls": [call]}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: ChatLogprobs | None = None,
        tokens: Mapping[str, Any] = MappingProxyType({}),
        *,
        finish: str | None = None,
        prompt_token_ids: list[int] | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs and logprobs.model_dump(),
            "finish_reason": finish,
        }
        more = {"prompt_token_ids": prompt_token_ids} if prompt_token_ids else {}
        return self.chunk(choice | dict(tokens), **more)

    def _logprobs(self, pieces: Sequence[TokenOutput]) -> ChatLogprobs | None:
        """Return the tokens' probabilities; None if there are no tokens, or no request for them."""
        as_ids = bool(self._body.return_tokens_as_token_ids)
        content = token_logprobs(pieces, self.engine.tokenizer, as_ids=as_ids)
        return ChatLogprobs(content=content) if content else None


def _message(blocks: Sequence[Block]) -> AnswerMessage:
    calls = [
        AnswerCall(id=call_id(), function={"name": block.name, "arguments": block.text})
        for block in blocks
        if block.kind == "call"
    ]
    return AnswerMessage(
        content=joined_text(blocks, "text") or (None if calls else ""),
        reasoning_content=joined_text(blocks, "reasoning") or None,
        tool_calls=calls or None,
    )
