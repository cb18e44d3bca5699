"""An answer is split into the same blocks, wherever its text is cut."""

import json
import random
from typing import Any

import pytest

from specops.text.chat_template import ChatTemplate
from specops.text.tools.blocks import Block
from specops.text.tools.formats import THINKING, Tool, parts
from specops.text.tools.reader import AnswerReader
from tests.text.tools.scripts import BY_NAME, TEMPLATES, TOOLS, scripts, written

THINK = THINKING[0]


def read(
    name: str | None,
    answer: str,
    size: int,
    *,
    starts_in_reasoning: bool = False,
    think: bool = True,
) -> list[Block]:
    """Read an answer in pieces of `size` characters; check that its deltas make up the blocks."""
    reader = AnswerReader(
        BY_NAME.get(name or ""),
        TOOLS,
        THINK if think else None,
        starts_in_reasoning=starts_in_reasoning,
    )
    deltas = []
    for start in range(0, len(answer), size):
        deltas += reader.push(answer[start : start + size])
    deltas += reader.finish()
    texts: dict[int, str] = {}
    for index, text in deltas:
        if reader.blocks[index].kind == "call" and index not in texts:
            assert text == ""  # the name comes first
        texts[index] = texts.get(index, "") + text
    assert list(texts) == list(range(len(reader.blocks)))
    assert [texts[index] for index in texts] == [block.text for block in reader.blocks]
    return reader.blocks


@pytest.mark.parametrize("name", BY_NAME)
def test_the_cuts_of_an_answer_do_not_matter(name: str) -> None:
    for script in scripts(BY_NAME[name]):
        whole = read(name, script.answer, len(script.answer))
        assert [block.text for block in whole if block.kind == "text"] == [script.text] * bool(
            script.text
        )
        assert [block.text for block in whole if block.kind == "reasoning"] == [
            script.reasoning
        ] * bool(script.reasoning)
        calls = [(block.name, json.loads(block.text)) for block in whole if block.kind == "call"]
        assert tuple(calls) == script.calls
        for size in (1, 2, 3, 7):
            assert read(name, script.answer, size) == whole, script.answer


@pytest.mark.parametrize("name", BY_NAME)
def test_the_format_is_read_from_the_template(name: str) -> None:
    assert ChatTemplate(TEMPLATES[name], {}).calls == BY_NAME[name]


