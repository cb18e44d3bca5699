"""Published chat templates: prompts as transformers renders them, with nothing dropped.

The templates are those in llama.cpp's source. Sixteen conversations go through the schema of
`/v1/chat/completions` and each template. Where transformers renders a conversation with every call,
every argument and every result in it, the prompt is the same. Where it refuses the conversation or
leaves something out, or the model's form of calls is not known here, the prompt has everything as
text. Calls that a template has written, cut at random places, are read as those calls.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from specops.http.answering.prompt import Conversation
from specops.http.protocols.openai.chat import ChatRequest
from specops.text.chat_template import ChatTemplate, ChatTemplateError
from specops.text.tools.formats import GENERIC, Tool
from specops.text.tools.grammar import CallGrammar
from specops.text.tools.reader import AnswerReader
from tests.files.packages import llama_cpp
from tests.files.report import Row
from tests.simulated_target import grammars, tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CUTS = 10  # of each of a template's answers
Call = tuple[str, dict[str, Any]]


def _function(name: str, **kinds: str) -> dict[str, Any]:
    # Some templates show nothing without descriptions.
    properties = {key: {"type": kind, "description": "what"} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(kinds)[:1]}
    return {"name": name, "description": f"tool {name}", "parameters": parameters}


TOOLS = [
    {"type": "function", "function": function}
    for function in (
        _function("get_weather", city="string", days="integer"),
        _function("book_room", note="string", guests="array", options="object"),
    )
]
WEATHER: Call = ("get_weather", {"city": "Lisbon", "days": 3})
BOOK: Call = ("book_room", {"note": "late arrival"})
NESTED: Call = (
    "book_room",
    {"note": "quiet", "guests": ["Ada", {"name": "Grace"}], "options": {"floor": {"least": 41}}},
)
WORDS: Call = ("get_weather", {"city": "Zürich 日本 🙂", "days": 7})


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _calls(*calls: Call, text: str | None = None, ids: str = "callnumb{}") -> dict[str, Any]:
    written = [
        {
            "id": ids.format(index),
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": text, "tool_calls": written}


def _result(text: str, index: int = 0, ids: str = "callnumb{}") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": ids.format(index)}


_ASK, _SUNNY, _BOOKED = _user("What now, please?"), _result("sunny, 24"), _result("room 12", 1)
_FOREIGN = "call_0f9a-{}"
# Messages, whether tools are given, and the texts and calls that must be in the prompt.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], bool, Sequence[str | Call]]] = {
    "a question": ([_ASK], False, []),
    "a system message": ([{"role": "system", "content": "Be terse."}, _ASK], False, ["Be terse."]),
    "tools": ([_ASK], True, []),
    "one call": ([_ASK, _calls(WEATHER), _SUNNY], True, [WEATHER, "sunny, 24"]),
    "two calls": ([_ASK, _calls(WEATHER, BOOK), _SUNNY, _BOOKED], True,
        [WEATHER, BOOK, "sunny, 24", "room 12"]),
    "an answer after results": (
        [
            _ASK,
            _calls(WEATHER),
            _SUNNY,
            {"role": "assistant", "content": "It is fine."},
            _user("Ok"),
        ],
        True,
        [WEATHER, "sunny, 24", "It is fine.", "Ok"],
    ),
    "text beside a call": ([_ASK, _calls(WEATHER, text="Let me look."), _SUNNY], True,
        ["Let me look.", WEATHER, "sunny, 24"]),
    "thoughts before a call": (
        [_ASK, _calls(WEATHER) | {"reasoning_content": "I should look."}, _SUNNY], True,
        [WEATHER, "sunny, 24"]),
    "ids of another server": (
        [_ASK, _calls(WEATHER, ids=_FOREIGN), _result("sunny, 24", ids=_FOREIGN)], True,
        [WEATHER, "sunny, 24"]),
    "Unicode": ([_ASK, _calls(WORDS), _result("grün ✓")], True, [WORDS, "grün ✓"]),
    "nested arguments": ([_ASK, _calls(NESTED), _result("booked")], True, [NESTED, "booked"]),
    "a result without a call": ([_ASK, _result("sunny, 24")], True, ["sunny, 24"]),
    "the user twice": ([_user("One."), _user("Two.")], False, ["One.", "Two."]),
    "the developer's message": ([{"role": "developer", "content": "Be terse."}, _ASK], True,
        ["Be terse."]),
    "an empty message": (
        [_user(""), {"role": "assistant", "content": "Yes?"}, _user("Go on.")], False,
        ["Yes?", "Go on."]),
    "calls and results, no tools": ([_ASK, _calls(WEATHER, text=""), _SUNNY, _user("Then?")], False,
        [WEATHER, "sunny, 24", "Then?"]),
}  # fmt: skip


class Published(NamedTuple):
    """A template as Jinja, and loaded."""

    source: str
    loaded: ChatTemplate


@cache
def templates() -> dict[str, Published]:
    """The published templates by their names."""
    files = sorted((llama_cpp() / "models" / "templates").glob("*.jinja"))
    sources = {file.stem: file.read_text(encoding="utf-8") for file in files}
    return {name: Published(text, ChatTemplate(text, TOKENS)) for name, text in sources.items()}


def compare() -> list[Row]:
    """One row for each conversation, and one for the calls that are read back."""
    rows = [_compared(name) for name in CONVERSATIONS]
    return [*rows, _read_back(), _allowed()]


def _compared(name: str) -> Row:
    messages, has_tools, needed = CONVERSATIONS[name]
    body = {"model": "m", "messages": messages, "tools": TOOLS if has_tools else None}
    conversation = ChatRequest(**body).conversation()
    ways: Counter[str] = Counter()
    for stem, template in templates().items():
        way = _way(template, conversation, needed)
        ways[way] += 1
        if way == "different":
            print(f"files: {stem} is different with {name}", flush=True)
    tried = sum(ways.values())
    note = f"{ways['same']} as transformers, {ways['text']} in part as text"
    return Row(name, tried, ways["same"] + ways["text"], ways["refused"], note)


def _way(published: Published, conversation: Conversation, needed: Sequence[str | Call]) -> str:
    """How a template takes a conversation: as transformers has it, as text, or not at all."""
    source, template = published
    theirs = _transformers(source, conversation.messages, conversation.tools)
    try:
        text = template.render(conversation.messages, conversation.tools)
    except ChatTemplateError:
        usable = _transformers(source, [_ASK], ()) is not None
        return "different" if usable or theirs is not None else "refused"
    needles = [
        *needed,
        *(tool.name for tool in conversation.tools),
        conversation.messages[-1]["content"],
    ]
    if not _holds(text, needles):
        return "different"
    if text == theirs:
        return "same"
    complete = theirs is not None and _holds(theirs, needles) and _said_first(theirs, needed)
    tools = bool(conversation.tools) or any("tool_calls" in item for item in conversation.messages)
    unknown = tools and template.calls == GENERIC
    return "different" if complete and not unknown else "text"


def _said_first(text: str, needed: Sequence[str | Call]) -> bool:
    """Whether the text beside a call, which Gemma 4's template shows last, comes first."""
    words = [needle if isinstance(needle, str) else needle[0] for needle in needed[:2]]
    places = [text.rfind(word) for word in words]
    return not needed or needed[0] != "Let me look." or places == sorted(places)


