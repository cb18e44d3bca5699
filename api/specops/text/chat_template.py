"""A model's chat template: turns messages into the prompt form that the model was trained on.

Templates are Jinja, written for `transformers`. They get here what `apply_chat_template` of that
library gives them. The library itself is not imported: that would cost the service 100 MB.
A template comes from strangers, with the model's weights. So it runs in Jinja's sandbox, and within
limits (`template_limits`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.utils import Namespace

from specops.text.template_limits import LimitedEnvironment, limited
from specops.text.tools.formats import Tool, format_of, thinking_of
from specops.text.tools.prompt import with_tools

_FILE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_NAME, _TOOLS_NAME = "default", "tool_use"  # names, if a model has several templates
_PROBE = "specops-probe-7c1e"
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTemplateError(ValueError):
    """The template refuses the messages, or cannot be used at all."""


class ChatTemplate:
    """A compiled template. Thread-safe.

    Args:
        source: the template as Jinja.
        special_tokens: the text of `bos_token` and so on, by name.
        tools_source: template for conversations with tools, if the model has a separate one.

    Attributes:
        calls: the format in which the model writes tool calls.
        thinking: the tags around the model's thoughts; None if it does not think.

    Raises:
        ChatTemplateError: the source is not Jinja.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tools_source: str = ""
    ) -> None:
        self.calls = format_of(tools_source or source)
        self.thinking = thinking_of(source)
        environment = LimitedEnvironment(
            filters={"tojson": _to_json},
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlocks],
            autoescape=False,  # nosec B701: the result is a prompt, not HTML
        )
        environment.globals.update(
            raise_exception=_refuse,
            strftime_now=_now,
            namespace=_PlainNamespace,
            dict=_new_dict,
            **special_tokens,
        )
        try:
            self._template = environment.from_string(source)
            self._tools_template = environment.from_string(tools_source or source)
        except Exception as error:  # also errors of Python, which compiles the result
            raise ChatTemplateError(f"the chat template cannot be read: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """Read the template of a model's folder; return None if there is none.

        Raises:
            ChatTemplateError: the template cannot be used.
        """
        try:
            config = json.loads(_read(folder / _CONFIG) or "{}")
            own = config.get("chat_template")
            source = _read(folder / _FILE) or _named(own, _NAME)
            tokens = {name: text for name in _TOKENS if (text := _text(config.get(name)))}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ChatTemplateError(f"{folder}: its template cannot be read: {error}") from error
        if not source:
            return None
        return cls(source, tokens, _named(own, _TOOLS_NAME))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for the assistant's next message, or for the rest of its last one.

        Args:
            messages: each with `role` and `content`; arguments of calls are objects. If the last
                message is the beginning of an answer, the prompt ends with its text.
            tools: the tools that the model may call.
            options: further variables of the template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: the template refuses the messages; the error says why.
        """
        plain, told = with_tools(messages, tools, self.calls)
        for role in ("system", "tool"):
            if any(message["role"] == role for message in plain) and not self._takes[role]:
                raise ChatTemplateError(
                    f"the model's chat template leaves out messages of the role {role!r}"
                )
        if not begun_answer(messages):
            return self._render(plain, told, options or {})
        marked = {**plain[-1], "content": plain[-1]["content"] + _PROBE}
        text = self._render([*plain[:-1], marked], told, options or {}, asks=False)
        begun, mark, _ = text.rpartition(_PROBE)
        if not mark:
            raise ChatTemplateError("the model's chat template changes an answer that was begun")
        return begun

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: Mapping[str, Any],
        *,
        asks: bool = True,
    ) -> str:
        template = self._tools_template if tools else self._template
        given = {**options, "messages": messages, "tools": tools, "add_generation_prompt": asks}
        try:
            with limited():
                return template.render(given)
        except Exception as error:  # templates fail in every way that Python does
            raise ChatTemplateError(f"the model's chat template refuses this: {error}") from error

    @cached_property
    def _takes(self) -> dict[str, bool]:
        """For each role, whether the template shows its messages or raises an error."""
        call = {"name": "f", "arguments": {}}
        calls = [{"id": "abcdefghi", "type": "function", "function": call}]
        asked = {"role": "user", "content": "a"}
        probes: dict[str, list[dict[str, Any]]] = {
            "system": [{"role": "system", "content": _PROBE}, asked],
            "tool": [
                asked,
                {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "content": _PROBE, "name": "f", "tool_call_id": "abcdefghi"},
            ],
        }
        tools = [Tool("f").for_template()]
        taken = {}
        for role, messages in probes.items():
            try:
                taken[role] = _PROBE in self._render(
                    messages, tools if role == "tool" else None, {}
                )
            except ChatTemplateError:
                taken[role] = True
        return taken

    def begins_thinking(self, options: Mapping[str, Any]) -> bool:
        """Whether prompts with these options end with the tag that begins thoughts."""
        if self.thinking is None:
            return False
        try:
            text = self._render(question("a"), None, options)
        except ChatTemplateError:
            return False
        return text.rstrip().endswith(self.thinking[0])

    @cached_property
    def opening(self) -> str:
        """The text before the first user message; empty if the template leaves that message out.

        Raises:
            ChatTemplateError: the template refuses such a conversation.
        """
        before, mark, _ = self.render(question(_PROBE)).partition(_PROBE)
        return before if mark else ""

    def marks_turns(self) -> bool:
        """Whether the template says who speaks: then the model was trained on conversations."""
        text = "Hello"
        try:
            return self.render(question(text)).strip() != text
        except ChatTemplateError:
            return False


def question(prompt: str, system: str = "") -> list[dict[str, str]]:
    """Return the messages of a new conversation; without `system` the template uses its own."""
    told = [{"role": "system", "content": system}] if system else []
    return [*told, {"role": "user", "content": prompt}]


def begun_answer(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message if it begins the assistant's answer, else nothing."""
    last = messages[-1]
    begun = last["role"] == "assistant" and not last.get("tool_calls")
    return str(last["content"]) if begun and last["content"].strip() else ""


class _GenerationBlocks(Extension):
    """`{% generation %}` marks text for training. Here the block only returns its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        """Replace the block by its statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Jinja's `namespace` without names that give access to Python's objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may set the name `self`
        self, *rest = args
        names = dict(*rest, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"{name!r} cannot be set on a namespace")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)  # the class itself would give templates its methods


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _named(value: Any, name: str) -> str:
    """Return a template of `tokenizer_config.json`, which has one template or a list of them."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get(name)
    elif name != _NAME:
        value = None
    return value if isinstance(value, str) else ""


def _text(token: Any) -> str:
    """Return the text of a special token, which the file spells as a string or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as in `transformers`: Jinja's own filter escapes characters of HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
