"""Bodies of Ollama's POST /api/chat, /api/generate, /api/embed, /api/show and their kind.

Defaults are Ollama's, except for `repeat_penalty`: Ollama counts the last 64 tokens, this server
counts all tokens. Bodies are read as Ollama reads them, in Go: fields in capital letters are
known, a fraction is cut off where a whole number is expected, and a number beyond the sensible
ones means what llama.cpp makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema, model_validator

from specops.http.errors import InvalidField
from specops.http.schemas.body import Body, FreeObject, Only, Text, TokenId
from specops.http.schemas.chat import ChatTool, Function, TokenLogprob
from specops.http.schemas.constraints import ANY_OBJECT, json_grammar
from specops.http.schemas.conversation import (
    Conversation,
    Message,
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
        *("num_ctx", "num_batch", "num_keep", "num_gpu", "main_gpu", "num_thread", "num_gqa"),
        *("low_vram", "numa", "use_mmap", "use_mlock", "f16_kv", "vocab_only", "logits_all"),
        *("embedding_only", "rope_frequency_base", "rope_frequency_scale", "draft_num_predict"),
        *("repeat_last_n", "penalize_newline", "shift"),
    }
)
_NO_IMAGES = Field(None, description="not supported: this server reads texts only")
_LARGEST = (1 << 63) - 1
_LEAST = 1e-9  # of a share that is above 0: the likeliest token alone


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # noqa: PLR0124 - NaN


def _whole(value: Any) -> Any:
    return int(min(max(value, -_LARGEST - 1), _LARGEST)) if _is_number(value) else value


def _within(low: float, high: float) -> Callable[[Any], Any]:
    return lambda value: min(max(value, low), high) if _is_number(value) else value


def _penalty(value: Any) -> Any:
    # llama.cpp divides by it; nobody who sends 0 means that.
    return _within(0.01, 100)(value) if not _is_number(value) or value > 0 else 1.0


_NUMBER = WithJsonSchema({"type": "number"})
_FINITE = Field(allow_inf_nan=False)
_Whole = Annotated[int, BeforeValidator(_whole), _NUMBER]
_Temperature = Annotated[float, _FINITE, BeforeValidator(_within(0, 100)), _NUMBER]
_Share = Annotated[float, _FINITE, BeforeValidator(_within(_LEAST, 1)), _NUMBER]
_Least = Annotated[float, _FINITE, BeforeValidator(_within(0, 1)), _NUMBER]
_Subtracted = Annotated[float, _FINITE, BeforeValidator(_within(-100, 100)), _NUMBER]
_Divisor = Annotated[float, _FINITE, BeforeValidator(_penalty), _NUMBER]


class OllamaBody(Body):
    """An object as Go reads it."""

    @model_validator(mode="before")
    @classmethod
    def _known_in_any_case(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.keys() <= cls.model_fields.keys():
            return given
        found = {}
        for name, value in given.items():
            small = name.lower() if isinstance(name, str) else name
            known = small in cls.model_fields and small not in given
            found[small if known else name] = value
        return found


class OllamaModel(OllamaBody):
    """What names a model, which all requests do."""

    without_effect = frozenset({"verbose", "stream", "insecure", "system", "template", "options"})

    model: Text | None = Field(
        None, description="as GET /api/tags tells; `:latest` may be left out"
    )
    name: Text | None = Field(None, description="older name of `model`")
    keep_alive: Any = Field(
        None,
        description="without effect: the model stays loaded; 0, where nothing else is asked, is "
        "answered as Ollama does when it unloads one",
    )

    @property
    def called(self) -> str:
        """The model's name; empty if there is none."""
        return self.model or self.name or ""

    @property
    def done_reason(self) -> Literal["load", "unload"]:
        """What Ollama says it did where nothing is asked."""
        kept = str(self.keep_alive).lower()  # a number of seconds, or a text such as `0h0m0s`
        return (
            "unload" if "0" in kept and not any(digit in kept for digit in "123456789") else "load"
        )


class OllamaPull(OllamaModel):
    """A model to download: only the one that is here."""

    insecure: bool | None = Field(None, description="without effect: nothing is downloaded")
    stream: bool | None = Field(True, description="a line of JSON per step")


