"""The grammar of calls: all that a family writes is allowed, and nothing that is no such call."""

from __future__ import annotations

from typing import Any

import pytest

from specops.request import Grammar, GrammarKind
from specops.text.tools.formats import THINKING, Tool
from specops.text.tools.grammar import CallGrammar
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
    """Whether this may be a whole answer."""
    thinking, begun = options.pop("thinking", None), options.pop("begun", False)
    asked = {"required": True, "parallel": True} | options
    lark = CallGrammar(BY_NAME[name], {}, thinking, begun).lark(TOOLS, **asked)
    matcher = grammars().matcher(Grammar(GrammarKind.LARK, lark))
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
    for call in [("get_weather", {}), ("get_weather", {"city": 1}), ("other", {})]:
        assert not allowed(name, written(form, [call])), call


@pytest.mark.parametrize("name", BY_NAME)
def test_without_a_required_call_text_is_allowed_and_calls_are_right(name: str) -> None:
    form = BY_NAME[name]
    for text in ("Hello <b> {", written(form, GOOD)):
        assert allowed(name, text, required=False), text
    assert allowed(name, "I ask.\n" + written(form, GOOD), required=False) or form.bare
    assert not allowed(name, written(form, [("other", {})]), required=False)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("begun", [False, True])
def test_thoughts_come_before_calls(name: str, begun: bool) -> None:
    call = written(BY_NAME[name], GOOD)
    thoughts = "" if begun else THINK[0]
    options = {"thinking": THINK, "begun": begun}
    assert allowed(name, f"{thoughts}hm\n{THINK[1]}\n\n{call}", **options)
    assert not allowed(name, f"{thoughts}hm\n{call}", **options)
    assert allowed(name, call, **options) is not begun


def test_a_tool_without_a_schema_takes_no_arguments() -> None:
    lark = CallGrammar(BY_NAME["json"], {}, None, False).lark(
        [Tool("f")], required=True, parallel=False
    )
    matcher = grammars().matcher(Grammar(GrammarKind.LARK, lark))
    for arguments, fits in (("{}", True), ('{"a": 1}', False)):
        text = f'{{"name": "f", "arguments": {arguments}}}'
        tokens = tokenizer().encode(text, special_tokens=False)
        assert (matcher.allows(tokens) == len(tokens)) is fits
