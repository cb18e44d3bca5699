"""The grammar of calls: it allows every call in the family's format, and no other."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from specops.request import Grammar, GrammarKind
from specops.text.grammar import Grammars
from specops.text.grammar_source import GrammarError
from specops.text.tokenizer import Tokenizer
from specops.text.tools.formats import THINKING, Tool
from specops.text.tools.grammar import CallGrammar
from specops.text.tools.reader import AnswerReader
from tests.simulated_target import grammars, tokenizer
from tests.text.tools.scripts import BY_NAME, written

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = (Tool("get_weather", "", SCHEMA), Tool("search", "", {"type": "object", "properties": {}}))
GOOD = [("get_weather", {"city": "a/b"})]
THINK, END = THINKING[0], 0


def allowed(name: str, text: str, **options: Any) -> bool:
    """Whether the grammar allows this text as a whole answer."""
    tags, starts = options.pop("tags", None), options.pop("starts", False)
    said, tools = options.pop("said", None), options.pop("tools", TOOLS)
    asked = {"required": True, "parallel": True, "text_grammar": said} | options
    grammar = CallGrammar(BY_NAME[name], {}, tags, starts).grammar(tools, **asked)
    matcher = grammars().matcher(grammar)
    tokens = [*tokenizer().encode(text, special_tokens=False), END]
    return matcher.allows(tokens) == len(tokens)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_required_call_is_a_call_and_follows_its_schema(name: str) -> None:
    form = BY_NAME[name]
    two = written(form, [*GOOD, ("search", {})])
    assert allowed(name, written(form, GOOD))
    assert allowed(name, two)
    assert not allowed(name, two, parallel=False)
    for text in ("", "Hello", "Hello " + written(form, GOOD), written(form, GOOD)[:-1]):
        assert not allowed(name, text), text
    wrong: dict[str, Any] = {"city": 1} if form.style != "tagged" else {"city": "a", "days": "b"}
    for call in [("get_weather", {}), ("get_weather", wrong), ("other", {})]:
        assert not allowed(name, written(form, [call])), call


@pytest.mark.parametrize(
    ("schema", "others"),
    [
        (SCHEMA, False),
        (SCHEMA | {"additionalProperties": True}, True),
        (SCHEMA | {"patternProperties": {"^x": {"type": "string"}}}, True),
        ({"type": "object"}, True),
    ],
)
def test_a_call_has_no_arguments_that_its_schema_does_not_list(
    schema: dict[str, Any], others: bool
) -> None:
    call = ("f", {"city": "a", "xyz": "b"} if "properties" in schema else {"xyz": "b"})
    text = written(BY_NAME["hermes"], [call])
    assert allowed("hermes", text, tools=(Tool("f", "", schema),)) is others


@pytest.mark.parametrize("name", BY_NAME)
def test_without_a_required_call_text_is_allowed_and_calls_are_right(name: str) -> None:
    form = BY_NAME[name]
    for text in ("Hello <b> {", written(form, GOOD)):
        assert allowed(name, text, required=False), text
    assert allowed(name, "I ask.\n" + written(form, GOOD), required=False) or form.bare
    assert not allowed(name, written(form, [("other", {})]), required=False)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("starts_in_reasoning", [False, True])
def test_reasoning_comes_before_calls(name: str, starts_in_reasoning: bool) -> None:
    call = written(BY_NAME[name], GOOD)
    reasoning = "" if starts_in_reasoning else THINK[0]
    options = {"tags": THINK, "starts": starts_in_reasoning}
    assert allowed(name, f"{reasoning}hm\n{THINK[1]}\n\n{call}", **options)
    assert not allowed(name, f"{reasoning}hm\n{call}", **options)
    assert allowed(name, call, **options) is not starts_in_reasoning


PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/p"}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"p": {"enum": ["here", "there"]}},
}
FORMED = {  # a grammar of the text, a text that fits, and one that does not
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PLACE)): ('{"place": "here"}', '{"place": "x"}'),
    Grammar(GrammarKind.JSON_SCHEMA, "true"): ("[1]", "[1"),
    Grammar(GrammarKind.JSON_OBJECT, '{"type":"object"}'): ('{"a": 1}', "[1]"),
    Grammar(GrammarKind.REGEX, "a+/b"): ("aa/b", "a"),
    Grammar(GrammarKind.CHOICE, '["yes", "no"]'): ("no", "maybe"),
    Grammar(GrammarKind.LARK, 'start: "a" call\ncall: /b+/'): ("abb", "a"),
}


@pytest.mark.parametrize("said", FORMED, ids=lambda said: f"{said.kind} {said.text[:6]}")
@pytest.mark.parametrize("name", BY_NAME)
def test_text_that_follows_a_grammar_stands_in_place_of_calls(name: str, said: Grammar) -> None:
    right, wrong = FORMED[said]
    call, options = written(BY_NAME[name], GOOD), {"said": said, "required": False}
    assert allowed(name, right, **options)
    assert allowed(name, call, **options)
    for text in (wrong, "Hello", f"{right}{call}"):
        assert not allowed(name, text, **options), text
    # With calls as plain JSON, a wrong call is allowed where any JSON is allowed as text.
    any_json = said.kind is GrammarKind.JSON_OBJECT or said.text == "true"
    wrong_call = written(BY_NAME[name], [("get_weather", {})])
    assert allowed(name, wrong_call, **options) is (any_json and BY_NAME[name].bare)
    for tools in (TOOLS, ()):
        thinking = options | {"tags": THINK, "tools": tools}
        assert allowed(name, f"{THINK[0]}hm{THINK[1]}\n{right}", **thinking)
        assert allowed(name, f"hm{THINK[1]}{right}", starts=True, **thinking)
        assert not allowed(name, right, starts=True, **thinking)
        assert not allowed(name, f"{THINK[0]}hm{THINK[1]}{wrong}", **thinking)


TAGGED = [name for name, form in BY_NAME.items() if form.style == "tagged"]
LITERAL = [name for name, form in BY_NAME.items() if form.style == "literal"]
KINDS = {
    "type": "object",
    "properties": {
        "sky": {"type": "string", "enum": ["clear", "grey"]},
        "unit": {"const": "C"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "note": {"type": "string", "maxLength": 5},
        "days": {"$ref": "#/$defs/days"},
        "list": {"type": "array", "items": {"type": "integer"}},
        "any": {},
    },
    "$defs": {"days": {"type": "integer"}},
}


@pytest.mark.parametrize("name", [*TAGGED, *LITERAL])
@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("sky", "grey", "blue"),
        ("unit", "C", "F"),
        ("code", "ABC", "ab"),
        ("note", "a\nb", "longer"),
        ("days", 3, "three"),
        ("list", [1, 2], ["a"]),
        ("any", "<b> &", None),
    ],
)
def test_arguments_without_json_follow_their_schema(
    name: str, key: str, right: Any, wrong: Any
) -> None:
    tools = (Tool("f", "", KINDS), Tool("open", "", {"type": "object"}))
    form = BY_NAME[name]
    assert allowed(name, written(form, [("f", {key: right})]), tools=tools)
    if wrong is not None:
        assert not allowed(name, written(form, [("f", {key: wrong})]), tools=tools)
    assert not allowed(name, written(form, [("f", {"other": 1})]), tools=tools)
    assert allowed(name, written(form, [("open", {"other": right})]), tools=tools)
    reader = AnswerReader(form, tools)
    reader.push(written(form, [("f", {key: right})]))
    reader.finish()
    assert [json.loads(block.text) for block in reader.blocks] == [{key: right}]


@pytest.mark.parametrize("name", [*TAGGED, *LITERAL])
@pytest.mark.parametrize(
    ("arguments", "fits"),
    [({"b": 1}, True), ({"b": 1, "a": 2}, True), ({}, False), ({"a": 1}, False)],
)
def test_required_arguments_that_no_schema_describes_come_first(
    name: str, arguments: dict[str, Any], fits: bool
) -> None:
    schema = {"properties": {"a": {}}, "required": ["b"], "additionalProperties": True}
    call = written(BY_NAME[name], [("f", arguments)])
    assert allowed(name, call, tools=(Tool("f", "", schema),)) is fits


PATTERNS = [  # a pattern, texts that it matches somewhere, and texts that it does not
    (r"^\/api\/.*$", ["/api/", "/api/a"], ["/ap", "x/api/"]),
    ("red|green", ["red", "a green one"], ["re", "rgeen"]),
    ("^(?:red|green)$", ["red", "green"], ["redgreen", "a red"]),
    ("^a|b$", ["ab", "xb", "a/"], ["ba"]),
    ("(^a$|^b$)", ["a", "b"], ["ab"]),
    ("[0-9]", ["4", "no 42!"], ["", "four"]),
    (r"cost\$", ["cost$", "its cost$."], ["cost"]),
    (r"^\$[^$^|]+$", ["$4"], ["4", "$$"]),
    ("^(?!.*--)[a-z-]+$", ["a-b"], ["a--b", "A"]),
    ("", ["", "a"], []),
]


@pytest.mark.parametrize("name", [*TAGGED, *LITERAL])
@pytest.mark.parametrize(("pattern", "right", "wrong"), PATTERNS)
def test_a_pattern_means_what_it_does_in_json(
    name: str, pattern: str, right: list[str], wrong: list[str]
) -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": pattern}}}
    for strict in (False, True):
        tools = (Tool("f", "", schema, strict=strict),)
        for text in (*right, *wrong):
            call = written(BY_NAME[name], [("f", {"p": text})])
            assert allowed(name, call, tools=tools) is (text in right), text


@pytest.mark.parametrize("name", TAGGED)
def test_a_text_with_a_pattern_does_not_contain_its_closing_tag(name: str) -> None:
    form = BY_NAME[name]
    for rules in ({"pattern": "[0-9]"}, {"minLength": 40}):
        schema = {"type": "object", "properties": {"p": {"type": "string", **rules}}}
        call = written(form, [("f", {"p": f"a{form.value_close}4" + "b" * 40})])
        assert not allowed(name, call, tools=(Tool("f", "", schema),))


@pytest.mark.parametrize("pattern", [r"^(?!.*\d\w)a", "a(?<!b)c", "a^b"])
@pytest.mark.parametrize("name", [*TAGGED, *LITERAL, "hermes"])
def test_a_pattern_that_cannot_be_kept_is_named_or_refused(name: str, pattern: str) -> None:
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": pattern}}}
    asked: dict[str, Any] = {"required": True, "parallel": True}
    writer = CallGrammar(BY_NAME[name], {}, None, False)
    matcher = grammars().matcher(writer.grammar([Tool("f", "", schema)], **asked))
    assert [(item.tool, item.path) for item in matcher.ignored] == [("f", "/properties/p/pattern")]
    with pytest.raises(GrammarError, match="/properties/p/pattern: `pattern` with `strict`"):
        grammars().matcher(writer.grammar([Tool("f", "", schema, strict=True)], **asked))


@pytest.mark.parametrize("name", [*TAGGED, *LITERAL, "hermes"])
def test_a_required_name_that_may_not_be_there_is_not_asked_for(name: str) -> None:
    schema = {"properties": {"a": {}}, "required": ["b"], "additionalProperties": False}
    for arguments, fits in (({"a": 1}, True), ({"b": 1, "a": 2}, False)):
        call = written(BY_NAME[name], [("f", arguments)])
        assert allowed(name, call, tools=(Tool("f", "", schema),)) is fits


NESTED = {
    "type": "object",
    "properties": {
        "guests": {"type": "array", "items": {"type": "string"}},
        "options": {
            "type": "object",
            "properties": {
                "floor": {"type": "integer"},
                "view": {"enum": ["sea", None]},
                "first name:": {"type": "string"},
                "nick": {"type": ["string", "null"]},
            },
            "required": ["floor"],
        },
        "loud": {"type": "boolean"},
        "free": {},
        "dc:title (x)": {"type": "integer"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "array"}, {"type": "null"}]},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["loud"],
    "$defs": {
        "count": {"type": "integer"},
        "tree": {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "branches": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["label"],
        },
    },
}
ARGUMENTS: list[tuple[dict[str, Any], bool]] = [
    ({"loud": True}, True),
    ({}, False),
    ({"loud": None}, False),
    ({"loud": False, "guests": []}, True),
    ({"loud": False, "guests": ["a, b]", 'c"d', ""]}, True),
    ({"loud": False, "guests": [1]}, False),
    ({"loud": False, "options": {"floor": 3}}, True),
    ({"loud": False, "options": {"floor": 3, "view": None}}, True),
    ({"loud": False, "options": {"view": "sea"}}, False),
    ({"loud": False, "options": {"floor": "3"}}, False),
    ({"loud": False, "options": {"floor": 3, "view": "wall"}}, False),
    ({"loud": False, "guests": ["a"], "free": [{"k": ["ü\n", -1.5]}], "maybe": "b"}, True),
    ({"loud": False, "maybe": None}, True),
    ({"loud": False, "options": {"floor": 3, "nick": None}}, True),
    ({"loud": False, "options": {"floor": 3, "nick": "a"}}, True),
    ({"loud": False, "options": {"floor": 3, "nick": 1}}, False),
    ({"loud": False, "either": 1}, True),
    ({"loud": False, "either": [None, {"k": "a"}]}, True),
    ({"loud": False, "either": None}, True),
    ({"loud": False, "either": "a"}, False),
    ({"loud": False, "tree": {"label": "a", "branches": [{"label": "b", "branches": []}]}}, True),
    ({"loud": False, "tree": {"label": "a", "branches": [{"label": 1}]}}, False),
    ({"loud": False, "tree": {"branches": []}}, False),
    ({"loud": False, "free": 1}, True),
    ({"loud": False, "dc:title (x)": 3}, True),
    ({"loud": False, "dc:title (x)": "a"}, False),
    ({"loud": False, "options": {"floor": 3, "first name:": "a, b"}}, True),
    ({"loud": False, "options": {"floor": 3, "first name:": 1}}, False),
    ({"loud": False, "other": 1}, False),
]


@pytest.mark.parametrize(("arguments", "fits"), ARGUMENTS, ids=range(len(ARGUMENTS)))
@pytest.mark.parametrize("name", LITERAL)
def test_literals_follow_their_schema(name: str, arguments: dict[str, Any], fits: bool) -> None:
    form, tools = BY_NAME[name], (Tool("f", "", NESTED),)
    text = form.write([("f", arguments)])
    assert allowed(name, text, tools=tools) is fits, text
    reader = AnswerReader(form, tools)
    reader.push(text)
    reader.finish()
    assert [json.loads(block.text) for block in reader.blocks] == [arguments]


def test_marks_that_are_special_tokens_are_those_in_the_grammar() -> None:
    special = {'<|"|>': 1, "<|tool_call>": 2, "<tool_call|>": 3, "<|channel>": 4, "<channel|>": 5}
    writer = CallGrammar(BY_NAME["gemma4"], special, THINKING[2], starts_in_reasoning=False)
    lark = writer.grammar([Tool("f", "", NESTED)], required=True, parallel=False)
    for rule in (
        "start: reasoning? <[2]> calls",
        'reasoning: <[4]> "thought\\n" REASONING_TEXT <[5]> SPACE',
        "any_text_value: <[1]> ANY_TEXT <[1]>",
        'calls: "call:" call "}" <[3]>',
    ):
        assert rule in lark.text


def with_tokens(tags: tuple[str, ...], *, special: bool) -> Tokenizer:
    """A tokenizer of bytes, and of these tags."""
    letters = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    fast = FastTokenizer(BPE(letters, []))
    fast.pre_tokenizer, fast.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    fast.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    return Tokenizer(fast)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", [name for name, form in BY_NAME.items() if form.tags])
def test_tags_that_are_tokens_are_these_tokens_in_the_grammar(name: str, special: bool) -> None:
    """As in Qwen's, Gemma 4's and LFM2's vocabularies, where a call in letters is another one."""
    form = BY_NAME[name]
    tags = (*form.tags, *THINK)
    known = with_tokens(tags, special=special)
    marks = {tag: token for tag in tags if (token := known.marks.get(tag)) is not None}
    grammars = Grammars(known, len(known.vocabulary()), frozenset({0}))
    call = written(form, [*GOOD, ("search", {})])
    texts = {
        True: (call, f"{THINK[0]}hm{THINK[1]}\n{call}"),
        False: (f"I ask.{call}", "I say <b>."),
    }
    for required, allowed_texts in texts.items():
        grammar = CallGrammar(form, marks, THINK, starts_in_reasoning=False).grammar(
            TOOLS, required=required, parallel=True
        )
        for text in (*texts[True], *allowed_texts):
            tokens = [*known.encode(text, special_tokens=False), 0]
            assert grammars.matcher(grammar).allows(tokens) == len(tokens), text
            assert not required or text not in texts[False]