class OllamaRequest(OllamaModel, SeededOptions):
    """The fields that chats and prompts share. Fields of `options` may also stand beside it."""

    without_effect = _MACHINE_OPTIONS
    usual = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.9)

    options: dict[str, Any] | None = Field(
        None, description="the fields from `num_predict` on, and those of `POST /generate`"
    )
    stream: bool | None = Field(True, description="a line of JSON per step")
    format: Literal["", "json"] | FreeObject | None = Field(
        None, description="`json`, or a JSON schema that the answer follows"
    )
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description="whether the model thinks, if it can"
    )
    truncate: bool | None = Field(
        True, description="leave out the oldest messages of a conversation that is too long"
    )
    logprobs: bool | None = Field(False, description="report each token's probability")
    top_logprobs: int | None = Field(
        0, ge=0, le=20, description="report so many likely tokens beside it; with `logprobs`"
    )
    num_predict: _Whole | None = Field(
        None, description="most tokens of the answer; 0 and less: what the server allows"
    )
    seed: _Whole | None = Field(None, description="same seed, same output; negative: none")
    temperature: _Temperature | None = Field(None, description="0: always the likeliest token")
    top_k: _Whole | None = Field(None, description="draw from so many tokens; 0 and less: from all")
    top_p: _Share | None = Field(
        None, description="draw from the likeliest tokens that sum up to this; 0: the likeliest"
    )
    min_p: _Least | None = Field(
        None, description="least probability, as a share of the likeliest token's"
    )
    typical_p: _Share | None = Field(
        1.0, description="draw from the most typical tokens that sum up to this"
    )
    repeat_penalty: _Divisor | None = Field(
        None, description="Ollama's name of `repetition_penalty`; 0 and less: none"
    )
    presence_penalty: _Subtracted | None = Field(
        0.0, description="subtracted from the logits of tokens that the answer has"
    )
    frequency_penalty: _Subtracted | None = Field(
        0.0, description="subtracted from them for each time that they occur"
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
    def token_logprobs(self) -> int | None:
        """Number of likeliest tokens to report beside each token."""
        return (self.top_logprobs or 0) if self.logprobs else None

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
        description="`system`, `user`, `assistant`, `tool`, or one of the template's"
    )
    content: Text | None = ""
    thinking: Text | None = Field(None, description="what the assistant thought")
    images: Annotated[Any, Only(None, [])] = _NO_IMAGES
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True)] | None = None
    tool_name: Text | None = Field(None, description="of a result: the tool that was called")
    tool_call_id: Text | None = Field(None, description="of a result: the call that it answers")

    @property
    def speaker(self) -> str:
        """The role by the name that templates have for it."""
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

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = Field(
        None, description="none: asks only whether the model is loaded"
    )
    tools: Annotated[list[OllamaTool], Field(fail_fast=True)] | None = Field(
        None, description="functions that the model may call; other types are skipped"
    )

    def conversation(self) -> Conversation:
        """Return the conversation without the protocol.

        Raises:
            InvalidField: a field's value cannot be used.
        """
        return conversation(
            _for_template(self.messages or ()),
            "messages",
            self.tools,
            truncates=self.truncate is not False,
            template_options=self.template_options,
        )


class OllamaPrompt(OllamaRequest):
    """A prompt: a chat model answers it, any other model continues it."""

    prompt: Text | None = Field("", description="empty: asks only whether the model is loaded")
    system: Text | None = Field(None, description="the system message")
    raw: bool | None = Field(False, description="continue the prompt without the chat template")
    suffix: Text | None = Field(
        None, description="what follows the answer, for models that were trained to fill in"
    )
    context: Annotated[list[TokenId], Field(fail_fast=True)] | None = Field(
        None, description="an earlier answer's `context`: the conversation goes on from there"
    )
    images: Annotated[Any, Only(None, [])] = _NO_IMAGES
    template: Annotated[Any, Only(None, "")] = Field(
        None, description="not supported: the model's own template, or `raw`"
    )

    def conversation(self) -> Conversation:
        """Return the prompt as a question to a chat model.

        A conversation that goes on has its system message already.
        """
        before = tuple(self.context or ())
        return conversation(
            list(question(self.prompt or "", "" if before else self.system or "")),
            "prompt",
            before=before,
            template_options=self.template_options,
        )

    def check(self) -> None:
        """Check what excludes each other.

        Raises:
            InvalidField: `raw` is set together with what only a template can use.
        """
        for name in ("system", "context"):
            if self.raw and getattr(self, name):
                raise InvalidField("raw", f"not together with `{name}`: it has no template")


class OllamaTexts(OllamaModel):
    """One or several texts to embed."""

    without_effect = _MACHINE_OPTIONS | {"options"}

    input: Text | Annotated[list[Text], Field(max_length=2048, fail_fast=True)] | None = Field(
        None, description="none: asks only whether the model is loaded"
    )
    truncate: bool | None = Field(True, description="cut texts that are longer than the context")
    dimensions: int | None = Field(
        None, ge=0, description="entries that a vector is cut to; 0: all"
    )

    @property
    def inputs(self) -> list[str]:
        """The texts as a list, also where there is only one; an empty text alone is none."""
        given = self.input or []
        return [given] if isinstance(given, str) else given


class OllamaText(OllamaModel):
    """A text to embed, in the older form."""

    without_effect = _MACHINE_OPTIONS | {"options", "truncate"}

    prompt: Text | None = Field(None, description="none: asks only whether the model is loaded")


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
    context: list[int] | None = Field(
        None, description="tokens of prompt and answer, for the next request's `context`"
    )


class OllamaVectors(BaseModel):
    """The vectors of all texts, in their order."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = Field(description="from the request's arrival, in nanoseconds")
    load_duration: int = 0
    prompt_eval_count: int = Field(description="tokens of all texts")


class OllamaVector(BaseModel):
    """The vector of a text."""

    embedding: list[float]


class OllamaStatus(BaseModel):
    """How far a download is: what is served is here."""

    status: str


def _for_template(turns: Sequence[OllamaMessage]) -> list[Message]:
    """Return the messages for a chat template: it wants an id for each call and its result.

    A result answers the call whose id it has, else the first open one of its tool's. A result
    without a call stands alone: the messages before it may have been left out.
    """
    messages: list[Message] = []
    unanswered: list[tuple[str, str]] = []  # calls without a result: id and name
    count = 0

    def new_id() -> str:
        nonlocal count
        count += 1
        return f"{count:09d}"  # Mistral's templates take nine letters

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
            given = [call for call in unanswered if call[0] == turn.tool_call_id]
            named = [call for call in unanswered if not name or call[1] == name]
            answered = (given or named or [(turn.tool_call_id or new_id(), name)])[0]
            if answered in unanswered:
                unanswered.remove(answered)
            messages.append(result_message(answered[0], text, answered[1] or None))
        else:
            messages.append({"role": turn.speaker, "content": text})
    return messages
