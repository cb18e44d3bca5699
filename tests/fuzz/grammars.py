"""Grammars that are made to recurse, to grow and to take long, followed as the engine follows them.

Chains, products, counted repeats, long literals and many rules, as regular expressions, choices,
Lark, JSON schemas and tools, for the vocabulary of the default model. Each is compiled or refused.
Of those that are compiled no call holds the engine up for longer than `_STALL_SECONDS` of the
processor, whatever tokens and drafts come, and the process does not grow.
"""

import ctypes
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specops.models.convert.gguf.header import Metadata, read_header
from specops.models.convert.gguf.tokenizer import tokenizer_files
from specops.presets import chat_model
from specops.request import Grammar, GrammarKind, ToolArguments
from specops.text.files import TOKENIZER
from specops.text.grammar import Grammars, Matcher
from specops.text.grammar_process import GrammarProcess
from specops.text.grammar_source import GrammarError
from specops.text.tokenizer import Tokenizer
from tests.fuzz.cases import TRIES, FindingError, seeds

_T = TypeVar("_T")
_STALL_SECONDS = 0.25
_COMPILE_SECONDS = 5.0  # in the service; the process that tries has a limit of its own
_GROWTH_BYTES = 160 << 20  # the cache's 64 MiB, what masks add to its grammars, and one compilation
_STEPS = 24
_MAX_CHARACTERS = 200_000  # more than are taken
_PASS_SECONDS = 0.01
_LETTERS = 'abcxyz019 _-é"\\{}[]:,\n'
_CLASSES = (r"[a-z]", r"[^\n]", r"\w", r"\d", r"(.|\n)", "[a-c]", r"\s", "é", "a", "b", " ", '"')


def _size(draw: random.Random, most: int) -> int:
    """A number up to `most`; each order of magnitude is as likely as another."""
    return int(most ** draw.random())