A, G = '{"name": "get_weather", "arguments": {"a": 1}}', '{"name": "search.web-2", "arguments": {}}'
LFM, FM = "<|tool_call_start|>", "<|tool_call_end|>"
ODD = [
    ("hermes", f"<tool_call>{A}{G}</tool_call> Done.", ["call", "call", "text"]),
    ("hermes", f"<tool_call>{A}", ["call"]),  # cut off
    ("hermes", f"<tool_call>\n[{A}, {G}]\n</tool_call>", ["call", "call"]),
    ("hermes", "<tool_call>sorry</tool_call>", ["text"]),
    ("hermes", '<tool_call>{"tool": 1}</tool_call>', ["text"]),
    ("hermes", A, ["text"]),
    ("hermes", "\n\n<tool_call>", ["text"]),
    ("llama", f"<|python_tag|>{A}", ["call"]),
    ("llama", '{"type": "function", "parameters": {}, "name": "get_weather"}', ["call"]),
    ("llama", '{"name": "Alice", "age": 3}', ["text"]),
    ("llama", 'No: {"name": "get_weather"}', ["text"]),
    ("mistral", f"[TOOL_CALLS] [{A}] ", ["call"]),
    ("mistral", "[TOOL_CALLS] [1]", ["text"]),
    ("mistral-args", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"a": 1}', ["call"]),
    ("mistral-args", f"[TOOL_CALLS][{A}]", ["call"]),
    ("phi", f"functools[{A}]", ["call"]),
    ("phi", "use functools[0] or functools.cache", ["text"]),
    ("granite", f"<|tool_call|>[{A},{G}", ["call", "call"]),
    ("json", '{"name": "get_weather"', ["call"]),
    ("json", '{"answer": 42}', ["text"]),
    # A client could not send calls by these names back.
    ("hermes", '<tool_call>{"name": "get weather", "arguments": {}}</tool_call>', ["text"]),
    ("hermes", '<tool_call>{"name": null, "arguments": {}}</tool_call>', ["text"]),
    ("mistral-args", "[TOOL_CALLS]hello world", ["text"]),
    ("mistral-args", "[TOOL_CALLS]get_wea", ["text"]),  # cut off
    ("mistral-args", '[TOOL_CALLS]two words[ARGS]{"a": 1}', ["text"]),
    # LFM2 says what it does behind its calls; some answers lack the brackets, or are JSON.
    ("lfm", f"{LFM}[get_weather(a=1)]{FM} Looking.", ["call", "text"]),
    ("lfm", f"{LFM}[get_weather(a=1)]{FM}{LFM}[search.web-2()]{FM}", ["call", "call"]),
    ("lfm", f"{LFM}get_weather(a=1){FM}", ["call"]),
    ("lfm", f"{LFM}[get_weather ( a = 1 , ) , search.web-2( )]{FM}Hm", ["call", "call", "text"]),
    ("lfm", f"{LFM}[{A}, {G}]{FM}", ["call", "call"]),
    ("lfm", f"{LFM}[get_weather(a=[1, 2", ["call"]),  # cut off
    ("lfm", f"{LFM}[get_weather(a=1), Hm", ["call", "text"]),
    ("lfm", f"{LFM}[get_weather(1)]{FM}", ["text"]),
    ("lfm", f"{LFM}[get_weather]{FM}", ["text"]),
    ("lfm", f"{LFM}[get the weather(a=1)]{FM}", ["text"]),
    ("lfm", f"{LFM}[get_weather(" + "a" * 1000, ["text"]),
    ("lfm", "[get_weather(a=1)]", ["text"]),
    ("gemma4", "<|tool_call>call:get_weather{a:1}<tool_call|>", ["call"]),
    ("gemma4", "<|tool_call>call:get_weather{a:1}<tool_call|><|tool_call>", ["call"]),
    ("gemma4", "<|tool_call>call:get_weather{a:1}", ["call"]),
    ("gemma4", "<|tool_call>get_weather{a:1}<tool_call|>", ["text"]),
    ("gemma4", "<|tool_call>call:get_weather(a=1)<tool_call|>", ["text"]),
    ("gemma4", "<|tool_call>call:get_weather{[1]}<tool_call|>", ["text"]),
    ("olmo", "<function_calls>\nget_weather(a=1)\nsearch.web-2()\n</function_calls>",
     ["call", "call"]),
    ("olmo", "<function_calls>get_weather(a=1)</function_calls>Hm", ["call", "text"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer", "kinds"), ODD)
def test_unusual_answers(name: str, answer: str, kinds: list[str]) -> None:
    for size in (len(answer), 1):
        blocks = read(name, answer, size)
        assert [block.kind for block in blocks] == kinds
        if kinds == ["text"]:
            assert blocks[0].text == answer  # nothing is lost


def test_arguments_may_be_a_string_and_may_be_missing() -> None:
    answer = '{"name": "get_weather", "arguments": "{\\"a\\": 1}"}'
    assert read("json", answer, 1) == [Block("call", '{"a": 1}', "get_weather")]
    assert read("json", '{"name": "get_weather"}', 1) == [Block("call", "{}", "get_weather")]


@pytest.mark.parametrize("size", [1, 100])
def test_reasoning_may_have_begun_in_the_prompt(size: int) -> None:
    blocks = read("hermes", "hm\n</think>\n\nHi ", size, starts_in_reasoning=True)
    assert blocks == [Block("reasoning", "hm"), Block("text", "Hi ")]
    assert read("hermes", "hm", size, starts_in_reasoning=True) == [Block("reasoning", "hm")]
    assert read("hermes", "<think>\n\n</think>\n\nHi", size) == [Block("text", "Hi")]


QWEN = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
PARAMETER = "<parameter={}>\n{}\n</parameter>\n"
TYPED = [  # a schema, what the model wrote, what it means
    ({"type": "string"}, "3", "3"),
    ({"type": "string"}, '"quoted"', '"quoted"'),
    ({"type": "string"}, "\n two\nlines \n", "\n two\nlines \n"),
    ({"type": "string"}, "", ""),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "3", "3"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", 3),
    ({"type": "integer"}, "three", "three"),  # as it is: the tool may say what is wrong
    ({"type": "array"}, "[1, {'k': True, 'n': None}]", [1, {"k": True, "n": None}]),
    ({"type": "boolean"}, "True", True),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"const": "1"}, "1", "1"),
    ({}, "3", 3),
    ({}, "plain text", "plain text"),
    ({"$ref": "#/$defs/text"}, "3", "3"),
    ({"$ref": "#words"}, "3", "3"),
    ({"$ref": "#/$defs/none"}, "3", 3),
    ({}, "[" * 100_000, "[" * 100_000),
    ({}, "{'a': 1e999}", "{'a': 1e999}"),
    ({"type": "number"}, "NaN", "NaN"),
    ({}, "[1, -Infinity]", "[1, -Infinity]"),
    ({"type": 7, "enum": 1, "anyOf": {"a": 1}}, "3", 3),
]


@pytest.mark.parametrize(("schema", "wrote", "meant"), TYPED)
@pytest.mark.parametrize("size", [1, 1000])
def test_arguments_in_tags_get_their_schemas_types(
    schema: Any, wrote: str, meant: Any, size: int
) -> None:
    text = {"type": "string", "$anchor": "words"}
    tool = Tool("f", "", {"properties": {"x": schema}, "$defs": {"text": text}})
    answer = QWEN.format(PARAMETER.format("x", wrote))
    reader = AnswerReader(BY_NAME["qwen3-coder"], [tool])
    for start in range(0, len(answer), size):
        reader.push(answer[start : start + size])
    reader.finish()
    assert [json.loads(block.text) for block in reader.blocks] == [{"x": meant}]


MARKS = '<|"|>'
LITERALS = [  # a format, a schema, what the model wrote, what it means
    ("lfm", {}, '"a \\"b\\" \\u00fc\\n\\\\"', 'a "b" ü\n\\'),
    ("lfm", {}, r"'\ud83d\ude42 \x41 \U0001F642 \d'", "🙂 A 🙂 \\d"),
    ("lfm", {}, "'it's \"so\", he said'", 'it\'s "so", he said'),  # a template that escapes nothing
    ("lfm", {}, "'two\nlines'", "two\nlines"),
    ("lfm", {}, r'"C:\Users"', r"C:\Users"),
    ("lfm", {}, r'"\u"', r"\u"),
    ("lfm", {}, r'"C:\x"', r"C:\x"),
    ("lfm", {}, r'"D:\x-1 \u+12f \U 1_2 3_4"', r"D:\x-1 \u+12f \U 1_2 3_4"),
    ("lfm", {}, r'["D:\x-1", "\u 1_2"]', [r"D:\x-1", r"\u 1_2"]),
    ("lfm", {}, r'"\u00\x41\"b"', r'\u00A"b'),
    ("olmo", {}, r"'C:\Users'", r"C:\Users"),
    ("lfm", {}, "''", ""),
    ("lfm", {}, '"""a, "b")\n""c\\""""', 'a, "b")\n""c"'),
    ("lfm", {}, "'''it's'''", "it's"),
    ("lfm", {}, "-1.5e3", -1500),
    ("lfm", {}, "True", True),
    ("lfm", {}, "null", None),
    ("lfm", {}, "None", None),
    ("lfm", {}, "Lisbon", "Lisbon"),
    ("lfm", {"type": "string"}, "12", "12"),
    ("lfm", {"type": "string"}, "True", "True"),
    ("lfm", {"type": "string"}, "[1, 'a']", "[1, 'a']"),
    ("lfm", {"type": ["string", "null"]}, "None", None),
    ("lfm", {}, "[1, 'a, )b', [None, (2,)], {'k': True, \"l\": [],},]",
     [1, "a, )b", [None, [2]], {"k": True, "l": []}]),
    ("lfm", {}, '{"a": "x: True", 1: 2}', {"a": "x: True", "1": 2}),
    ("lfm", {}, "['\\u00fc\\'', \"\\\\\"]", ["ü'", "\\"]),
    ("lfm", {}, "[" * 5000 + "]" * 5000, "[" * 5000 + "]" * 5000),
    ("gemma4", {}, f"{MARKS}say \"hi\",\n{{ü}} \\{MARKS}", 'say "hi",\n{ü} \\'),
    ("gemma4", {}, f"{MARKS}{MARKS}", ""),
    ("gemma4", {}, '"Paris, France"', "Paris, France"),
    ("gemma4", {"type": "string"}, r'"a \"b\", {c} \u00fc"', 'a "b", {c} ü'),
    ("gemma4", {}, '[ "a, b]",{c:"}, d"}, 5 ]', ["a, b]", {"c": "}, d"}, 5]),
    ("gemma4", {}, '5" pipe', '5" pipe'),
    ("gemma4", {}, "3", 3),
    ("gemma4", {}, "true", True),
    ("gemma4", {}, "None", None),
    ("gemma4", {}, f"[{MARKS}a, b]{MARKS},{{name:{MARKS}x{MARKS},n:null}},[]]",
     ["a, b]", {"name": "x", "n": None}, []]),
    ("gemma4", {}, f"{{{MARKS}odd key{MARKS}:{{$b:1.5}},c:\"d: e\"}}",
     {"odd key": {"$b": 1.5}, "c": "d: e"}),
    # Its template writes the keys of objects as they are.
    ("gemma4", {}, f"{{New York: {{it's no.2 :[1]}},日本:{MARKS}a b:{MARKS}}}",
     {"New York": {"it's no.2": [1]}, "日本": "a b:"}),
    ("gemma4", {"type": "string"}, "Lisbon", "Lisbon"),
    ("olmo", {}, "[true, null, \"a\"]", [True, None, "a"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "schema", "wrote", "meant"), LITERALS, ids=range(len(LITERALS)))
@pytest.mark.parametrize("size", [1, 1000])
def test_literals_are_read_as_json(
    name: str, schema: Any, wrote: str, meant: Any, size: int
) -> None:
    form = BY_NAME[name]
    tool = Tool("f", "", {"properties": {"x": schema}})
    pairs = form.value_close.join(f"{key}{form.key_close}{wrote}" for key in ("x", "y"))
    answer = f"{form.opening}f{form.middle}{pairs}{form.closing}"
    reader = AnswerReader(form, [tool])
    for start in range(0, len(answer), size):
        reader.push(answer[start : start + size])
    reader.finish()
    (block,) = reader.blocks
    assert json.loads(block.text)["x"] == meant


def test_a_text_among_literals_is_streamed() -> None:
    for name in ("lfm", "gemma4"):
        form = BY_NAME[name]
        reader = AnswerReader(form, TOOLS)
        answer = form.write([("get_weather", {"city": "abcdefghij" * 9})])
        reader.push(answer[: answer.index("j")])
        assert reader.blocks[0].text == '{"city": "abcdefghi'


@pytest.mark.parametrize("name", BY_NAME)
def test_whatever_a_model_writes_its_cuts_do_not_matter(name: str) -> None:
    rng, form = random.Random(name), BY_NAME[name]
    texts = (form.opening, form.between, form.closing, form.middle, form.key_open, form.key_close)
    pieces = [part for text in (*texts, form.value_close) for part in parts(text)]
    pieces += ["get_weather", "city", "text", ": ", *'{}"\n <[]3\\']
    pieces += [form.write([("get_weather", {"city": "a"})])[:-3], THINK[0], THINK[1]]
    for _ in range(60):
        answer = "".join(rng.choices(pieces, k=rng.randint(1, 14)))
        whole = read(name, answer, len(answer))
        for size in (1, 2, 5):
            assert read(name, answer, size) == whole, answer


def test_the_search_for_a_name_ends() -> None:
    answer = "[TOOL_CALLS]get_weather" + " " * 100_000
    (block,) = read("mistral-args", answer, len(answer))
    assert (block.kind, block.text) == ("text", answer)


def test_without_tools_and_reasoning_text_is_text() -> None:
    answer = f" <tool_call>{A}</tool_call><think>\n"
    assert read(None, answer, 1, think=False) == [Block("text", answer)]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_call_that_repeats_another_word_for_word_ends_the_answer(name: str) -> None:
    form = BY_NAME[name]
    first, second = ("get_weather", {"city": "Bern"}), ("get_weather", {"city": "Berlin"})
    other = ("search.web-2", {"city": "Bern"})
    answer = written(form, [first, second, other, second, ("search.web-2", {})])
    whole = written(form, [first, second, other, second])
    end = len(whole) - len(whole.lstrip()) + whole.rindex("Berlin") + len('Berlin"}')
    closed = {
        "json": end + 1,
        "named": end,
        "tagged": answer.rindex("search") + 1,  # up to the first letter of the next call
        "literal": end + len(form.quote),
    }[form.style]
    for size in (1, 3, len(answer)):
        reader = AnswerReader(form, TOOLS, None)
        deltas, read_until = [], 0
        for start in range(0, len(answer), size):
            part = answer[start : start + size]
            deltas += reader.push(part)
            read_until = start + len(part) - reader.unread
            if reader.repeated:
                break
        deltas += reader.finish()
        assert read_until == closed
        calls = [(block.name, json.loads(block.text)) for block in reader.blocks]
        assert calls == [first, second, other]
        assert {index for index, _ in deltas} == {0, 1, 2}  # nothing of the fourth was ever sent


@pytest.mark.parametrize("name", BY_NAME)
def test_a_call_that_was_cut_off_is_no_repeated_one(name: str) -> None:
    form = BY_NAME[name]
    call = ("get_weather", {"city": "Bern"})
    answer = written(form, [call, call])
    cut = answer[: answer.rindex("rn")]
    assert [block.text for block in read(name, cut, 1)] == ['{"city": "Bern"}', '{"city": "Be']