@pytest.mark.parametrize("name", BY_NAME)
def test_definitions_that_many_arguments_name_make_no_grammar_of_any_size(name: str) -> None:
    members = {f"q{number}": {"type": "integer"} for number in range(2000)}
    parameters = {
        "type": "object",
        "properties": {f"p{number}": {"$ref": "#/$defs/x"} for number in range(2000)},
        "$defs": {"x": {"type": "object", "properties": members}},
    }
    tool = Tool("f", parameters=parameters, strict=True)
    grammar = CallGrammar(BY_NAME[name], {}, None, starts_in_reasoning=False).grammar(
        (tool,), required=True, parallel=False
    )
    assert grammar.size < 20 * len(json.dumps(parameters))


@pytest.mark.parametrize("name", [*TAGGED, "gemma4"])
@pytest.mark.parametrize("special", [False, True])
def test_a_text_does_not_contain_its_closing_tag_in_letters(name: str, special: bool) -> None:
    """The reader takes letters, so it would end the text there."""
    form = BY_NAME[name]
    tag = form.quote if form.marked else form.value_close.strip()
    known = with_tokens(form.tags, special=special)
    marks = {tag: token for tag in form.tags if (token := known.marks.get(tag)) is not None}
    assert tag in marks
    grammar = CallGrammar(form, marks, None, starts_in_reasoning=False).grammar(
        TOOLS, required=True, parallel=False
    )
    matcher = Grammars(known, len(known.vocabulary()), frozenset({0})).matcher(grammar)
    pieces = written(form, [("get_weather", {"city": "CITY"})]).partition("CITY")
    before, _, after = (known.encode(piece, special_tokens=False) for piece in pieces)
    for city, fits in (("Bern", True), (tag[:-1], True), (f"a{tag}b", False)):
        letters = [token for char in city for token in known.encode(char, special_tokens=False)]
        tokens = [*before, *letters, *after, 0]
        assert (matcher.allows(tokens) == len(tokens)) is fits, city


