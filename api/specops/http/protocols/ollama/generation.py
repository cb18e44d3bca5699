"""POST /api/chat and /api/generate, in Ollama's protocol.

A stream is a line of JSON per step. The served model is always loaded; answers repeat the
request's name for it. Defaults are Ollama's, except for `repeat_penalty`: Ollama counts the last
64 tokens, this server counts all.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field, model_validator

from specops.engine.engine import Engine
from specops.http.answering.prompt import (
    ChatTool,
    Conversation,
    Function,
    Message,
    call_message,
    conversation,
    fill_in,
    prompt_tokens,
    result_message,
)
from specops.http.answering.schema import (
    ANY_OBJECT,
    ClampedInteger,
    FreeObject,
    Integer,
    Items,
    LlamaOptions,
    Text,
    TokenId,
    Tools,
    Unsupported,
    json_grammar,
)
from specops.http.answering.submit import Prepared, generate, generate_chat
from specops.http.answering.writer import (
    Generation,
    Step,
    TokenLogprob,
    Writer,
    arguments,
    call_id,
    joined_text,
    token_logprobs,
)
from specops.http.errors import InvalidField
from specops.http.protocol import Prompt, Protocol
from specops.http.protocols.ollama.common import (
    LINES,
    MACHINE_OPTIONS,
    RESPONSES,
    OllamaBody,
    OllamaModel,
    nanoseconds,
    plain_answer,
    require_model,
    timestamp,
)
from specops.http.state import Ctx
from specops.request import Grammar, TokenOutput
from specops.sampling_defaults import SamplingDefaults
from specops.text.chat_template import question
from specops.text.json_values import line

_NO_IMAGES = Field(None, description="not supported: this server only reads text")


class OllamaRequest(OllamaModel, LlamaOptions):
    """The fields that chats and prompts share; those of `options` may also be at the top level."""

    ignored_fields = MACHINE_OPTIONS
    default_sampling = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.9)

    options: dict[str, Any] | None = Field(
        None, description="the fields from `num_predict` on, and those of `POST /generate`"
    )
    stream: bool | None = Field(True, description="a line of JSON per step")
    format: Literal["", "json"] | FreeObject | None = Field(
        None, description="`json`, or a JSON schema that the answer follows"
    )
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description="whether the model reasons, if it can"
    )
    truncate: bool | None = Field(
        True, description="drop the oldest messages of a conversation that is too long"
    )
    logprobs: bool | None = Field(False, description="report each token's probability")
    top_logprobs: Integer = Field(
        0, ge=0, le=20, description="with `logprobs`: also report this many alternatives"
    )
    num_predict: ClampedInteger | None = Field(
        None, description="maximum tokens of the answer; 0 or less: as many as the server allows"
    )

    @model_validator(mode="before")
    @classmethod
    def _spread(cls, raw: Any) -> Any:
        options = raw.get("options") if isinstance(raw, dict) else None
        return {**options, **raw} if isinstance(options, dict) else raw

    @property
    def limit(self) -> int | None:
        """Maximum tokens of the answer; None: as many as the server allows."""
        return self.num_predict if (self.num_predict or 0) > 0 else None

    @property
    def token_logprobs(self) -> int | None:
        """Number of likeliest tokens to report for each position."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream."""
        return self.stream is not False

    @property
    def thinks(self) -> bool | None:
        """Whether the model reasons, if it can; None: the template's default."""
        return None if self.think is None else bool(self.think)

    @cached_property
    def constraints(self) -> dict[str, Grammar]:
        """Each field that constrains the answer, and its grammar."""
        own = {}
        if self.format not in (None, ""):
            own["format"] = ANY_OBJECT if self.format == "json" else json_grammar(self.format)
        return own | super().constraints


class OllamaFunction(OllamaBody):
    """The function that was called."""

    index: int | None = None
    name: Text
    arguments: FreeObject | Text | None = Field(None, description="an object, or its JSON")


class OllamaCall(OllamaBody):
    """A call that the assistant made."""

    type: Text | None = None
    id: Text | None = None
    function: OllamaFunction


