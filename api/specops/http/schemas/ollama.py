"""Bodies of Ollama's POST /api/chat, /api/generate, /api/embed and /api/show.

Defaults are Ollama's, except for `repeat_penalty`: Ollama counts the last 64 tokens, this server
counts all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from specops.http.errors import InvalidField
from specops.http.schemas.body import Body, FreeObject, Only, Text
from specops.http.schemas.chat import ChatTool
from specops.http.schemas.constraints import ANY_OBJECT, json_grammar
from specops.http.schemas.conversation import (
    Conversation,
    Message,
    ToolName,
    call_message,
    conversation,
    result_message,
)
from specops.http.schemas.options import SeededOptions
from specops.request import Grammar
from specops.sampling_defaults import SamplingDefaults
from specops.text.chat_template import question

_MACHINE_OPTIONS = frozenset(
    {
        *("keep_alive", "num_ctx", "num_batch", "num_keep", "num_gpu", "main_gpu", "num_thread"),
        *("low_vram", "numa", "use_mmap", "use_mlock", "repeat_last_n"),
    }
)
_NO_IMAGES = Field(None, description="not supported")


class OllamaRequest(SeededOptions):
    """The fields that chats and prompts share. Fields of `options` may also stand beside it."""

    without_effect = _MACHINE_OPTIONS
    usual = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.9)

    model: str = Field(description="as GET /api/tags tells, with or without `:latest`")
    options: dict[str, Any] | None = Field(
        None, description="the fields from `num_predict` on, and those of `POST /generate`"
    )
    stream: bool | None = Field(True, description="a line of JSON per step")
    format: Literal["", "json"] | FreeObject | None = Field(
        None, description="`json`, or a JSON schema that the answer follows"
    )
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description="whether the model thinks, if it can"
    )
    num_predict: int | None = Field(
        None, ge=-2, description="most tokens of the answer; 0 and less: what the server allows"
    )
    repeat_penalty: float | None = Field(
        None, gt=0, le=10, description="Ollama's name of `repetition_penalty`"
    )

    @model_validator(mode="before")
    @classmethod
    def _spread(cls, given: Any) -> Any:
        options = given.get("options") if isinstance(given, dict) else None
        return {**options, **given} if isinstance(options, dict) else given

    def choice_seed(self, choice: int) -> int | None:
        """Return the seed; a negative one means that there is none."""
        return None if self.seed is None or self.seed < 0 else self.seed

    def drawing(self, model: SamplingDefaults) -> SamplingDefaults:
        """Return how tokens are drawn; the penalty has two names."""
        found, penalty = super().drawing(model), self.repeat_penalty
        return found if penalty is None else found._replace(repetition_penalty=penalty)

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer; None: as many as the server allows."""
        return self.num_predict if (self.num_predict or 0) > 0 else None

    @property
    def streams(self) -> bool:
        """The answer is a stream."""
        return self.stream is not False

    @property
    def template_options(self) -> dict[str, Any]:
        """More variables for the chat template."""
        return {} if self.think is None else {"enable_thinking": bool(self.think)}

    @cached_property
    def constraints(self) -> dict[str, Grammar]:
        """Each field that constrains the answer, and its grammar."""
        own = {}
        if self.format:
            own["format"] = ANY_OBJECT if self.format == "json" else json_grammar(self.format)
        return own | super().constraints


class OllamaFunction(Body):
    """The function that was called."""

    without_effect = frozenset({"index"})

    name: ToolName
    arguments: FreeObject = Field(default_factory=dict)


class OllamaCall(Body):
    """A call that the assistant made."""

    without_effect = frozenset({"id", "type"})

    function: OllamaFunction


class OllamaMessage(Body):
    """One turn of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text | None = Field(None, description="what the assistant thought")
    images: Annotated[Any, Only(None, [])] = _NO_IMAGES
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: ToolName | None = Field(None, description="of a result: the tool that was called")


class OllamaChat(OllamaRequest):
    """A conversation that the assistant continues."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = Field(
        default_factory=list, description="none: asks only whether the model is loaded"
    )
    tools: Annotated[list[ChatTool], Field(fail_fast=True)] | None = Field(
        None, description="functions that the model may call; other types are skipped"
    )

    def conversation(self) -> Conversation:
        """Return the conversation without the protocol.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        messages = _for_template(self.messages)
        return conversation(
            messages, "messages", self.tools, template_options=self.template_options
        )


class OllamaPrompt(OllamaRequest):
    """A prompt: a chat model answers it, any other model continues it."""

    prompt: Text = Field("", description="empty: asks only whether the model is loaded")
    system: Text | None = Field(None, description="the system message")
    raw: bool | None = Field(False, description="continue the prompt without the chat template")
    suffix: Text | None = Field(
        None, description="what follows the answer, for models that were trained to fill in"
    )
    images: Annotated[Any, Only(None, [])] = _NO_IMAGES
    template: Annotated[Any, Only(None, "")] = Field(None, description="not supported")
    context: Annotated[Any, Only(None, [])] = Field(None, description="not supported: /api/chat")

    def conversation(self) -> Conversation:
        """Return the prompt as a question to a chat model."""
        messages = question(self.prompt, self.system or "")
        return conversation(messages, "prompt", template_options=self.template_options)


class OllamaTexts(Body):
    """One or several texts to embed."""

    without_effect = _MACHINE_OPTIONS | {"options"}

    model: str = Field(description="as GET /api/tags tells, with or without `:latest`")
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=2048, fail_fast=True)]
    truncate: bool | None = Field(True, description="cut texts that are longer than the context")
    dimensions: int | None = Field(
        None, ge=1, description="only the size that the model's embeddings have"
    )

    @property
    def inputs(self) -> list[str]:
        """The texts as a list, also where there is only one."""
        return [self.input] if isinstance(self.input, str) else self.input


class OllamaName(Body):
    """A model's name."""

    without_effect = frozenset({"verbose", "stream", "insecure"})

    model: str


class OllamaCalled(BaseModel):
    """A call that the assistant makes."""

    function: dict[Literal["name", "arguments"], Any]


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
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = Field(None, description="from the request's arrival")
    load_duration: int | None = Field(None, description="0: the model stays loaded")
    prompt_eval_count: int | None = Field(None, description="tokens of the prompt")
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


class OllamaVectors(BaseModel):
    """The vectors of all texts, in their order."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = Field(description="from the request's arrival, in nanoseconds")
    load_duration: int = 0
    prompt_eval_count: int = Field(description="tokens of all texts")


def _for_template(turns: Sequence[OllamaMessage]) -> list[Message]:
    """Return the messages for a chat template: it wants an id for each call and its result."""
    messages: list[Message] = []
    unanswered: list[tuple[str, str]] = []  # calls without a result: id and name
    count = 0
    for turn in turns:
        if turn.role == "assistant":
            calls = []
            for call in turn.tool_calls or ():
                count += 1
                calls.append((f"{count:09d}", call.function.name, call.function.arguments))
            unanswered += [call[:2] for call in calls]
            messages.append(call_message(turn.content, calls, turn.thinking or ""))
        elif turn.role == "tool":
            answered = [call for call in unanswered if turn.tool_name in (None, call[1])]
            if not answered:
                raise InvalidField("messages", "a tool's message answers no call before it")
            unanswered.remove(answered[0])
            messages.append(result_message(answered[0][0], turn.content, answered[0][1]))
        else:
            messages.append({"role": turn.role, "content": turn.content})
    return messages
