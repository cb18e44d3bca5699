"""`specops chat`: a conversation in the terminal, without a server.

Answers are streamed; accepted draft tokens have the colour of their drafter. A line that begins
with a slash is a command. Ctrl + C stops an answer, Ctrl + D ends the conversation.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from specops.cli.terminal import Terminal, figures
from specops.engine.engine import PROMPT_ERRORS, Engine
from specops.request import GenerationRequest
from specops.text.chat_template import ChatTemplateError, with_system
from specops.text.template_process import TemplateProcessError
from specops.text.tools.reader import AnswerReader

_HELP = """\
/system TEXT  set the system message; without a text: the chat template's own
/new          start a new conversation
/save FILE    write the conversation as JSON, as the API takes it
/quit         end, as Ctrl + D does"""


class Chat:
    """A conversation and the engine that answers.

    Args:
        engine: the engine of a chat model.
        request: the options of the answers; its prompt is replaced.
        terminal: shows the answers.
        system: the system message; None: the template may say its own.
    """

    def __init__(
        self, engine: Engine, request: GenerationRequest, terminal: Terminal, system: str | None
    ) -> None:
        self._engine = engine
        self._request = request
        self._terminal = terminal
        self._system = system
        self._turns: list[dict[str, str]] = []

    def run(self, read: Callable[[str], str]) -> None:
        """Answer line by line.

        Args:
            read: shows a prompt and returns a line; EOFError ends the conversation.
        """
        while True:
            try:
                line = read("> ").strip()
            except EOFError:
                return
            command, _, rest = line.partition(" ")
            match command:
                case "":
                    continue
                case "/quit":
                    return
                case "/new":
                    self._turns.clear()
                case "/system":
                    self._system = rest.strip() or None
                case "/save":
                    self._save(rest.strip())
                case _ if command.startswith("/"):
                    self._terminal.note(_HELP)
                case _:
                    self._answer(line)

    def _messages(self) -> list[dict[str, Any]]:
        return with_system(self._turns, self._system)

    def _save(self, name: str) -> None:
        if not name:
            self._terminal.note("/save takes a file's name")
            return
        try:
            Path(name).write_text(
                json.dumps({"messages": self._messages()}, indent=1) + "\n", "utf-8"
            )
        except OSError as error:
            self._terminal.note(f"{name}: {error.strerror}")
        else:
            self._terminal.note(f"saved: {name}")

    def _answer(self, line: str) -> None:
        self._turns.append({"role": "user", "content": line})
        text, last = "", None
        try:
            tokens = self._engine.encode_chat(self._engine.render_chat(self._messages()))
            outputs = self._engine.generate(replace(self._request, prompt_tokens=tokens))
            with _interruptible() as interrupted, closing(outputs):
                for last in outputs:
                    self._terminal.show(last)
                    text += last.text
                    if interrupted.is_set():
                        break
        except (*PROMPT_ERRORS, ChatTemplateError, TemplateProcessError) as error:
            self._turns.pop()
            self._terminal.note(f"{error}; /new starts a new conversation")
            return
        print()
        if last is not None and last.stats is not None:
            self._terminal.note(last.error or figures(last.stats))
        else:
            self._terminal.note("stopped")
        self._turns.append({"role": "assistant", "content": self._said(text)})

    def _said(self, text: str) -> str:
        """Return an answer without its thoughts, which the model does not read again."""
        template = self._engine.chat_template
        thinking = template.thinking if template else None
        try:
            begun = bool(template and template.begins_thinking({}))
        except (ChatTemplateError, TemplateProcessError):  # the next turn says it
            begun = False
        reader = AnswerReader(thinking=thinking, begun=begun)
        reader.push(text)
        reader.finish()
        return "".join(block.text for block in reader.blocks if block.kind == "text")


@contextmanager
def _interruptible() -> Iterator[Event]:
    """Set an event on Ctrl + C, which otherwise could stop the engine within a step."""
    interrupted = Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def line_reader() -> Callable[[str], str]:
    """Return a reader of lines: with a shell's editing keys, or from a file without a prompt."""
    if sys.stdin.isatty():
        import readline  # noqa: F401, PLC0415 - `input` uses it; some systems lack it

        return input
    return lambda _: input()