def _times(text: str, count: int) -> str:
    """A text so often, but not much longer than a grammar may be."""
    return text * max(1, min(count, _MAX_CHARACTERS // max(1, len(text))))


def _word(draw: random.Random, most: int) -> str:
    size = _size(draw, most)
    if draw.random() < 0.5:
        return draw.choice(_LETTERS) * size
    return "".join(draw.choices(_LETTERS, k=size))


def _count(draw: random.Random) -> str:
    least, more = _size(draw, 2000) - 1, _size(draw, 5000)
    return draw.choice(("*", "+", "?", "*?", f"{{{least}}}", f"{{{least},}}",
                        f"{{{least},{least + more}}}"))  # fmt: skip


def _regex(draw: random.Random, depth: int = 0) -> str:
    def inner() -> str:
        return draw.choice(_CLASSES) if depth > 4 else _regex(draw, depth + 1)

    few, many = _size(draw, 20), _size(draw, 3000)
    made = (
        lambda: f"({inner()}){_count(draw)}",
        lambda: _times(inner(), many),
        lambda: _times(f"({inner()}?)", many),
        lambda: f"({'|'.join(inner() for _ in range(few))})",
        lambda: f"({'|'.join(re.escape(_word(draw, 12)) for _ in range(many))})",
        lambda: _times("(", many) + inner() + _times(f"){_count(draw)}", many),
        lambda: re.escape(_word(draw, 60_000)),
        lambda: f".*{inner()}.{{{many}}}",
        lambda: draw.choice(_CLASSES) + inner(),
    )
    return draw.choice(made)()[:_MAX_CHARACTERS]


def _choices(draw: random.Random) -> str:
    texts, left, longest = [], _MAX_CHARACTERS, draw.choice((8, 100, 20_000, 120_000))
    for _ in range(_size(draw, 20_000)):
        texts.append(_word(draw, longest))
        left -= len(texts[-1]) + 4
        if left < 0:
            break
    return json.dumps(texts)


def _lark(draw: random.Random) -> str:
    count = _size(draw, 8000)
    names = [f"r{index}" for index in range(count)]

    def term() -> str:
        kind = draw.randrange(6)
        if kind == 0:
            return json.dumps(_word(draw, draw.choice((4, 4, 20_000))))
        if kind == 1:
            return f"/{_regex(draw, 5)}/"
        if kind == 2:
            return draw.choice(names)
        if kind == 3:
            return f"({draw.choice(names)}){_count(draw).replace('*?', '*')}"
        return draw.choice(('"a"', '"b"', "/[a-z]/", "/.{1,30}/"))

    style = draw.choice(("chain", "pairs", "any", "left", "nested"))
    deep = min(200, count)
    lines, left = [f"start: {names[0]}"], _MAX_CHARACTERS
    for index, name in enumerate(names):
        after = names[index + 1] if index + 1 < count else '"a"'
        body = {
            "chain": after,
            "pairs": f"{after} {after}",
            "left": f'{name} {after} | "{index % 7}"',
            "nested": f"{'(' * deep}{after}{')' * deep}",
        }.get(style) or " | ".join(
            " ".join(term() for _ in range(_size(draw, 4))) for _ in range(_size(draw, 6))
        )
        lines.append(f"{name}: {body}")
        left -= len(body)
        if left < 0:
            break
    return "\n".join(lines)[:_MAX_CHARACTERS]


def _schema(draw: random.Random, depth: int = 0) -> Any:
    many = _size(draw, 3000 if depth == 0 else 30)
    few = min(many, 60 if depth == 0 else 4)

    def inner() -> Any:
        return {"type": "string"} if depth > 3 else _schema(draw, depth + 1)

    def chain() -> Any:
        keyword = draw.choice(("anyOf", "allOf", "oneOf", "prefixItems", "items", "properties"))
        links = {}
        for number in range(many):
            after = {"$ref": f"#/$defs/d{number + 1}"}
            within: Any = {"items": after, "properties": {"a": after}}.get(keyword, [after, after])
            links[f"d{number}"] = {keyword: within}
        return {"$ref": "#/$defs/d0", "$defs": links | {f"d{many}": inner()}}

    made: tuple[Callable[[], Any], ...] = (
        chain,
        lambda: {
            "properties": {f"p{number}": inner() for number in range(few)},
            "required": [f"p{number}" for number in range(draw.randrange(many))],
        },
        lambda: {"properties": {f"p{number}": {"type": "string"} for number in range(many)}},
        lambda: {"enum": [_word(draw, 12) for _ in range(many)]},
        lambda: {"const": _word(draw, 60_000)},
        lambda: {"type": "string", "pattern": _regex(draw, 3)},
        lambda: {"type": "string", "minLength": many, "maxLength": many * _size(draw, 1000)},
        lambda: {"items": inner(), "minItems": many - 1, "maxItems": many * _size(draw, 100)},
        lambda: {draw.choice(("anyOf", "oneOf", "allOf")): [inner() for _ in range(few)]},
        lambda: {"propertyNames": {"enum": [f"n{number}" for number in range(many)]}},
        lambda: {"patternProperties": {_regex(draw, 4): inner() for _ in range(few)}},
        lambda: {"type": "number", "minimum": -many, "maximum": 10.0**few, "multipleOf": many},
        lambda: {"not": inner(), "type": draw.choice(("string", "object", "array"))},
        lambda: {"if": inner(), "then": inner(), "else": inner()},
        lambda: {"type": "array", "uniqueItems": True, "items": inner(), "contains": inner()},
    )
    return draw.choice(made)()


def grammar(seed: int) -> Grammar:
    """A case."""
    draw = random.Random(seed)
    kind = draw.choice(("regex", "choice", "lark", "schema", "schema", "tools"))
    if kind == "regex":
        return Grammar(GrammarKind.REGEX, _regex(draw))
    if kind == "choice":
        return Grammar(GrammarKind.CHOICE, _choices(draw))
    if kind == "lark":
        return Grammar(GrammarKind.LARK, _lark(draw))
    if kind == "schema":
        return _of_schema(draw)
    count = _size(draw, 30)
    rules = "".join(f'call{n}: "{n} " args{n}\n' for n in range(count))
    names = " | ".join(f"call{n}" for n in range(count))
    arguments = tuple(
        ToolArguments(f"args{n}", f"tool {n}", json.dumps(_schema(draw, 1)), draw.random() < 0.5)
        for n in range(count)
    )
    said = _of_schema(draw) if draw.random() < 0.3 else None
    text = f"start: {'@said | ' if said else ''}({names})+\n{rules}"
    return Grammar(GrammarKind.LARK, text, said, arguments)


def _of_schema(draw: random.Random) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_schema(draw)), strict=draw.random() < 0.3)


class _LateError(FindingError):
    """A call took too long."""


