"""A model's chat template: messages to the prompt that it was trained on.

Templates are Jinja, written for `transformers`; what they may use is what its `apply_chat_template`
gives them. It is given here without importing that library, which would cost the service 100 MB.
A template comes with the model's weights from strangers: it runs in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_FILE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_NAME = "default"  # of a model that has several: for tools, for retrieval, ...
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTemplateError(ValueError):
    """Messages that the template does not take, or a template that cannot be used."""


class ChatTemplate:
    """A compiled template. Thread-safe.

    Args:
        source: Jinja.
        special_tokens: `bos_token` and so on, with their text.

    Raises:
        ChatTemplateError: the source is not Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationBlocks],
            autoescape=False,  # nosec B701: makes a prompt, not HTML
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_refuse,
            strftime_now=_now,
            namespace=_PlainNamespace,
            dict=_new_dict,
            **special_tokens,
        )
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template cannot be read: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """Read the template of a model's folder; None where it has none.

        Raises:
            ChatTemplateError: it has one that cannot be used.
        """
        try:
            config = json.loads(_read(folder / _CONFIG) or "{}")
            source = _read(folder / _FILE) or _named(config.get("chat_template"))
        except (OSError, ValueError, AttributeError) as error:
            raise ChatTemplateError(f"{folder}: its template cannot be read: {error}") from error
        if not source:
            return None
        return cls(source, {name: text for name in _TOKENS if (text := _text(config.get(name)))})

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt that asks for the assistant's next message.

        Args:
            messages: each with `role` and `content`.

        Raises:
            ChatTemplateError: the template does not take them; the message says why.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, tools=None)
        except Exception as error:  # templates fail in every way that Python does
            raise ChatTemplateError(f"the model's chat template refuses this: {error}") from error


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what a model is trained to say: here it is what it holds."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        """Replace the block by its statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Jinja's `namespace` without names that lead into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self=` is a name like others
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
    return dict(*args, **kwargs)  # not the class: its methods are no template's business


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _named(value: Any) -> str:
    """The template among what `tokenizer_config.json` says of it: itself, or a list of several."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get(_NAME)
    return value if isinstance(value, str) else ""


def _text(token: Any) -> str:
    """A special token's text, whichever way the file says it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `transformers` has it: Jinja's own escapes what stands for itself in a prompt."""
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
