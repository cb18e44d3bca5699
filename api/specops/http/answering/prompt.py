"""Turns a conversation into the tokens of its prompt, and reads the form of its answers.

Protocols differ in their messages, tools and choice of tools. Each request body turns itself into a
`Conversation`; the code after that does not know the protocol.

Args of functions:
    engine: the loaded model.
    prompt: the prompt as the client sent it.
    field: the body's field, for errors.
    asked: the conversation.
    any_length: whether the prompt may be longer than the context.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import Field

from specops.engine.engine import Engine
from specops.http.answering.schema import Body, FreeObject, Integer, Items, Text
from specops.http.errors import InvalidField
from specops.request import Grammar, PromptTooLong, ReasoningMarks, TokenOutput
from specops.text.agents import strip_billing_header
from specops.text.chat_template import (
    ChatTemplateError,
    ChatTemplateLimitError,
    answer_prefill,
    with_system,
)
from specops.text.fill_in import FillIn
from specops.text.json_values import loads, writable
from specops.text.tools.formats import GENERIC, TOOL_NAME, Tool, tags_in
from specops.text.tools.grammar import CallGrammar
from specops.text.tools.reader import AnswerReader

# -- conversations ---------------------------------------------------------------------------------

Message = dict[str, Any]  # in the form that chat templates read
ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME}$")]
Parameters = Annotated[FreeObject, Field(description="JSON schema of the arguments")]
Mode = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages to answer, and the tools that the answer may call.

    Attributes:
        messages: in the form that chat templates read.
        source: name of the request's field with the messages, for errors.
        tools: the tools that the prompt describes.
        ignored: names of tools and parts that this server lacks, and of headers that
            `strip_billing_header` removed; they are reported like unknown fields.
        required: whether the answer must be a call.
        callable: names of the tools that may be called; None: all.
        parallel: whether an answer may have several calls.
        before: tokens of an earlier conversation and its answer, which the messages continue.
        asks: whether the prompt ends with the beginning of the answer.
        truncates: whether to leave out the oldest messages if all of them are too long.
        template_options: more variables for the chat template.
        max_reasoning_tokens: maximum tokens of reasoning; None: as many as an answer may have.
        inline_reasoning: whether reasoning stays in the answer's text, tags included.
    """

    messages: Sequence[Message]
    source: str
    tools: tuple[Tool, ...] = ()
    ignored: tuple[str, ...] = ()
    required: bool = False
    callable: frozenset[str] | None = None
    parallel: bool = True
    before: tuple[int, ...] = ()
    asks: bool = True
    truncates: bool = False
    template_options: Mapping[str, Any] = field(default_factory=dict)
    max_reasoning_tokens: int | None = None
    inline_reasoning: bool = False


class ToolChoice(NamedTuple):
    """Whether tools may or must be called, and which ones.

    Attributes:
        mode: whether tools may, must or must not be called; None: they may.
        allowed: names of the tools that may be called, if not all in the prompt; None: all.
        once: whether an answer may have only one call.
    """

    mode: Mode | None = None
    allowed: Sequence[str] | None = None
    once: bool = False


class Reasoning(Body):
    """Whether a model reasons, if it can, and how long."""

    ignored_fields = frozenset({"summary", "generate_summary", "exclude", "enabled"})

    effort: str | None = Field(None, description="`none` turns it off; others have no effect")
    max_tokens: Integer = Field(None, ge=0, description="maximum tokens of reasoning")


def thinks_at(effort: str | None) -> bool | None:
    """Return whether a model reasons with this effort; None: by its default."""
    return None if effort is None else effort != "none"


class AnyTool(Protocol):
    """A tool in a protocol's form."""

    @property
    def type(self) -> str | None:
        """The type of the tool; for a function, `function` or the protocol's word."""

    def tool(self) -> Tool | None:
        """Return the function, or None if this server lacks tools of that type."""


class Function(Body):
    """A function that the model may call."""

    name: ToolName
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = Field(False, description="arguments follow the schema")


class ChatTool(Body):
    """A tool that the model may call; this server only has the type `function`."""

    type: Text
    function: Function | None = None

    def tool(self) -> Tool | None:
        """Return the function, or None for another type of tool.

        Raises:
            InvalidField: the function is missing.
        """
        if self.type != "function":
            return None
        if (own := self.function) is None:
            raise InvalidField(
                "tools",
                "a tool of the type 'function' needs a `function`",
                code="missing_parameter",
            )
        return Tool(own.name, own.description or "", own.parameters, bool(own.strict))