class _Case:
    """One grammar; notes what calls take."""

    def __init__(self, grammars: Grammars, seed: int) -> None:
        self._grammars, self._seed = grammars, seed
        self._draw = random.Random(seed)
        self.slowest: dict[str, float] = {}

    def run(self) -> str:
        """Compile and follow the grammar; returns how that ended.

        Raises:
            _LateError: a call took too long.
        """
        begun = time.process_time()
        try:
            matcher = self._grammars.matcher(grammar(self._seed))
        except GrammarError as error:
            return "limit" if "limit" in str(error) else "refused"
        finally:
            taken = time.process_time() - begun
            self.slowest["compile"] = taken
            self._check(taken < _COMPILE_SECONDS, f"{taken:.2f} s to compile")
        try:
            for _ in range(_STEPS):
                if matcher.complete or not self._step(matcher):
                    break
        except GrammarError:
            return "ended"
        return "followed"

    def _step(self, matcher: Matcher) -> bool:
        forced = self._timed("forced", lambda: matcher.forced(16))
        masks = self._timed("masks", lambda: matcher.masks((), forced))
        tokens = np.unpackbits(masks[0].view(np.uint8), bitorder="little").nonzero()[0]
        draft = [int(self._draw.choice(tokens)) for _ in range(4)]
        kept = self._timed("allows", lambda: matcher.allows([*forced, *draft]))
        draft = draft[: max(0, kept - len(forced))]
        self._timed("drafted masks", lambda: matcher.masks(draft, forced))
        for token in (*forced, *draft[:1]):
            self._timed("advance", lambda token=token: matcher.advance(token))
            if matcher.complete:
                break
        matcher.settle(_PASS_SECONDS)
        return bool(forced or draft)

    def _timed(self, name: str, call: Callable[[], _T]) -> _T:
        begun = time.thread_time()
        try:
            return call()
        finally:
            taken = time.thread_time() - begun
            self.slowest[name] = max(self.slowest.get(name, 0.0), taken)
            self._check(taken < _STALL_SECONDS, f"{taken:.2f} s for {name}")

    def _check(self, holds: bool, told: str) -> None:
        if not holds:
            raise _LateError(f"seed {self._seed}: {told}")


def chat_tokenizer() -> dict[str, Any]:
    """Return the content of the default model's tokenizer.json."""
    metadata = Metadata(read_header(chat_model()).metadata, chat_model())
    return tokenizer_files(metadata).make()


def run(cases: int, seconds: float, first: int) -> str:
    """Try random grammars; return how they ended.

    Raises:
        FindingError: a call took too long, or the process grew.
    """
    outcomes: Counter[str] = Counter()
    slowest: dict[str, float] = {}
    process, most, grown = GrammarProcess(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / TOKENIZER).write_text(json.dumps(chat_tokenizer()))
        tokenizer = Tokenizer.load(Path(folder))
    ends = frozenset({tokenizer.marks["<|im_end|>"]})

    def fresh() -> Grammars:
        made = Grammars(tokenizer, len(tokenizer.vocabulary()), ends, process)
        made.matcher(Grammar(GrammarKind.CHOICE, '["a"]'))
        return made

    grammars, before = fresh(), _held()
    try:
        for seed in seeds(cases, seconds, first):
            for left in reversed(range(TRIES)):
                case = _Case(grammars, seed)
                try:
                    outcomes[case.run()] += 1
                    break
                except _LateError:
                    if not left:
                        raise
                    grammars = fresh()  # which knows none of its grammars
            for name, taken in case.slowest.items():
                slowest[name] = max(slowest.get(name, 0.0), taken)
            if seed % 20 == 0:
                grown = _held() - before
                most = max(most, grown)
                if grown > _GROWTH_BYTES:
                    raise FindingError(f"seed {seed}: the process grew by {grown >> 20} MiB")
    finally:
        process.close()
    told = ", ".join(f"{name} {1000 * taken:.0f}" for name, taken in slowest.items())
    return (
        f"{outcomes.total():,} cases ({dict(outcomes)}), at most {most >> 20} MiB more, "
        f"slowest in ms: {told}"
    )


def _held() -> int:
    """Return the bytes that the process holds, without what its allocator keeps for later."""
    if sys.platform != "linux":
        return 0
    ctypes.CDLL(None).malloc_trim(0)
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(r"Anonymous:\s+(\d+)", text)[1])  # type: ignore[index]
