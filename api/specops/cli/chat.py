"""`specops chat`: a conversation in the terminal, without a server.

Answers are streamed; accepted draft tokens have the colour of their drafter. A line that begins
with a slash is a command. Ctrl + C stops an answer, Ctrl + D ends the conversation.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

from specops.cli.terminal import Terminal, figures
from specops.engine.engine import PROMPT_ERRORS, Engine
from specops.request import GenerationRequest
from specops.text.chat_template import ChatTemplateError, with_system
from specops.text.confined_process import ProgramProcessError
from specops.text.tools.reader import AnswerReader

_HELP = """\
/system TEXT  set the system message; without a text: the chat template's own
/new          start a new conversation
/save FILE    write the conversation as JSON, in the API's form
/quit         end the conversation, like Ctrl + D"""


REFUSALS = (*PROMPT_ERRORS, ChatTemplateError, ProgramProcessError)
"""Errors about a prompt; the message says what is wrong with it."""


@dataclass(eq=False)
class Chat:
    """A conversation and the engine that answers.

    Attributes:
        engine: the engine of a chat model.
        request: the options of the answers; its prompt is replaced.
        terminal: shows the answers.
        system: the system message; None: the chat template's, if it has one.
        turns: the conversation so far.
    """

    engine: Engine
    request: GenerationRequest
    terminal: Terminal
    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)

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
                    self.turns.clear()
                case "/system":
                    self.system = rest.strip() or None
                case "/save":
                    self._save(rest.strip())
                case _ if command.startswith("/"):
                    self.terminal.note(_HELP)
                case _:
                    self._answer(line)

    def _messages(self) -> list[dict[str, Any]]:
        return with_system(self.turns, self.system)

    def _save(self, name: str) -> None:
        if not name:
            self.terminal.note("/save needs a file's name")
            return
        try:
            Path(name).write_text(
                json.dumps({"messages": self._messages()}, indent=1) + "\n", "utf-8"
            )
        except OSError as error:
            self.terminal.note(f"{name}: {error.strerror}")
        else:
            self.terminal.note(f"saved: {name}")

    def _answer(self, line: str) -> None:
        self.turns.append({"role": "user", "content": line})
        text, last = "", None
        try:
            prompt = self.engine.render_chat(self._messages())
            tokens = self.engine.encode_chat(prompt)
            outputs = self.engine.generate(replace(self.request, prompt_tokens=tokens))
            with _interruptible() as interrupted, closing(outputs):
                for last in outputs:
                    self.terminal.show(last)
                    text += last.text
                    if interrupted.is_set():
                        break
        except REFUSALS as error:
            self.turns.pop()
            self.terminal.note(f"{error}; /new starts a new conversation")
            return
        print()
        if last is not None and last.stats is not None:
            self.terminal.note(last.error or figures(last.stats))
        else:
            self.terminal.note("stopped")
        self.turns.append({"role": "assistant", "content": self._said(prompt, text)})

    def _said(self, prompt: str, text: str) -> str:
        """Return an answer without its reasoning, which the model does not read again."""
        template = self.engine.chat_template
        reasoning_tags = template.reasoning_tags if template else None
        starts_in_reasoning = bool(template and template.opens_reasoning(prompt))
        reader = AnswerReader(
            reasoning_tags=reasoning_tags, starts_in_reasoning=starts_in_reasoning
        )
        reader.push(text)
        reader.finish()
        return "".join(block.text for block in reader.blocks if block.kind == "text")


@contextmanager
def _interruptible() -> Iterator[Event]:
    """Turn Ctrl + C into an event: an exception could stop the engine within a step."""
    interrupted = Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def line_reader() -> Callable[[str], str]:
    """Return a reader of lines: with a shell's editing keys, or from a file without a prompt."""
    if not sys.stdin.isatty():
        return lambda _: input()
    with suppress(ImportError):  # some systems lack it
        import readline  # noqa: F401, PLC0415 - gives `input` the keys
    return input