_ANY = ToolChoice()


def conversation(
    messages: list[Message],
    source: str,
    tools: Iterable[AnyTool] | None = None,
    choice: ToolChoice = _ANY,
    *,
    thinks: bool | None = None,
    ignored: Iterable[str] = (),
    template_options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Conversation:
    """Build a conversation from the parts of a protocol's request.

    Args:
        messages: in the form that chat templates read.
        source: name of the request's field with the messages.
        tools: the request's tools.
        choice: which of them may or must be called.
        thinks: whether the model reasons, if it can; None: by its default.
        ignored: names of the parts that were left out of the messages.
        template_options: more variables for the chat template.
        fields: other fields of `Conversation`.

    Raises:
        InvalidField: two tools have the same name, or a required tool is missing.
    """
    mode, allowed, once = choice
    known = [(tool.type, tool.tool()) for tool in tools or ()]
    offered = tuple(tool for _, tool in known if tool and mode != "none")
    names = {tool.name for tool in offered}
    if len(names) < len(offered):
        raise InvalidField("tools", "two tools have the same name")
    if mode == "required" and not offered:
        raise InvalidField("tool_choice", "a call is required, but there are no tools to call")
    for name in allowed or ():
        if name not in names:
            raise InvalidField("tool_choice", f"there is no tool {name[:64]!r}")
    kept, removed = strip_billing_header(_with_names(messages))
    return Conversation(
        messages=kept,
        source=source,
        tools=offered,
        ignored=(
            *dict.fromkeys(f"tools.{kind}" for kind, tool in known if tool is None),
            *dict.fromkeys(ignored),
            *removed,
        ),
        required=mode == "required",
        callable=None if allowed is None else frozenset(allowed),
        parallel=not once,
        template_options=({} if thinks is None else {"enable_thinking": thinks})
        | dict(template_options or {}),
        **fields,
    )


def _with_names(messages: list[Message]) -> list[Message]:
    """Add the names of the called tools to results: some templates show them."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return messages


# The last two are OpenAI's types of reasoning.
_TEXTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")


class Part(Body):
    """A part of a message: a text. Pictures, sound and files are refused by name."""

    type: str = Field(
        description="text, input_text, output_text or refusal; others are left out of answers and "
        "results, and refused in questions"
    )
    text: Text | None = None
    refusal: Text | None = None


Content = Text | Items[Part]


def joined(
    content: str | Sequence[Part] | None,
    source: str,
    ignored: list[str] | None = None,
    *,
    result: bool = False,
) -> str:
    """Return the text of a message.

    Args:
        content: of the message; None: it is empty.
        source: the body's field, for errors.
        ignored: gets the names of parts other than text, which are left out of an answer or a
            tool's result. Clients send all that an agent has seen and done with every request, so
            refusing one part would end the conversation for good.
        result: a word takes the place of such a part, so that the model knows of it.

    Raises:
        InvalidField: a part of a question is not a text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if ignored is None or part.type in _TEXTS:
            texts.append(_text(part, source))
            continue
        ignored.append(f"{source}.{part.type}")
        if result:
            texts.append(placeholder(part.type))
    return "\n".join(texts)  # as llama-server and vLLM do


def written(value: Any) -> Any:
    """Return a client's value; refuse one that cannot be written into a text."""
    return writable({"": value})[""]


def placeholder(kind: str) -> str:
    """Return the text that a model reads instead of a part of a result that is not text."""
    return f"[{kind[:64]}: not shown, this model reads text only]"


def _text(part: Part, source: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in _TEXTS:
        raise not_text(part.type, source)
    if text is None:
        raise InvalidField(source, f"a part of the type {part.type!r} has no text")
    return text


class TaggedPart(Body):
    """A part of a conversation whose `type` determines its other fields.

    Attributes:
        source: name of the request's field with the messages, for errors.
        called: the protocol's word for such a part.
        type: the part's type.
    """

    source: ClassVar[str]
    called: ClassVar[str]
    type: str

    def required(self, name: str) -> Any:
        """Return the value of a field that parts of this type must have.

        Raises:
            InvalidField: the field is missing.
        """
        if (value := getattr(self, name)) is None:
            message = f"{self.called} of the type {self.type!r} has no {name}"
            raise InvalidField(self.source, message, code="missing_parameter")
        return value


def not_text(kind: str, source: str) -> InvalidField:
    """Return the error of a part that is not a text."""
    message = f"this server reads text only, but a part is {kind[:64]!r}"
    return InvalidField(source, message, code="unsupported_parameter")


def call_message(text: str, calls: Sequence[tuple[str, str, Any]], reasoning: str = "") -> Message:
    """Return a turn of the assistant, in the form that chat templates read.

    Args:
        text: the assistant's text.
        calls: id, name and arguments of each call; arguments are an object, or its JSON.
        reasoning: the assistant's reasoning.
    """
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": _arguments(arguments)},
            }
            for call_id, name, arguments in calls
        ]
    return message