class OllamaMessage(OllamaBody):
    """One turn of the conversation."""

    role: Text = Field(
        description="`system`, `user`, `assistant`, `tool`, or a role of the template's"
    )
    content: Text | None = ""
    thinking: Text | None = Field(None, description="the assistant's reasoning")
    images: Annotated[Any, Unsupported(None, [])] = _NO_IMAGES
    tool_calls: Items[OllamaCall] | None = None
    tool_name: Text | None = Field(None, description="name of the tool that a result is from")
    tool_call_id: Text | None = Field(None, description="id of the call that a result answers")

    @property
    def speaker(self) -> str:
        """The role, as templates name it."""
        role = self.role.lower()
        return {"developer": "system", "function": "tool"}.get(role, role)


class OllamaToolFunction(OllamaBody, Function):
    """A function that the model may call."""


class OllamaTool(OllamaBody, ChatTool):
    """A tool that the model may call."""

    type: Text = "function"
    function: OllamaToolFunction | None = None


class OllamaChat(OllamaRequest):
    """A conversation that the assistant continues."""

    messages: Items[OllamaMessage] | None = Field(
        None, description="none: only ask whether the model is loaded"
    )
    tools: Tools[OllamaTool] | None = Field(
        None, description="functions that the model may call; other types are skipped"
    )

    def conversation(self) -> Conversation:
        """Return the conversation in the form that all protocols share.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        return conversation(
            _for_template(self.messages or ()),
            "messages",
            self.tools,
            truncates=self.truncate is not False,
            thinks=self.thinks,
        )


class OllamaPrompt(OllamaRequest):
    """A prompt: a chat model answers it, any other model continues it."""

    prompt: Text | None = Field("", description="empty: only ask whether the model is loaded")
    system: Text | None = Field(None, description="the system message")
    raw: bool | None = Field(False, description="continue the prompt without the chat template")
    suffix: Text | None = Field(None, description="the text after the answer")
    context: Items[TokenId] | None = Field(
        None, description="an earlier answer's `context`, to continue from"
    )
    images: Annotated[Any, Unsupported(None, [])] = _NO_IMAGES
    template: Annotated[Any, Unsupported(None, "")] = Field(
        None, description="not supported: the model's own template, or `raw`"
    )

    def conversation(self) -> Conversation:
        """Return the prompt as a question to a chat model.

        A `context` has its system message already.
        """
        before = tuple(self.context or ())
        return conversation(
            list(question(self.prompt or "", "" if before else self.system or "")),
            "prompt",
            before=before,
            thinks=self.thinks,
        )

    def check(self) -> None:
        """Refuse fields that exclude each other.

        Raises:
            InvalidField: `raw` is set together with a field that needs the template.
        """
        for name in ("system", "context"):
            if self.raw and getattr(self, name):
                raise InvalidField(
                    "raw", f"cannot be combined with `{name}`, which needs the template"
                )


class OllamaCalled(BaseModel):
    """A call that the assistant makes."""

    id: str
    function: dict[Literal["index", "name", "arguments"], Any]


class OllamaAnswer(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCalled] | None = None


class OllamaReply(BaseModel):
    """A line of a stream, or the whole answer. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    logprobs: list[TokenLogprob] | None = Field(None, description="of the new tokens")
    total_duration: int | None = Field(None, description="from the request's arrival")
    load_duration: int | None = Field(None, description="0: the model stays loaded")
    prompt_eval_count: int | None = Field(None, description="prompt tokens")
    prompt_eval_duration: int | None = Field(None, description="from the queue to the first token")
    eval_count: int | None = Field(None, description="tokens generated")
    eval_duration: int | None = Field(None, description="from the first token to the last")


class OllamaChatReply(OllamaReply):
    """The answer to a chat."""

    message: OllamaAnswer


class OllamaPromptReply(OllamaReply):
    """The answer to a prompt."""

    response: str
    thinking: str | None = None
    context: list[int] | None = Field(
        None, description="tokens of the prompt and answer, for the next request's `context`"
    )


