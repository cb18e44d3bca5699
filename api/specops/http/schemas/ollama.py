"""POST /api/chat, /api/generate, /api/embed and /api/show, as Ollama has them.

Defaults are Ollama's, but for `repeat_penalty`, which counts the last 64 tokens there and all of
them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from specops.http.errors import InvalidField
from specops.http.schemas.chat import ChatTool, applied
from specops.http.schemas.conversation import (
    Conversation,
    Message,
    ToolChoice,
    ToolName,
    call_message,
    result_message,
    with_names,
)
from specops.http.schemas.openai import Only
from specops.http.schemas.options import (
    ANY_OBJECT,
    Body,
    EngineOptions,
    Stops,
    Text,
    json_grammar,
    listed,
)
from specops.request import Grammar, SamplingParams
from specops.text.chat_template import question

_MACHINE = frozenset(
    {
        *("keep_alive", "num_ctx", "num_batch", "num_keep", "num_gpu", "main_gpu", "num_thread"),
        *("low_vram", "numa", "use_mmap", "use_mlock", "repeat_last_n"),
    }
)
_NO_PICTURES = Field(None, description="not supported")


class OllamaRequest(EngineOptions):
    """What chats and prompts share. What stands in `options` may as well stand beside it."""

    without_effect = _MACHINE

    model: str = Field(description="as GET /api/tags tells, with or without `:latest`")
    options: dict[str, Any] | None = Field(
        None, description="the fields from `num_predict` on, and those of `POST /generate`"
    )
    stream: bool | None = Field(True, description="a line of JSON per step")
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description="`json`, or a JSON schema that the answer follows"
    )
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description="whether a model that can think does"
    )
    num_predict: int | None = Field(
        None, ge=-2, description="most tokens of the answer; 0 and less: what the server allows"
    )
    temperature: float | None = Field(0.8, ge=0, le=2, description="0: always the likeliest token")
    top_k: int | None = Field(40, ge=-1, description="draw from the k likeliest tokens only")
    top_p: float | None = Field(0.9, gt=0, le=1)
    repeat_penalty: float | None = Field(
        None, gt=0, le=10, description="Ollama's name of `repetition_penalty`"
    )
    seed: int | None = Field(
        None, ge=-(1 << 63), le=(1 << 63) - 1, description="same seed, same output; below 0: none"
    )
    stop: Stops | None = Field(None, description="strings that end the output; not part of it")

    @model_validator(mode="before")
    @classmethod
    def _spread(cls, given: Any) -> Any:
        options = given.get("options") if isinstance(given, dict) else None
        return {**options, **given} if isinstance(options, dict) else given

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are drawn."""
        seed = None if self.seed is None or self.seed < 0 else self.seed
        drawn = self.drawn(self.temperature, self.top_p, seed)
        penalty = self.repeat_penalty
        return drawn if penalty is None else replace(drawn, repetition_penalty=penalty)

    @property
    def limit(self) -> int | None:
        """The most tokens that the client wants; None: as many as the server gives."""
        return self.num_predict if (self.num_predict or 0) > 0 else None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, however many were given."""
        return listed(self.stop)

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the answer follows."""
        if not self.format:
            return super().grammar
        return ANY_OBJECT if self.format == "json" else json_grammar(self.format)

    def _constraints(self) -> list[str]:
        return [*(["format"] if self.format else []), *super()._constraints()]

    def _conversation(
        self, messages: Sequence[Message], source: str, **fields: Any
    ) -> Conversation:
        return Conversation(
            messages=messages,
            source=source,
            limit=self.limit,
            sampling=lambda _: self.sampling,
            template_options={} if self.think is None else {"enable_thinking": bool(self.think)},
            stops=self.stops,
            stream=self.stream is not False,
            **fields,
        )


class OllamaFunction(Body):
    """What was called."""

    without_effect = frozenset({"index"})

    name: ToolName
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(Body):
    """A call that the assistant made."""

    without_effect = frozenset({"id", "type"})

    function: OllamaFunction