def result_message(call_id: str, text: str, name: str | None = None) -> Message:
    """Return a tool's result, in the form that chat templates read.

    Args:
        call_id: id of the call.
        text: the tool's result.
        name: the tool's name; None: unknown.
    """
    message = {"role": "tool", "content": text, "tool_call_id": call_id}
    return message if name is None else message | {"name": name}


def _arguments(arguments: Any) -> Any:
    """Return arguments as an object for the template; text that is not JSON stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return loads(arguments or "{}")
    except ValueError:
        return arguments


# -- prompts as tokens -----------------------------------------------------------------------------

Tokens = tuple[int, ...]


class ChatPrompt(NamedTuple):
    """A conversation's prompt, and whether it ends with the tag that begins reasoning."""

    tokens: Tokens
    starts_in_reasoning: bool


def prompt_tokens(prompt: str | list[int], engine: Engine, field: str) -> tuple[int, ...]:
    """Return the tokens of a text, or check tokens.

    Raises:
        InvalidField: a token does not exist.
        PromptTooLong: see `Engine.encode`.
    """
    if isinstance(prompt, str):
        return engine.encode(prompt)
    if wrong := [token for token in prompt if token >= engine.info.vocab_size]:
        raise InvalidField(
            field,
            f"token {wrong[0]} is not in the vocabulary of {engine.info.vocab_size} tokens",
        )
    return tuple(prompt)


def mixed_tokens(
    prompt: str | list[int | str], engine: Engine, field: str, *, any_length: bool = False
) -> Tokens:
    """Return the tokens of a text, or of a sequence of tokens and texts.

    Only a text at the beginning of the prompt gets the special tokens that the model expects there.

    Raises:
        InvalidField: a token does not exist.
        PromptTooLong: see `Engine.encode`.
    """
    if isinstance(prompt, str):
        return engine.encode(prompt, any_length=any_length)
    if all(isinstance(item, int) for item in prompt):  # their number is known
        return prompt_tokens(prompt, engine, field)  # type: ignore[arg-type]

    def parts() -> Iterator[Sequence[int]]:
        for place, item in enumerate(prompt):
            if isinstance(item, str):
                yield from engine.tokenizer.parts(item, special_tokens=place == 0)
            else:
                yield prompt_tokens([item], engine, field)

    return engine.collected(parts(), any_length=any_length)


def fill_in(suffix: str | None, engine: Engine) -> FillIn | None:
    """Return how the model fills in a gap; None if the client sent no suffix.

    Raises:
        InvalidField: the model was not trained to fill in gaps.
    """
    form = FillIn.of(engine.tokenizer) if suffix else None
    if suffix and form is None:
        message = "this model cannot fill in a gap: its tokenizer has no tokens for that"
        raise InvalidField("suffix", message, code="unsupported_parameter")
    return form


def render(engine: Engine, asked: Conversation) -> str:
    """Return the prompt that the model's chat template writes.

    Conversations without a system message get the model's default.

    Raises:
        InvalidField: there is no template, or it refuses the messages or exceeds its limits.
        ProgramProcessError: the template's process failed; a second try may succeed.
    """
    with template_errors(engine, asked):
        messages = with_system(asked.messages, engine.info.system)
        return engine.render_chat(messages, asked.tools, asked.template_options, asks=asked.asks)