def _for_template(turns: Sequence[OllamaMessage]) -> list[Message]:
    """Return the messages for a chat template, which needs an id for each call and result.

    A result answers the call with its id, or else its tool's first unanswered call. A result may
    have no call: the client may have left out earlier messages.
    """
    messages: list[Message] = []
    unanswered: list[tuple[str, str]] = []  # calls without a result: id and name
    count = 0

    def new_id() -> str:
        nonlocal count
        count += 1
        return f"{count:09d}"  # Mistral's templates accept nine characters

    for turn in turns:
        text = turn.content or ""
        if turn.speaker == "assistant":
            calls = [
                (call.id or new_id(), call.function.name, call.function.arguments or {})
                for call in turn.tool_calls or ()
            ]
            unanswered += [call[:2] for call in calls]
            messages.append(call_message(text, calls, turn.thinking or ""))
        elif turn.speaker == "tool":
            name = turn.tool_name or ""
            by_id = [call for call in unanswered if call[0] == turn.tool_call_id]
            by_name = [call for call in unanswered if not name or call[1] == name]
            answered = (by_id or by_name or [(turn.tool_call_id or new_id(), name)])[0]
            if answered in unanswered:
                unanswered.remove(answered)
            messages.append(result_message(answered[0], text, answered[1] or None))
        else:
            messages.append({"role": turn.speaker, "content": text})
    return messages


CHAT_PATH, PROMPT_PATH = "/api/chat", "/api/generate"
router = APIRouter(tags=["ollama"])
PROTOCOL = Protocol(
    router=router,
    prompts={
        CHAT_PATH: Prompt("messages", "chat"),
        PROMPT_PATH: Prompt("prompt", "text_completion"),
    },
)

Calls = Sequence[dict[str, Any]]


@router.post(CHAT_PATH, response_model=OllamaChatReply, responses=RESPONSES)
async def chat(body: OllamaChat, ctx: Ctx) -> Response:
    """Continue a conversation.

    With `stream` (the default) the answer is a line of JSON per step; the last one has the
    figures.
    """
    engine = require_model(ctx, body)
    if not body.messages:
        message = OllamaAnswer(content="")
        return plain_answer(OllamaChatReply(**_nothing_asked(body), message=message), ctx, body)
    generation = await generate_chat(ctx, body, body.conversation)
    return await _ChatWriter(generation, engine, body).response(stream=body.streams)


@router.post(PROMPT_PATH, response_model=OllamaPromptReply, responses=RESPONSES, name="generate")
async def answer_prompt(body: OllamaPrompt, ctx: Ctx) -> Response:
    """Answer a prompt; with `raw`, or if the model is no chat model, continue it."""
    engine = require_model(ctx, body)
    body.check()
    before = prompt_tokens(body.context or [], engine, "context")
    if not (body.prompt or body.suffix):
        return plain_answer(OllamaPromptReply(**_nothing_asked(body), response=""), ctx, body)
    if not (body.raw or body.suffix) and (engine.info.chat or body.system):
        generation = await generate_chat(ctx, body, body.conversation)
    else:
        gap, prompt, suffix = fill_in(body.suffix, engine), body.prompt or "", body.suffix or ""

        def prepare() -> Prepared:
            if gap:
                asked = gap.prompt(prompt, suffix, engine.info.context)
                return Prepared.of([asked], prompt, gap)
            tokens = (*before, *engine.encode_chat(prompt)) if before else engine.encode(prompt)
            return Prepared(prompts=[tokens], logged_prompt=prompt)

        generation = await generate(ctx, body, prepare)
    return await _PromptWriter(generation, engine, body).response(stream=body.streams)


def _nothing_asked(body: OllamaRequest) -> dict[str, Any]:
    """Return the answer to an empty request, with which clients load or unload a model."""
    return _heading(body) | {"done": True, "done_reason": body.done_reason}