def test_schemas_may_all_refer_to_each_other() -> None:
    others = [{"$ref": f"#/properties/k{index}"} for index in range(20)]
    properties = {f"k{index}": {"anyOf": [*others, {"const": index}]} for index in range(20)}
    tools = (Tool("f", "", {"type": "object", "properties": properties}),)
    for value, fits in ((3, True), (20, False)):
        call = written(BY_NAME["gemma4"], [("f", {"k0": value})])
        assert allowed("gemma4", call, tools=tools) is fits


@pytest.mark.parametrize("inner", [{"properties": {"New York": {"type": "integer"}}}, {}])
def test_keys_of_gemma_4s_objects_are_bare(inner: dict[str, Any]) -> None:
    """As its template writes them, also those of several words."""
    parameters = {"type": "object", "properties": {"o": {"type": "object", **inner}}}
    call = "<|tool_call>call:f{o:{New York:3}}<tool_call|>"
    assert allowed("gemma4", call, tools=(Tool("f", "", parameters),))
    assert written(BY_NAME["gemma4"], [("f", {"o": {"New York": 3}})]) == call


def test_rules_of_any_value_are_there_where_values_may_be_any() -> None:
    for name, schema, needed in (
        ("any_value", SCHEMA, False),
        ("f", {"type": "object", "properties": {"a": {}, "b": {}}}, True),
    ):
        grammar = CallGrammar(BY_NAME["gemma4"], {}, None, starts_in_reasoning=False).grammar(
            [Tool(name, "", schema)], required=True, parallel=False
        )
        assert grammar.text.count("any_list: ") == needed


