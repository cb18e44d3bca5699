"""A model's chat template: turns messages into a prompt in the form that the model was trained on.

Templates are Jinja, written for `transformers`. Here they get the same variables as from that
library's `apply_chat_template`, without the library, which would cost the service 100 MB. Templates
come from strangers, with a model's weights. So they run in Jinja's sandbox, in a separate process
(`template_process`), within limits that the system enforces.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from specops.text import files
from specops.text.added_tokens import texts_by_role
from specops.text.confined_process import ProgramLimitExceeded, ProgramRefusal
from specops.text.template_process import SHARED, TemplateProcess
from specops.text.tools.formats import Tool, ToolFormat, reasoning_tags_of
from specops.text.tools.probe import traits_of
from specops.text.tools.prompt import AS_TEXT, TemplateTraits, for_template

log = logging.getLogger(__name__)
_TODAY = {"date_string": "%d %b %Y", "datetime": "%b %d %Y %H:%M:%S GMT"}
NO_SYSTEM, EMPTY_SYSTEM = "none", "empty"  # as a setting: the template's, an empty one
_PROBE = "specops-probe-7c1e"
_ROLES = ("system", "user", "assistant", "tool")  # others stay as they are


class ChatTemplateError(ValueError):
    """The template refuses the messages, or cannot be used at all."""


class ChatTemplateLimitError(ChatTemplateError):
    """The template takes too much time or memory for these messages."""


class ChatTemplate:
    """A model's template. Thread-safe.

    Args:
        source: the template, in Jinja.
        special_tokens: the texts of `bos_token` and others, by name.
        tools_source: template for conversations with tools, if the model has a separate one.
        process: renders the template.

    Attributes:
        source: the template, in Jinja.
        reasoning_tags: the tags around the model's reasoning; None if it does not reason.

    Raises:
        ChatTemplateError: the source is not Jinja.
        ProgramProcessError: see `TemplateProcess`.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tools_source: str = "",
        *,
        process: TemplateProcess = SHARED,
    ) -> None:
        self.reasoning_tags = reasoning_tags_of(source)
        self.source, self._tools_source = source, tools_source or source
        self._tokens = dict(special_tokens)
        self._process = process
        try:
            for each in {self.source, self._tools_source}:
                process.compile(each, self._tokens)
        except (ProgramRefusal, ProgramLimitExceeded) as error:
            raise ChatTemplateError(f"the chat template cannot be read: {error}") from error

    @classmethod
    def load(cls, folder: Path, fallback: Path | None = None) -> Self | None:
        """Read the template of a model's folder; return None if there is none.

        Args:
            folder: the model's folder.
            fallback: another folder, whose template is used if the model has none.

        Raises:
            ChatTemplateError: the template cannot be used.
        """
        try:
            config = json.loads(_read(folder / files.TOKENIZER_CONFIG) or "{}")
            own = config.get("chat_template")
            tools_source = _read(folder / files.TOOLS_TEMPLATE) or _named(own, files.TOOL_USE)
            source = _read(folder / files.TEMPLATE) or _named(own, files.DEFAULT) or tools_source
            if not source:
                old = json.loads(_read(folder / files.OLD_TEMPLATE) or "{}")
                source = _named(old.get("chat_template"), files.DEFAULT)
            if not source and fallback is not None:
                source = _read(fallback / files.TEMPLATE)
            tokens = texts_by_role(config)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ChatTemplateError(f"{folder}: its template cannot be read: {error}") from error
        if not source:
            return None
        return cls(source, tokens, tools_source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        *,
        asks: bool = True,
    ) -> str:
        """Return the prompt for the assistant's next message, or for the rest of its last one.

        Args:
            messages: each with `role` and `content`; arguments of calls are objects. If the last
                message is the beginning of an answer, the prompt ends with its text.
            tools: the tools that the model may call.
            options: further variables of the template, such as `enable_thinking`.
            asks: whether the prompt ends with the beginning of the assistant's message.

        Raises:
            ChatTemplateError: the template refuses the messages; the error says why.
            ChatTemplateLimitError: it takes too much time or memory for them.
            ProgramProcessError: see `TemplateProcess`.
        """
        extra = options or {}
        prefill = answer_prefill(messages) if asks else ""
        mark = self.reasoning_tags[0].strip() if self.reasoning_tags else ""
        if messages[:-1] and prefill.startswith(mark) and self._within_reasoning(prefill):
            before = self.render(messages[:-1], tools, options)  # a template might close them
            opened = self.opens_reasoning(before)
            return before + (prefill.removeprefix(mark).lstrip() if opened else prefill)
        if prefill:
            messages = [*messages[:-1], {**messages[-1], "content": prefill + _PROBE}]
        text = self._adapted(messages, tools, extra, asks=asks and not prefill)
        _check_roles(messages, text)
        if not prefill:
            return text
        before, mark, _ = text.rpartition(_PROBE)
        if not mark:
            raise ChatTemplateError(
                "the model's chat template changes the answer that it should continue"
            )
        return before

    def after_answer(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None
    ) -> str:
        """Return the prompt's text from the end of an answer on, if these messages follow it.

        Raises:
            ChatTemplateError: the template leaves the answer out, or refuses the messages.
            ChatTemplateLimitError, ProgramProcessError: see `render`.
        """
        earlier = [*question("a"), {"role": "assistant", "content": _PROBE}]
        _, mark, text = self.render([*earlier, *messages], (), options).rpartition(_PROBE)
        if not mark:
            raise ChatTemplateError("the model's chat template leaves out earlier answers")
        return text

    def _adapted(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
        *,
        asks: bool,
    ) -> str:
        """Render messages in the form that the template accepts."""
        adapted = for_template(messages, tools, self.traits)
        try:
            return self._render(*adapted, options, asks=asks)
        except ChatTemplateLimitError:
            raise
        except ChatTemplateError:  # it may accept calls as text
            fallback = for_template(messages, tools, self.traits.fallback())
            if fallback == adapted:
                raise
            return self._render(*fallback, options, asks=asks)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        options: Mapping[str, Any],
        *,
        asks: bool = True,
    ) -> str:
        calls = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        source = self._tools_source if variables or calls else self.source
        values = {"tools": None, AS_TEXT: "", **_today(source), **options, **variables}
        values |= {"messages": messages, "add_generation_prompt": asks}
        try:
            return self._process.render(source, self._tokens, values)
        except ProgramRefusal as error:
            raise ChatTemplateError(f"the model's chat template refuses this: {error}") from error
        except ProgramLimitExceeded as error:
            raise ChatTemplateLimitError(
                f"the model's chat template exceeds its limits with this conversation: {error}"
            ) from error

    @cached_property
    def traits(self) -> TemplateTraits:
        """What the template shows of a conversation, and the model's format of calls.

        Raises:
            ChatTemplateLimitError: the first probe exceeds the limits, as conversations would.
            ProgramProcessError: see `render`.
        """
        probes = 0

        def render(messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str | None:
            nonlocal probes
            probes += 1
            try:
                return self._render(messages, variables, {}, asks=False)
            except ChatTemplateLimitError:  # each further probe would take a second, too
                raise
            except ChatTemplateError:
                return None

        try:
            return traits_of(self._tools_source, render)
        except ChatTemplateLimitError as error:
            if probes == 1:
                raise
            log.warning("tools and calls will be rendered as text: %s", error)
            return TemplateTraits()

    @property
    def calls(self) -> ToolFormat:
        """The format in which the model writes tool calls.

        Raises:
            ProgramProcessError: see `render`.
        """
        return self.traits.calls

    def opens_reasoning(self, prompt: str, prefill: str = "") -> bool:
        """Return whether a prompt ends within reasoning, so that the answer has no opening tag.

        Args:
            prompt: the prompt.
            prefill: the beginning of an answer at the prompt's end.
        """
        opened = bool(
            self.reasoning_tags and prompt.rstrip().endswith(self.reasoning_tags[0].rstrip())
        )
        return opened or self._within_reasoning(prefill)

    def _within_reasoning(self, prefill: str) -> bool:
        opening, closing = self.reasoning_tags or ("", "")
        return prefill.rfind(opening.strip()) > prefill.rfind(closing)

    @cached_property
    def opening(self) -> str:
        """The text before the first user message; empty if the template does not show the message.

        Raises:
            ChatTemplateError: the template refuses such a conversation.
        """
        before, mark, _ = self.render(question(_PROBE)).partition(_PROBE)
        return before if mark else ""

    def marks_turns(self) -> bool:
        """Return whether the template marks who speaks: then it was made for conversations."""
        text = "Hello"
        try:
            return self.render(question(text)).strip() != text
        except ChatTemplateError:
            return False


def _check_roles(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    for message in messages:
        role, said = message["role"], message.get("content") or ""
        if role not in _ROLES and said.strip() not in text:
            raise ChatTemplateError(f"the chat template does not show the role {role[:64]!r}")


def _today(source: str) -> dict[str, str]:
    """Return the variables from which templates of Llama 3 and Firefunction read the date."""
    now = datetime.now(UTC)
    return {name: now.strftime(form) for name, form in _TODAY.items() if name in source}


def question(prompt: str, system: str = "") -> list[dict[str, str]]:
    """Return the messages of a new conversation; without `system` the template uses its default."""
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt}]


