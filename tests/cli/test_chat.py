"""`specops chat`: reads lines, prints answers, and can save the conversation."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specops.cli import main
from specops.cli.chat import Chat, line_reader
from specops.cli.terminal import Terminal
from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import GenerationRequest, Output, SamplingParams
from specops.text.chat_template import ChatTemplate
from tests.fakes import output

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
REQUEST = GenerationRequest(
    request_id="cli", prompt_tokens=(), max_new_tokens=12, sampling=SamplingParams()
)


@pytest.fixture(scope="module")
def engine(tiny_settings: Settings) -> Engine:
    loaded = Engine.load(replace(tiny_settings, slots=1))
    loaded.chat_template = ChatTemplate(TEMPLATE, {})
    return loaded


@pytest.fixture
def prompts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that the model got."""
    read: list[str] = []
    encode = engine.encode_chat

    def noted(prompt: str) -> tuple[int, ...]:
        read.append(prompt)
        return encode(prompt)

    monkeypatch.setattr(engine, "encode_chat", noted)
    return read


def lines(*given: str) -> Callable[[str], str]:
    """Return a reader of these lines."""
    left = list(given)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    return read


def talk(engine: Engine, *given: str) -> None:
    Chat(engine, REQUEST, Terminal(), "Be brief.").run(lines(*given))


def test_the_model_reads_all_that_was_said(
    engine: Engine, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    talk(engine, "one", "", "two")
    shown = capsys.readouterr()
    first, second = prompts
    assert first == "<system>Be brief.\n<user>one\n<assistant>"
    said = second.removeprefix("<system>Be brief.\n<user>one\n<assistant>")
    answer, end = said[: -len("\n<user>two\n<assistant>")], said[-len("\n<user>two\n<assistant>") :]
    assert end == "\n<user>two\n<assistant>"
    assert answer
    assert shown.out.startswith(answer + "\n")
    assert len(re.findall(r"12 tokens · .* tokens/s", shown.err)) == 2


def test_commands_change_the_conversation(
    engine: Engine, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    talk(engine, "one", "/new", "/system Rhyme.", "two", "/new", "/system", "three", "/what")
    talk(engine, "/quit", "never")
    assert prompts == [
        "<system>Be brief.\n<user>one\n<assistant>",
        "<system>Rhyme.\n<user>two\n<assistant>",
        "<user>three\n<assistant>",
    ]
    assert "/system TEXT" in capsys.readouterr().err


def test_a_conversation_is_saved_as_the_api_takes_it(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.json"
    talk(engine, "one", f"/save {file}", "/save", f"/save {tmp_path}")
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == "one"
    sent = capsys.readouterr().err
    assert f"saved: {file}" in sent
    assert "needs a file's name" in sent
    assert "Is a directory" in sent


def test_a_prompt_that_is_too_long_ends_nothing(
    engine: Engine, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    talk(engine, "word " * 500, "one")
    assert "/new starts a new conversation" in capsys.readouterr().err
    assert prompts[1] == "<system>Be brief.\n<user>one\n<assistant>"


def test_lines_are_read_without_the_shells_editing_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "readline", None)  # some systems lack it
    assert line_reader() is input


class _Interrupting(Terminal):
    """A terminal whose user presses Ctrl + C at the first text."""

    shown = 0

    def show(self, output: Output) -> None:
        self.shown += 1
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_stops_the_answer_and_not_the_conversation(
    engine: Engine, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    terminal = _Interrupting()
    Chat(engine, REQUEST, terminal, None).run(lines("one", "two"))
    assert terminal.shown == len(prompts) == 2
    assert capsys.readouterr().err == "stopped\n" * 2
    assert signal.getsignal(signal.SIGINT) is before
    assert not engine.scheduler.busy


class _Thinking:
    """An engine whose answers contain thoughts."""

    chat_template = ChatTemplate(TEMPLATE + "{# </think> #}", {})

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def render_chat(self, messages: Any) -> str:
        return self.chat_template.render(messages)

    def encode_chat(self, prompt: str) -> tuple[int, ...]:
        self.prompts.append(prompt)
        return (1,)

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield output("<think>hm</think>\n\n", "Hi.")


def test_thoughts_are_shown_and_not_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    engine = _Thinking()
    Chat(engine, REQUEST, Terminal(), None).run(lines("one", "two"))  # type: ignore[arg-type]
    assert capsys.readouterr().out == "<think>hm</think>\n\nHi.\n" * 2
    assert engine.prompts[1] == "<user>one\n<assistant>Hi.\n<user>two\n<assistant>"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_models_control_sequences_do_not_reach_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """A file gets the text as it is. The sequences may be split between two tokens."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    terminal = Terminal(plain=True)
    said = (
        "tab\there\n",
        "\x1b",
        "]52;c;Y3VybA==\x07",
        "\r\x1b[2J\x08",
        "\x9b31m\x7f",
        "\xe4 \u4e2d",
    )
    terminal.show(output(*said))
    shown = capsys.readouterr().out
    if not is_terminal:
        assert shown == "".join(said)
        return
    assert shown == "tab\there\n\\x1b]52;c;Y3VybA==\\x07\\x0d\\x1b[2J\\x08\\x9b31m\\x7f\xe4 \u4e2d"


def test_notes_and_errors_have_no_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """A model's files have names and templates' messages of its author."""
    Terminal(plain=True).note("template: \x1b[2J\x00")
    assert main._fail("tensor \x1b]0;title\x07") == 1
    err = capsys.readouterr().err
    assert err == "template: \\x1b[2J\\x00\nspecops: tensor \\x1b]0;title\\x07\n"
