"""Splits an answer, while it is generated, into thoughts, text and calls of tools.

The reader takes the text character by character, so the borders of tokens do not matter. It holds
back text that may be the beginning of a tag until further characters decide. Text that looks like a
call but is none stays text.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from specops.text.json_values import loads
from specops.text.tools.formats import TOOL_NAME, ToolFormat

_ARGUMENTS = ("arguments", "parameters")
# Keys with which a call may begin.
_KEYS = frozenset({"name", "type", "id", "function", *_ARGUMENTS})
_SPACES = " \t\r\n"
_TOOL_NAME = re.compile(TOOL_NAME)
_NO_CALLS = ToolFormat("none")
Steps = Generator[None, str, str]  # is sent characters, returns the first one after its part
Take = Callable[[str], object]


@dataclass(slots=True)
class Block:
    """A part of an answer. The `text` of a call is its arguments as JSON."""

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    name: str = ""


class Delta(NamedTuple):
    """New text of the block number `place`. The first delta of a call has no text."""

    place: int
    text: str


class AnswerReader:
    """Reads one answer. If an answer has several blocks, white space around them is dropped.

    Args:
        calls: the format of calls; None: the answer has no calls.
        names: names of the tools. JSON without an opening is a call only if it names one of them.
        thinking: the tags around thoughts; None: the answer has no thoughts.
        begun: whether the prompt ends with the first of these tags.

    Attributes:
        blocks: the blocks so far.
        repeated: the model wrote a call of this answer again, word for word. That call is no block
            and was never in a delta; the reader takes no text after it.
        unread: number of characters of the last text that came after such a call.
    """

    def __init__(
        self,
        calls: ToolFormat | None = None,
        names: Collection[str] = (),
        thinking: tuple[str, str] | None = None,
        *,
        begun: bool = False,
    ) -> None:
        self.blocks: list[Block] = []
        self._calls = calls or _NO_CALLS
        self._names = names
        self._thinking = thinking or ()
        self._deltas: list[Delta] = []
        self._spaces = ""  # held back: they may be the end of a block
        self._thought = False
        self._plain = calls is None and thinking is None
        self.repeated = False
        self.unread = 0
        # Arguments of the earlier calls of the tool that is being called.
        self._earlier: list[str] = []
        self._machine = self._answer(begun=begun)
        next(self._machine)

    def push(self, text: str) -> list[Delta]:
        """Read more text; return the new parts of blocks."""
        if self._plain:
            if text:
                self._add("text", text)
        else:
            for position, character in enumerate(text):
                if self.repeated:
                    self.unread = len(text) - position
                    break
                self._machine.send(character)
        return self._take()

    def finish(self) -> list[Delta]:
        """Return the text that was held back; the answer has ended."""
        if not self._plain and not self.repeated:
            with contextlib.suppress(StopIteration):
                self._machine.send("")
            self._end_call()
            if self._spaces and (not self.blocks or self._open("text")):
                self._add("text", self._spaces)
        return self._take()

    def _take(self) -> list[Delta]:
        """Return the deltas since the last call, with those of one block merged.

        A call that may turn out to be a repeated one is held back.
        """
        merged: list[Delta] = []
        shown = len(self._deltas)
        if any(text.startswith(self.blocks[-1].text) for text in self._earlier):
            last = len(self.blocks) - 1
            held = (at for at, delta in enumerate(self._deltas) if delta.place == last)
            shown = next(held, shown)
        for delta in self._deltas[:shown]:
            begins = self.blocks[delta.place].kind == "call" and not delta.text
            if merged and merged[-1].place == delta.place and not begins and merged[-1].text:
                merged[-1] = Delta(delta.place, merged[-1].text + delta.text)
            else:
                merged.append(delta)
        del self._deltas[:shown]
        return merged

    def _open(self, kind: str) -> bool:
        return bool(self.blocks) and self.blocks[-1].kind == kind

    def _add(self, kind: Literal["text", "reasoning", "call"], text: str) -> None:
        """Add text to the last block, or to a new one if the last is of another kind."""
        if not self._open(kind):
            self._earlier = []
            self.blocks.append(Block(kind))
        self.blocks[-1].text += text
        self._deltas.append(Delta(len(self.blocks) - 1, text))

    def _begin_call(self, name: str) -> None:
        self._spaces = ""
        self._earlier = [
            block.text for block in self.blocks if (block.kind, block.name) == ("call", name)
        ]
        self.blocks.append(Block("call", name=name))
        self._deltas.append(Delta(len(self.blocks) - 1, ""))

    def _end_call(self) -> None:
        """The call that is being read is whole: drop it if it repeats an earlier one."""
        if self._earlier and self.blocks[-1].text in self._earlier:
            self.blocks.pop()
            self._deltas = [delta for delta in self._deltas if delta.place < len(self.blocks)]
            self.repeated = True
        self._earlier = []

    def _argue(self, text: str) -> None:
        if text:
            self._add("call", text)

    def _say(self, text: str) -> None:
        self._show("text", text)

    def _think(self, text: str) -> None:
        self._show("reasoning", text)

    def _show(self, kind: Literal["text", "reasoning"], text: str) -> None:
        """Add text. White space at its end is held back until more text follows."""
        whole = self._spaces + text
        text = whole.rstrip()
        self._spaces = whole[len(text) :]
        if text and not self._open(kind) and (self.blocks or self._thought):
            text = text.lstrip()
        if text:
            self._add(kind, text)

    # -- the state machine: each step gets a character and returns the first one after its part ----

    def _answer(self, *, begun: bool) -> Steps:
        char = yield
        if begun:
            char = yield from self._thoughts(char)
        think = self._thinking[:1]
        fresh = self._calls.bare
        while char:
            if fresh:
                char = yield from self._space(char, self._say)
                char = yield from self._objects(char)
            found, char = yield from self._until((*self._calls.openings, *think), char, self._say)
            fresh = found in think and self._calls.bare
            if found in think:
                char = yield from self._thoughts(char)
            elif found:
                char = yield from self._opened(found, char)
        return ""

    def _thoughts(self, char: str) -> Steps:
        self._thought = True
        _, char = yield from self._until(self._thinking[1:], char, self._think)
        self._spaces = ""
        return char

    def _until(
        self, markers: tuple[str, ...], char: str, take: Take
    ) -> Generator[None, str, tuple[str, str]]:
        """Read text up to one of the markers; return the marker and the character after it."""
        held = ""
        while char:
            held += char
            while held and not any(marker.startswith(held) for marker in markers):
                take(held[0])
                held = held[1:]
            char = yield
            if held in markers:
                return held, char
        take(held)
        return "", ""

    def _space(self, char: str, take: Take = str) -> Steps:
        while char and char in _SPACES:
            take(char)
            char = yield
        return char

    def _opened(self, opening: str, char: str) -> Steps:
        """Read the calls after an opening, and their closing."""
        raw = [opening]
        char = yield from self._space(char, raw.append)
        listed = opening.endswith("[") or char == "["
        if char == "[":
            raw.append(char)
            char = yield from self._space((yield), raw.append)
        if char == "{":
            char = yield from self._objects(char, "".join(raw))
            if listed and char == "]":
                char = yield
        elif char and self._calls.named and not listed:
            char = yield from self._named(char, "".join(raw))
        else:
            self._say("".join(raw))
            return char
        char = yield from self._space(char, self._say)
        held = ""
        closing = self._calls.closing
        while char and held != closing and closing.startswith(held + char):
            held += char
            char = yield
        if held != closing:
            self._say(held)
        return char

    def _objects(self, char: str, before: str = "") -> Steps:
        """Read calls as JSON objects, with separators between them."""
        while char == "{":
            char = yield from self._call(char, before)
            before = ""
            char = yield from self._space(char, self._say)
            if char and char in ",;" and self._open("call"):
                char = yield from self._space((yield))
        return char

    def _named(self, char: str, before: str) -> Steps:
        """Read a call with the name before its arguments, or else text."""
        raw, name = [before], ""
        while char and char not in "[{":
            name += char
            raw.append(char)
            char = yield
        while char and char != "{":  # [CALL_ID], the call's id, [ARGS]
            raw.append(char)
            char = yield
        if not char or not self._is_call(name.strip()):
            self._say("".join(raw))
            return char
        self._begin_call(name.strip())
        return (yield from self._value(char, self._argue, self._end_call))

    def _call(self, char: str, before: str) -> Steps:
        """Read a JSON object: a call, or else text, together with the text `before` it."""
        raw = [before, char]
        name = arguments = ""
        begun = False
        char = yield from self._space((yield), raw.append)
        while char == '"':
            start = len(raw)
            char = yield from self._string(char, raw.append)
            key = _loaded("".join(raw[start:]))
            char = yield from self._space(char, raw.append)
            if char != ":" or key not in _KEYS:
                break
            raw.append(char)
            char = yield from self._space((yield), raw.append)
            start = len(raw)
            streamed = begun and key in _ARGUMENTS and char == "{"
            char = yield from self._value(char, self._argue if streamed else raw.append)
            value = "".join(raw[start:])
            if key == "name" and not begun:
                name = str(_loaded(value) or "")
                if not self._is_call(name):
                    break
                begun = True
                self._begin_call(name)
                self._argue(arguments)
            elif key in _ARGUMENTS and not streamed:
                # Some models write the arguments as a string that holds JSON.
                arguments = str(_loaded(value)) if value.startswith('"') else value
                if begun:
                    self._argue(arguments)
            char = yield from self._space(char, raw.append)
            if char == ",":
                raw.append(char)
                char = yield from self._space((yield), raw.append)
        if not begun:
            self._say("".join(raw))
        elif char == "}":
            if not self.blocks[-1].text:
                self._argue("{}")
            self._end_call()
            char = yield
        return char

    def _is_call(self, name: str) -> bool:
        if not _TOOL_NAME.fullmatch(name):
            return False  # the client could not send the call back
        return not self._calls.bare or name in self._names

    def _value(self, char: str, take: Take, ended: Callable[[], object] = lambda: None) -> Steps:
        """Read one JSON value; call `ended` at the end of an object or array."""
        if char == '"':
            return (yield from self._string(char, take))
        depth = 0
        while char:
            if depth and char == '"':
                char = yield from self._string(char, take)
                continue
            if not depth and char in ",}]" + _SPACES:
                return char
            take(char)
            depth += (char in "{[") - (char in "}]")
            closed = not depth and char in "}]"
            if closed:
                ended()
            char = yield
            if closed:
                return char
        return ""

    def _string(self, char: str, take: Take) -> Steps:
        """Read one JSON string."""
        escaped = True  # the quote that begins it does not end it
        while char:
            take(char)
            if char == '"' and not escaped:
                return (yield)
            escaped = not escaped and char == "\\"
            char = yield
        return ""


def _loaded(text: str) -> object:
    try:
        return loads(text)
    except ValueError:
        return None