class OllamaMessage(Body):
    """One turn of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text | None = Field(None, description="what the assistant thought")
    images: Annotated[Any, Only(None, [])] = _NO_PICTURES
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: ToolName | None = Field(None, description="whose result a tool's message is")


class OllamaChat(OllamaRequest):
    """A conversation that the assistant goes on with."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = Field(
        default_factory=list, description="none: only tells whether the model is loaded"
    )
    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = Field(
        None, description="functions that the model may call; other types are skipped"
    )

    def conversation(self) -> Conversation:
        """What is asked, without the protocol.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        told = applied(ToolChoice(), self.tools or ())
        return self._conversation(_for_template(self.messages), "messages", **told)


class OllamaPrompt(OllamaRequest):
    """A prompt: a chat model answers it, any other model goes on with it."""

    prompt: Text = Field("", description="empty: only tells whether the model is loaded")
    system: Text | None = Field(None, description="how a chat model should be")
    raw: bool | None = Field(False, description="go on with the prompt as it is")
    suffix: Text | None = Field(
        None, description="what follows the answer, for models that were trained to fill in"
    )
    images: Annotated[Any, Only(None, [])] = _NO_PICTURES
    template: Annotated[Any, Only(None, "")] = Field(None, description="not supported")
    context: Annotated[Any, Only(None, [])] = Field(None, description="not supported: /api/chat")

    def conversation(self) -> Conversation:
        """What is asked of a chat model, without the protocol."""
        return self._conversation(question(self.prompt, self.system or ""), "prompt")


class OllamaTexts(Body):
    """One or several texts to be made vectors of."""

    without_effect = _MACHINE | {"options"}

    model: str = Field(description="as GET /api/tags tells, with or without `:latest`")
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=2048, fail_fast=True)]
    truncate: bool | None = Field(True, description="leave out what the context has no room for")
    dimensions: int | None = Field(
        None, ge=1, description="only the size that the model's embeddings have"
    )

    @property
    def inputs(self) -> list[str]:
        """The texts, however many were given."""
        return [self.input] if isinstance(self.input, str) else self.input


class OllamaName(Body):
    """A model's name."""

    without_effect = frozenset({"verbose", "stream", "insecure"})

    model: str


class OllamaCalled(BaseModel):
    """A call that the assistant makes."""

    function: dict[Literal["name", "arguments"], Any]


class OllamaAnswer(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCalled] | None = None


class OllamaReply(BaseModel):
    """A line of a stream, or all of it in one. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = Field(None, description="from the request's arrival")
    load_duration: int | None = Field(None, description="0: the model stays loaded")
    prompt_eval_count: int | None = Field(None, description="tokens of the prompt")
    prompt_eval_duration: int | None = Field(None, description="from the queue to the first token")
    eval_count: int | None = Field(None, description="tokens generated")
    eval_duration: int | None = Field(None, description="from the first token to the last")


class OllamaChatReply(OllamaReply):
    """What a chat is answered with."""

    message: OllamaAnswer


class OllamaPromptReply(OllamaReply):
    """What a prompt is answered with."""

    response: str
    thinking: str | None = None


class OllamaVectors(BaseModel):
    """The vectors of all texts, in their order."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = Field(description="from the request's arrival, in nanoseconds")
    load_duration: int = 0
    prompt_eval_count: int = Field(description="tokens of all texts")


def _for_template(turns: Sequence[OllamaMessage]) -> list[Message]:
    """What chat templates take: calls have ids there, and each result names its call's."""
    told: list[Message] = []
    waiting: list[tuple[str, str]] = []  # calls without a result: id and name
    count = 0
    for turn in turns:
        if turn.role == "assistant":
            calls = []
            for call in turn.tool_calls or ():
                count += 1
                calls.append((f"{count:09d}", call.function.name, call.function.arguments))
            waiting += [call[:2] for call in calls]
            told.append(call_message(turn.content, calls, turn.thinking or ""))
        elif turn.role == "tool":
            mine = [call for call in waiting if turn.tool_name in (None, call[1])]
            if not mine:
                raise InvalidField("messages", "a tool's message answers no call before it")
            waiting.remove(mine[0])
            told.append(result_message(mine[0][0], turn.content, mine[0][1]))
        else:
            told.append({"role": turn.role, "content": turn.content})
    return with_names(told)