@pytest.mark.parametrize("parameters", [None, {}])
def test_a_tool_without_a_schema_takes_no_arguments(parameters: dict[str, Any] | None) -> None:
    grammar = CallGrammar(BY_NAME["json"], {}, None, False).grammar(
        [Tool("f", "", parameters)], required=True, parallel=False
    )
    matcher = grammars().matcher(grammar)
    for given, fits in (("{}", True), ('{"a": 1}', False)):
        text = f'{{"name": "f", "arguments": {given}}}'
        tokens = tokenizer().encode(text, special_tokens=False)
        assert (matcher.allows(tokens) == len(tokens)) is fits


@pytest.mark.parametrize("name", TAGGED)
def test_a_text_ends_where_the_reader_ends_it(name: str) -> None:
    """At its tag, also where a weak model leaves out the line break that should come before it."""
    form = BY_NAME[name]
    text = written(form, GOOD)
    bare = text.replace(form.value_close, form.value_close.lstrip())
    assert allowed(name, bare)
    assert not allowed(name, bare + "Sunny.")
    reader = AnswerReader(form, TOOLS)
    reader.push(bare)
    reader.finish()
    assert [(block.kind, block.name, json.loads(block.text)) for block in reader.blocks] == [
        ("call", *GOOD[0])
    ]