def with_system(messages: Sequence[Mapping[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Return the messages, with a system message before them if they have none.

    Args:
        messages: the conversation.
        system: the message, which may be empty; None: leave it to the template.
    """
    if system is None or any(message["role"] == "system" for message in messages):
        return [dict(message) for message in messages]
    return [{"role": "system", "content": system}, *map(dict, messages)]


def system_of(setting: str, folder: Path, template: ChatTemplate | None) -> str | None:
    """Return the system message of conversations without one; None: leave it to the template.

    Args:
        setting: the message, `none`, `empty`, or nothing: then the model's folder may have one.
        folder: the model's folder.
        template: the model's template; a message that it refuses is left out, with a warning.
    """
    file = folder / files.SYSTEM
    if template is None or setting == NO_SYSTEM or not (setting or file.is_file()):
        return None
    try:
        said = setting or file.read_text(encoding="utf-8").strip()
        system = "" if setting == EMPTY_SYSTEM else said
        template.render(with_system(question("a"), system))
    except (OSError, ValueError) as error:  # a refusal of the template is a ValueError, too
        log.warning("conversations get no system message: %s", error)
        return None
    return system


def answer_prefill(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the last message's text if it begins the assistant's answer, otherwise nothing."""
    last = messages[-1]
    prefill = last["role"] == "assistant" and not last.get("tool_calls")
    return str(last["content"]) if prefill and last["content"].strip() else ""


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _named(value: Any, name: str) -> str:
    """Return a template of `tokenizer_config.json`, which has one template or a list of them."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get(name)
    elif name != files.DEFAULT:
        value = None
    return value if isinstance(value, str) else ""