def _transformers(
    source: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> str | None:
    described = [tool.for_template() for tool in tools] or None
    try:
        (text,), _ = render_jinja_template(
            [messages], tools=described, chat_template=source, add_generation_prompt=True, **TOKENS
        )
    except Exception:  # templates fail in every way that Python does
        return None
    return str(text)


def _holds(text: str, needles: Sequence[str | Call]) -> bool:
    """Whether all texts and calls are in a prompt, in a spelling of JSON or as they are."""
    return all(any(form in text for form in _spellings(word)) for word in _words(needles))


def _words(needles: Sequence[str | Call]) -> Iterator[str]:
    for needle in needles:
        if isinstance(needle, str):
            yield needle
        else:
            yield needle[0]
            yield from _leaves(needle[1])


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield str(value)


def _spellings(word: str) -> set[str]:
    plain = word.strip()
    return {plain, json.dumps(plain)[1:-1], json.dumps(plain, ensure_ascii=False)[1:-1]}


# -- calls that templates have written -------------------------------------------------------------


def _answers() -> Iterator[tuple[str, ChatTemplate, list[Call], str]]:
    """Calls that templates wrote, with what follows them in the prompt."""
    for stem, (_, template) in templates().items():
        form = template.calls
        if form == GENERIC or not template.traits.shows_calls:
            continue
        several = [[WEATHER, BOOK], [NESTED, WEATHER]] if template.traits.several_calls else []
        for calls in ([WEATHER], [BOOK], [NESTED], [WORDS], *several):
            results = [_result("ok", index) for index in range(len(calls))]  # some need them
            body = {"model": "m", "messages": [_ASK, _calls(*calls), *results], "tools": TOOLS}
            conversation = ChatRequest(**body).conversation()
            try:
                text = template.render(conversation.messages, conversation.tools)
            except ChatTemplateError:
                continue  # its row says so
            _, _, turn = text.rpartition(_ASK["content"])
            begin = form.mark or f'{{"{form.name_key}"'
            yield stem, template, calls, turn[turn.index(begin) :]


def _offered() -> tuple[Tool, ...]:
    return ChatRequest(model="m", messages=[_ASK], tools=TOOLS).conversation().tools


def _read_back() -> Row:
    rng, tools = random.Random(7), _offered()
    tried = right = 0
    stems = set()
    for stem, template, calls, answer in _answers():
        found = [_read(template, tools, answer, rng) for _ in range(CUTS)]
        stems.add(stem)
        tried += CUTS
        right += found.count(calls)
        if found != [calls] * CUTS:
            print(f"files: {stem}: {answer!r} is read in another way", flush=True)
    note = f"{len(stems)} templates"
    return Row("calls that templates wrote, cut at random", tried, right, 0, note)


def _allowed() -> Row:
    """The grammar that binds a model to calls, against the calls that templates wrote."""
    tools = _offered()
    tried = right = others = 0
    for stem, template, calls, answer in _answers():
        length = len(_squeezed(template.calls.write(calls)))
        ends = (end for end in range(len(answer)) if len(_squeezed(answer[:end])) == length)
        text = answer[: next(ends, 0)]
        if _squeezed(text) != _squeezed(template.calls.write(calls)):
            others += 1  # ids behind the arguments, or values as Python shows them
            continue
        grammar = CallGrammar(template.calls, {}, None, starts_in_reasoning=False).grammar(
            tools, required=True, parallel=True, text_grammar=None
        )
        tokens = tokenizer().encode(text, special_tokens=False)
        tried += 1
        if grammars().matcher(grammar).allows(tokens) == len(tokens):
            right += 1
        else:
            print(f"files: {stem}: {text!r} is not allowed", flush=True)
    note = f"besides {others} with ids behind the arguments, or with values as Python shows them"
    return Row("calls that templates wrote, by the grammar", tried, right, 0, note)


def _squeezed(text: str) -> str:
    """A text without white space, ids and numbers that differ from call to call."""
    return re.sub(r"callnumb\d|(?<=[:\"])\d(?=[<\"])|\s+", "", text)


def _read(
    template: ChatTemplate, tools: Sequence[Tool], answer: str, rng: random.Random
) -> list[Call]:
    reader = AnswerReader(template.calls, tools)
    start = 0
    while start < len(answer):
        end = start + rng.randint(1, 12)
        reader.push(answer[start:end])
        start = end
    reader.finish()
    found = [(block.name, block.text) for block in reader.blocks if block.kind == "call"]
    return [(name, _loaded(text)) for name, text in found]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