class _Writer(Writer):
    media_type = LINES
    pause = b""  # a line of JSON has no comments
    exclude_none = True
    reply: ClassVar[type[OllamaReply]]

    def __init__(self, generation: Generation, engine: Engine, body: OllamaRequest) -> None:
        super().__init__(generation)
        self._engine = engine
        self._body = body
        (self._answer,) = generation.answers

    def _fields(self, text: str, reasoning: str, calls: Calls) -> dict[str, Any]:
        """Return the reply's fields for text, reasoning and calls."""
        raise NotImplementedError

    def whole(self) -> OllamaReply:
        answer = self._answer
        text, reasoning = answer.text, ""
        if answer.reader:
            text, reasoning = (joined_text(answer.blocks, kind) for kind in ("text", "reasoning"))
        fields = self._fields(text, reasoning, self._calls()) | self._logprobs(answer.pieces)
        return self.reply(**_heading(self._body), **fields, **self._figures())

    def step(self, step: Step) -> bytes:
        text, reasoning = step.output.text, ""
        if self._answer.reader:
            kinds = [block.kind for block in self._answer.blocks]
            text, reasoning = (
                "".join(text for index, text in step.deltas if kinds[index] == which)
                for which in ("text", "reasoning")
            )
        logprobs = self._logprobs(step.output.pieces)
        if not (text or reasoning or logprobs):
            return b""
        return self._line(text, reasoning, (), logprobs | {"done": False})

    def end(self) -> bytes:
        calls = self._calls()
        called = self._line("", "", calls, {"done": False}) if calls else b""
        return called + self._line("", "", (), self._figures())

    def _line(self, text: str, reasoning: str, calls: Calls, more: dict[str, Any]) -> bytes:
        fields = _heading(self._body) | self._fields(text, reasoning, calls) | more
        return line(fields) + b"\n"

    def _calls(self) -> Calls:
        called = [block for block in self._answer.blocks if block.kind == "call"]
        return [
            {
                "id": call_id(),
                "function": {
                    "index": index,
                    "name": block.name,
                    "arguments": arguments(block.text),
                },
            }
            for index, block in enumerate(called)
        ]

    def _logprobs(self, pieces: Sequence[TokenOutput]) -> dict[str, Any]:
        reported = token_logprobs(pieces, self._engine.tokenizer)
        return {"logprobs": [token.model_dump() for token in reported]} if reported else {}

    def _tokens(self) -> list[int]:
        """Return the tokens of the prompt and answer, without the end token."""
        tokens = [piece.token for piece in self._answer.pieces]
        while tokens and not self._engine.tokenizer.decode(tokens[-1:]):
            tokens.pop()
        return [*self._answer.request.prompt_tokens, *tokens]

    def _figures(self) -> dict[str, Any]:
        """Return the last line's fields; clients divide by these durations, so none is 0."""
        answer = self._answer
        stats = answer.stats
        body = self._body
        goes_on = isinstance(body, OllamaPrompt) and not body.raw
        context = {"context": self._tokens()} if goes_on else {}
        return context | {
            "done": True,
            "done_reason": answer.finish_reason,
            "total_duration": nanoseconds(time.monotonic() - self.generation.arrival),
            "load_duration": 0,
            "prompt_eval_count": len(answer.request.prompt_tokens),
            "prompt_eval_duration": nanoseconds(stats.prefill_seconds),
            "eval_count": stats.generated_tokens,
            "eval_duration": nanoseconds(stats.decode_seconds),
        }


class _ChatWriter(_Writer):
    reply = OllamaChatReply

    def _fields(self, text: str, reasoning: str, calls: Calls) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class _PromptWriter(_Writer):
    reply = OllamaPromptReply

    def _fields(self, text: str, reasoning: str, calls: Calls) -> dict[str, Any]:
        del calls  # a prompt has no tools
        return {"response": text} | ({"thinking": reasoning} if reasoning else {})


def _heading(body: OllamaRequest) -> dict[str, Any]:
    return {"model": body.model_name, "created_at": timestamp(datetime.now(UTC))}