@contextmanager
def template_errors(engine: Engine, asked: Conversation) -> Iterator[None]:
    """Turn a failure of the template into an error of the field with the messages."""
    try:
        yield
    except ChatTemplateLimitError as error:  # not worth retrying: it would exceed them again
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
    """Return a prompt, without the oldest messages if it is too long and they may be left out.

    System messages, the user's last message and the very last message stay. Other remaining
    messages begin with one of the user's if possible, because some templates require it.

    Args:
        engine, asked: see the module.
        room: maximum tokens of the prompt.

    Returns:
        The prompt, which may still be too long, and the number of messages left out.

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

    # Later starts have shorter prompts. Each try renders and encodes the remaining messages.
    indexes = range(len(starts))
    index = bisect_left(indexes, True, key=fits)
    index = min(index, indexes[-1])
    return prompt_from(index), len(messages) - len(kept(starts[index]))


# -- the model's form of answers -------------------------------------------------------------------


class AnswerFormat:
    """Reads and constrains the answers to one conversation.

    Args:
        engine: has the model's template and tokenizer.
        conversation: the conversation.
        starts_in_reasoning: whether the prompt ends with the tag that begins reasoning.
    """

    def __init__(
        self, engine: Engine, conversation: Conversation, *, starts_in_reasoning: bool
    ) -> None:
        template, tokenizer = engine.chat_template, engine.tokenizer
        self._asked = conversation
        self._calls = template.calls if template and conversation.tools else None
        self._reasoning_tags = template.reasoning_tags if template else None
        self._starts_in_reasoning = starts_in_reasoning
        self._encode = tokenizer.encode_further
        tags = (*(self._calls.tags if self._calls else ()), *tags_in(*(self._reasoning_tags or ())))
        known = ((tag, tokenizer.marks.get(tag)) for tag in tags)
        self._marks = {tag: token for tag, token in known if token is not None}
        # Decoded text leaves out special tokens.
        self._tags = {
            token: tag for tag, token in self._marks.items() if not tokenizer.decode([token])
        }

    def reader(self) -> AnswerReader:
        """Return a new reader, for one answer."""
        asked = self._asked
        reasoning_tags = None if asked.inline_reasoning else self._reasoning_tags
        return AnswerReader(
            self._calls,
            asked.tools,
            reasoning_tags,
            starts_in_reasoning=self._starts_in_reasoning and not asked.inline_reasoning,
        )

    @property
    def reasoning(self) -> ReasoningMarks | None:
        """How the engine recognizes reasoning, and its token limit; None: the model has none."""
        if self._reasoning_tags is None:
            return None
        marks = tags_in(*self._reasoning_tags)
        unshown = ((token, tag) for token, tag in self._tags.items() if tag in marks)
        closing = self._encode(self._reasoning_tags[1])
        return ReasoningMarks(
            *(*self._reasoning_tags, self._starts_in_reasoning, tuple(unshown), closing),
            self._asked.max_reasoning_tokens,
        )

    def texts(self, pieces: Iterable[TokenOutput]) -> list[str]:
        """Return the texts of pieces, with the special tokens that a reader knows."""
        return [piece.text or self._tags.get(piece.token, "") for piece in pieces]

    def without(self, pieces: Sequence[TokenOutput], characters: int) -> tuple[TokenOutput, ...]:
        """Return the pieces without those that consist of the last characters alone."""
        texts = self.texts(pieces)
        left = sum(map(len, texts)) - characters
        kept = []
        for piece, text in zip(pieces, texts, strict=True):
            if left <= 0:
                break
            kept.append(piece)
            left -= len(text)
        return tuple(kept)

    def grammar(self, text_grammar: Grammar | None) -> Grammar | None:
        """Return the grammar of a whole answer.

        With a grammar for its text, an answer may still have reasoning and calls. Without one it is
        free, unless a call is required, must follow its schema or be the only one, or some tools
        may not be called.

        Args:
            text_grammar: the grammar that the answer's text follows.
        """
        asked = self._asked
        strict = any(tool.strict for tool in asked.tools)
        bound = asked.required or strict or not asked.parallel or asked.callable is not None
        bound = bool(asked.tools) and bound
        besides = bool(asked.tools) or self._reasoning_tags is not None
        if not (bound or (text_grammar and besides)):
            return text_grammar
        calls = self._calls or GENERIC
        writer = CallGrammar(calls, self._marks, self._reasoning_tags, self._starts_in_reasoning)
        callable_ = asked.callable
        tools = [tool for tool in asked.tools if callable_ is None or tool.name in callable_]
        return writer.grammar(
            tools, required=asked.required, parallel=asked.parallel, text_grammar=text_grammar
        )
