"""Splits an answer, while it is generated, into reasoning, text and tool calls.

The reader works character by character, so token boundaries do not matter. It holds back text that
may start a tag until further characters settle it. Text that looks like a call but is not one stays
text.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import partial
from string import hexdigits
from typing import Any, TypeVar

from specops.text.json_values import loads
from specops.text.tools.arguments import (
    UNFINISHED_ESCAPE,
    argument_schema,
    as_json,
    listed_properties,
    literal_as_json,
    text_in_json,
    types_of,
)
from specops.text.tools.blocks import AnswerBlocks, Block, Delta
from specops.text.tools.formats import GENERIC, TOOL_NAME, WILDCARD, Tool, ToolFormat, parts

# Keys with which a call may begin, besides its format's.
_KEYS = frozenset({"name", "type", "id", "function", "arguments", "parameters", "tool_call_id"})
_SPACES = " \t\r\n"
_TOOL_NAME = re.compile(TOOL_NAME)
_MAX_BETWEEN = 256  # characters between a name and its arguments
_NAME_CHARACTER = re.compile(r"[a-zA-Z0-9_.:/-]")
_KEY_CHARACTER = re.compile(r"[^\n,(){}\[\]<>]")  # of an argument's name among literals
_T = TypeVar("_T")
Reading = Generator[None, None, _T]  # reads a part of the answer, and one character after it
Take = Callable[[str], object]


class AnswerReader:
    """Reads one answer.

    Args:
        calls: the format of calls; None: the answer has no calls.
        tools: the tools. JSON without an opening is a call only if it names one of them; arguments
            that are not JSON get the types of their schemas.
        reasoning_tags: the tags around reasoning; None: the answer has no reasoning.
        starts_in_reasoning: whether the prompt ends with the first of these tags.

    Attributes:
        unread: number of characters of the last text after a `repeated` call, where reading ends.
    """

    def __init__(
        self,
        calls: ToolFormat | None = None,
        tools: Sequence[Tool] = (),
        reasoning_tags: tuple[str, str] | None = None,
        *,
        starts_in_reasoning: bool = False,
    ) -> None:
        self._found = found = AnswerBlocks()
        self._marks = calls.marks if calls else ()
        self._bare = calls is not None and calls.bare
        self._form = calls or GENERIC
        self._name_keys = {"name", self._form.name_key}
        self._argument_keys = {"arguments", "parameters", self._form.arguments_key}
        self._schemas = {tool.name: tool.parameters or {} for tool in tools}
        self._reasoning_tags = reasoning_tags or ()
        self._plain = calls is None and reasoning_tags is None
        self.unread = 0
        self._say, self._think = (partial(found.show, kind) for kind in ("text", "reasoning"))
        self._emit_arguments = found.argue
        self._char = ""  # the next character; empty: the answer has ended
        self._machine = self._answer(starts_in_reasoning=starts_in_reasoning)
        next(self._machine)

    @property
    def blocks(self) -> list[Block]:
        """The blocks so far."""
        return self._found.blocks

    @property
    def placed(self) -> list[int]:
        """See `AnswerBlocks`."""
        return self._found.placed

    @property
    def repeated(self) -> bool:
        """See `AnswerBlocks`."""
        return self._found.repeated

    def push(self, *texts: str) -> list[Delta]:
        """Read more texts; return the new parts of blocks."""
        for place, text in enumerate(texts):
            if self._plain and text:
                self._found.add("text", text)
            letters = "" if self._plain else text
            for position, self._char in enumerate(letters):
                if self.repeated:
                    self.unread = sum(map(len, texts[place:])) - position
                    return self._found.take()
                next(self._machine)
            self._found.settle(1)
        return self._found.take()

    def finish(self) -> list[Delta]:
        """Return the text still held back; the answer has ended."""
        if not self._plain and not self.repeated:
            self._char = ""
            next(self._machine, None)
            self._found.finish()
        return self._found.take()

    # -- the state machine: each `yield` goes on to the next character -----------------------------

    def _answer(self, *, starts_in_reasoning: bool) -> Reading[None]:
        yield
        if starts_in_reasoning:
            yield from self._reasoning()
        think = self._reasoning_tags[:1]
        fresh = self._bare
        while self._char:
            if fresh:
                yield from self._space(self._say)
                yield from self._objects()
            mark = yield from self._until((*self._marks, *think), self._say)
            fresh = mark in think and self._bare
            if mark in think:
                yield from self._reasoning()
            elif mark:
                yield from self._opened(mark)

    def _reasoning(self) -> Reading[None]:
        self._found.begin_reasoning()
        yield from self._until(self._reasoning_tags[1:], self._think)
        self._found.end_reasoning()

    def _until(self, markers: tuple[str, ...], take: Take) -> Reading[str]:
        """Read text up to one of the markers; return the marker, or "" at the answer's end."""
        held = ""
        while self._char:
            held += self._char
            while held and not any(marker.startswith(held) for marker in markers):
                take(held[0])
                held = held[1:]
            yield
            if held in markers:
                self._found.mark()
                return held
        take(held)
        return ""

    def _space(self, take: Take = str) -> Reading[None]:
        while self._char and self._char in _SPACES:
            take(self._char)
            yield

    def _past(self, raw: list[str]) -> Reading[None]:
        """Read one character and the white space after it."""
        raw.append(self._char)
        yield
        yield from self._space(raw.append)

    def _opened(self, mark: str) -> Reading[None]:
        """Read the calls after a mark that begins them, and their closing mark."""
        raw = [mark]
        opening = [part for part in parts(self._form.opening) if part != "["]
        rest = opening[opening.index(mark) + 1 :] if mark in opening else []
        follows = yield from self._follow(rest, raw)
        if follows and self._form.style != "tagged":
            yield from self._space(raw.append)
        listed = mark.endswith("[") or self._char == "["
        if follows and self._form.style != "json" and self._char not in ("[", "{"):
            yield from self._unquoted(raw, sure=mark == self._form.mark)
            return
        if follows and self._char == "[":
            yield from self._past(raw)
            if self._form.style == "literal" and self._char != "{":
                yield from self._unquoted(raw, sure=mark == self._form.mark)
                return
        if not follows or self._char != "{":
            self._say("".join(raw))
            return
        yield from self._objects("".join(raw))
        if listed and self._char == "]":
            yield
        _, after = yield from self._one_of([self._form.closing.lstrip(_SPACES + ")]")])
        self._say(after)

    def _follow(self, expected: list[str], raw: list[str]) -> Reading[bool]:
        """Read parts of a format, with white space before each; return whether all came."""
        for index, part in enumerate(expected):
            yield from self._space(raw.append)
            if part == WILDCARD:
                stop = expected[index + 1][0] if index + 1 < len(expected) else ""
                while self._char and self._char != stop:
                    raw.append(self._char)
                    yield
                continue
            for letter in part:
                if self._char != letter:
                    return False
                raw.append(letter)
                yield
        return True

    def _one_of(self, texts: Sequence[str]) -> Reading[tuple[int | None, str]]:
        """Read one of several texts; white space does not matter.

        Returns:
            Its index, or None if at most its first parts came; and text that was read after it.
        """
        cut = [parts(text.partition(WILDCARD)[0]) for text in texts]
        squeezed = ["".join(pieces) for pieces in cut]
        held = spaces = ""
        while char := self._char:
            if char in _SPACES:
                spaces += char
            elif any(text.startswith(held + char) for text in squeezed):
                held += char
            else:
                break
            yield
        complete = [
            (len(begun), number == len(pieces), -index)
            for index, pieces in enumerate(cut)
            for number in range(1, len(pieces) + 1)
            if held.startswith(begun := "".join(pieces[:number]))
        ]
        if not complete:
            return None, held + spaces if held else ""
        length, whole, index = max(complete)
        return -index if whole else None, held[length:]

    def _objects(self, before: str = "") -> Reading[None]:
        """Read calls as JSON objects, with separators between them."""
        while self._char == "{":
            yield from self._call(before)
            before = ""
            yield from self._space(self._say)
            if self._char in (",", ";") and self._found.is_open("call"):
                yield
                yield from self._space()

    def _unquoted(self, raw: list[str], *, sure: bool) -> Reading[None]:
        """Read calls whose names are not JSON, or text.

        Args:
            raw: the text before the first name.
            sure: whether the calls were opened as in the format.
        """
        form = self._form
        while True:
            name = ""
            while _NAME_CHARACTER.fullmatch(self._char):
                name += self._char
                raw.append(self._char)
                yield
            if form.style == "named":
                between = ""
                while self._char and self._char != "{" and len(between) < _MAX_BETWEEN:
                    between += self._char
                    raw.append(self._char)
                    yield
                match = re.fullmatch(_before_arguments(form), name + between)
                name = match[1] if match and self._char == "{" else ""
            elif not (yield from self._follow(parts(form.middle), raw)):
                name = ""
            key: str | None = ""
            if name and form.style == "literal":
                key = yield from self._argument_name(raw, self._schemas.get(name, {}))
            if key is None or not self._is_call(name) or not (sure or name in self._schemas):
                self._say("".join(raw))
                return
            self._found.begin_call(name)
            if form.style == "named":
                yield from self._value(self._emit_arguments, self._found.end_call)
                ended, after = yield from self._one_of([form.between, form.closing])
                self._say(after)
            elif form.style == "tagged":
                ended = yield from self._tagged(self._schemas.get(name, {}))
            else:
                ended = yield from self._literals(key, self._schemas.get(name, {}))
            if ended != 0:
                return
            raw = []
            if WILDCARD in form.between:
                _, _, rest = form.between.partition(WILDCARD)
                yield from self._follow([WILDCARD, *parts(rest)], raw)

    def _tagged(self, schema: dict[str, Any]) -> Reading[int | None]:
        """Read a call's arguments between tags; return what follows, 0 for another call."""
        form = self._form
        separator = "{"
        while True:
            which, after = yield from self._one_of([form.between, form.closing, form.key_open])
            if which != 2:
                self._emit_arguments("}" if separator == ", " else "{}")
                self._found.end_call()
                self._say(after)
                return which
            first, *rest = parts(form.key_close)
            key: list[str] = []
            yield from self._until((first,), key.append)
            yield from self._follow(rest, [])
            if not self._char:
                return None
            name = "".join(key).strip()
            self._emit_arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._tagged_value(types_of(argument_schema(schema, name)))):
                return None

    def _tagged_value(self, types: set[str]) -> Reading[bool]:
        """Read an argument and its closing tag; return whether it was complete."""
        form = self._form
        if form.key_close.endswith("\n") and self._char == "\n":
            yield
        first, *rest = parts(form.value_close)
        spaced = form.value_close.startswith("\n")
        streamed = types == {"string"}
        text: list[str] = []
        held = ""

        def take(more: str) -> None:
            nonlocal held
            more = held + more
            held = "\n" if spaced and more.endswith("\n") else ""
            more = more.removesuffix("\n") if held else more
            if streamed:
                self._emit_arguments(_escaped(more))
            else:
                text.append(more)

        if streamed:
            self._emit_arguments('"')
        if not (yield from self._until((first,), take)):
            return False
        self._emit_arguments('"' if streamed else as_json("".join(text), types))
        yield from self._follow(rest, [])
        return True

    def _argument_name(self, raw: list[str], schema: dict[str, Any]) -> Reading[str | None]:
        """Read an argument's name, up to its value, or the end of a call's arguments.

        Names in the schema may contain characters that would end other names.

        Returns:
            The name; "" at the end; None for neither.
        """
        yield from self._space(raw.append)
        if self._char == self._form.end:
            raw.append(self._char)
            yield
            return ""
        stop, key, names = self._form.key_close[0], "", listed_properties(schema)
        while char := self._char:
            if char == stop and key in names:
                break
            listed = any(name.startswith(key + char) for name in names)
            if not listed and (char == stop or not _KEY_CHARACTER.fullmatch(char)):
                break
            key += char
            raw.append(char)
            yield
            if len(key) > _MAX_BETWEEN:
                return None
        key = key if key in names else key.strip(_SPACES + "\"'")
        if not key or not (yield from self._follow([stop], raw)):
            return None
        yield from self._space(raw.append)
        return key

    def _literals(self, key: str | None, schema: dict[str, Any]) -> Reading[int | None]:
        """Read a call's arguments from the first one's value on; return the same as `_tagged`."""
        form = self._form
        separator = "{"
        while key != "":
            if key is None:  # a value without a name
                yield from self._bare_value([])
            else:
                self._emit_arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
                separator = ", "
                yield from self._literal_value(types_of(argument_schema(schema, key)))
            if not self._char:
                return None
            if self._char == ",":
                yield
            key = yield from self._argument_name([], schema)
        self._emit_arguments("}" if separator == ", " else "{}")
        self._found.end_call()
        closing = form.closing.removeprefix(form.end)
        texts = [form.between.removeprefix(form.end), closing, closing.lstrip("]")]
        which, after = yield from self._one_of(texts)
        self._say(after)
        another = not texts[0].strip() and _NAME_CHARACTER.fullmatch(self._char)
        return 0 if which is None and not after and another else which

    def _literal_value(self, types: set[str]) -> Reading[None]:
        """Read an argument's value, up to a comma or the end of the call."""
        raw: list[str] = []
        for quote in dict.fromkeys((*self._form.quotes, '"')):
            begins = not raw and self._char == quote[0]
            if begins and (yield from self._follow([quote], raw)):
                self._emit_arguments('"')
                if not (yield from self._quoted(quote)):
                    return
                self._emit_arguments('"')
                yield from self._bare_value([])
                return
        yield from self._bare_value(raw)
        if self._char:
            self._emit_arguments(literal_as_json("".join(raw).strip(), self._form.quote, types))

    def _quoted(self, quote: str) -> Reading[bool]:
        """Read a text and its closing quote; return whether it was complete."""
        if len(quote) > 1:
            end = yield from self._until(
                (quote,), lambda text: self._emit_arguments(_escaped(text))
            )
            return bool(end)
        escape = ""
        empty, tripled = True, False  # as in Python, three quotes may enclose a text
        while char := self._char:
            if len(escape) > 1 and char not in hexdigits:  # not an escape: it stays as written
                self._emit_arguments(text_in_json(escape))
                escape = ""
            if char == "\\" or escape:
                escape += char
            elif char == quote:
                raw = [char]
                yield
                if empty and self._char == quote:
                    empty, tripled = False, True
                    yield
                    continue
                if tripled:
                    while self._char == quote and len(raw) < 3:
                        raw.append(quote)
                        yield
                    ended = len(raw) == 3
                else:  # templates without escapes also write it within texts: more text follows
                    yield from self._space(raw.append)
                    ended = not self._char or self._char in f",{self._form.end}"
                if ended:
                    return True
                self._emit_arguments(_escaped("".join(raw)))
                continue
            else:
                self._emit_arguments(_escaped(char))
            if escape and not UNFINISHED_ESCAPE.fullmatch(escape):
                self._emit_arguments(text_in_json(escape))
                escape = ""
            empty = False
            yield
        return False

    def _bare_value(self, raw: list[str]) -> Reading[None]:
        """Read a value that is not a text, up to a comma or the end of the call."""
        depth, within, item = 0, "", ""  # item: the part read so far of a list's or object's item
        while char := self._char:
            if not depth and not within and char in f",{self._form.end}":
                return
            raw.append(char)
            yield
            if within:
                if char == "\\" and within in "\"'" and self._char:
                    raw.append(self._char)
                    yield
                elif "".join(raw[-len(within) :]) == within:
                    within = ""
                continue
            if char in "{[(,:":
                item = ""
            else:
                item += char if item else char.strip()
            # Models with their own quotes also write this one, as in other languages.
            opened = ('"',) if item == '"' else self._form.quotes
            within = next((mark for mark in opened if item.endswith(mark)), "")
            depth = max(0, depth + (char in "{[(") - (char in "}])"))

    def _call(self, before: str) -> Reading[None]:
        """Read a JSON object: a call, or text, together with the text `before` it."""
        raw = [before]
        name = arguments = ""
        begun = False
        yield from self._past(raw)
        while self._char == '"':
            start = len(raw)
            yield from self._string(raw.append)
            key = _loaded("".join(raw[start:]))
            yield from self._space(raw.append)
            if self._char != ":" or key not in _KEYS | self._name_keys | self._argument_keys:
                break
            yield from self._past(raw)
            start = len(raw)
            streamed = begun and key in self._argument_keys and self._char == "{"
            yield from self._value(self._emit_arguments if streamed else raw.append)
            value = "".join(raw[start:])
            if key in self._name_keys and not begun:
                name = str(_loaded(value) or "")
                if not self._is_call(name):
                    break
                begun = True
                self._found.begin_call(name)
                self._emit_arguments(arguments)
            elif key in self._argument_keys and not streamed:
                # Some models write the arguments as a string that holds JSON.
                arguments = str(_loaded(value)) if value.startswith('"') else value
                if begun:
                    self._emit_arguments(arguments)
            yield from self._space(raw.append)
            if self._char == ",":
                yield from self._past(raw)
        if not begun:
            self._say("".join(raw))
        elif self._char == "}":
            if not self.blocks[-1].text:
                self._emit_arguments("{}")
            self._found.end_call()
            yield

    def _is_call(self, name: str) -> bool:
        if not _TOOL_NAME.fullmatch(name):
            return False  # the client could not send the call back
        return not self._bare or name in self._schemas

    def _value(self, take: Take, ended: Callable[[], object] = lambda: None) -> Reading[None]:
        """Read one JSON value; call `ended` at the end of an object or array."""
        if self._char == '"':
            yield from self._string(take)
            return
        depth = 0
        while char := self._char:
            if depth and char == '"':
                yield from self._string(take)
                continue
            if not depth and char in ",}]" + _SPACES:
                return
            take(char)
            depth += (char in "{[") - (char in "}]")
            if closed := not depth and char in "}]":
                ended()
            yield
            if closed:
                return

    def _string(self, take: Take) -> Reading[None]:
        """Read one JSON string."""
        escaped = True  # the quote that begins it does not end it
        while char := self._char:
            take(char)
            yield
            if char == '"' and not escaped:
                return
            escaped = not escaped and char == "\\"


def _loaded(text: str) -> object:
    try:
        return loads(text)
    except ValueError:
        return None


def _before_arguments(form: ToolFormat) -> str:
    """Return a regular expression of a call from its name to its arguments."""
    if "[ARGS]" in form.middle:  # only some of Mistral's models write ids
        return rf"({TOOL_NAME})\s*(?:\[CALL_ID\].*?)?(?:\[ARGS\])?\s*"
    pieces = (".*?" if part == WILDCARD else re.escape(part) for part in parts(form.middle))
    return rf"({TOOL_NAME})\s*" + r"\s*".join(pieces) + r"\s*"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
