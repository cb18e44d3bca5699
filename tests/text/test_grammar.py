"""Grammars become masks of the allowed tokens, or an error that says why not."""

import json
import random
import threading
from collections import Counter
from itertools import count
from typing import Any

import numpy as np
import pytest

from specops.request import Grammar, GrammarKind
from specops.text.grammar import Grammars, Masks, Matcher
from specops.text.grammar_source import MAX_CHARACTERS, GrammarError
from specops.text.grammar_worker import MAX_CERTAIN
from tests.simulated_target import grammars, tokenizer

END = 0  # of a text
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["red", "green"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def schema(content: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(content))


def choice(*texts: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text)


def gbnf(text: str) -> Grammar:
    """The same kind: the form of its rules tells it from Lark."""
    return lark(text)


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}"
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""  # as llama.cpp's grammars write it


def allowed(mask: Masks) -> set[int]:
    """The tokens in a row of masks."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def follow(grammar: Grammar, text: str) -> Matcher:
    """Return the matcher after a text; check that its masks allow each token."""
    matcher = grammars().matcher(grammar)
    for token in tokenizer().encode(text, special_tokens=False):
        assert token in allowed(matcher.masks(())[0]), (grammar, text, token)
        matcher.advance(token)
    return matcher


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (schema(PERSON), '{"name": "Ada \\"x\\"", "kind": "green"}'),
        (schema({"const": {"a": [1, None]}}), '{"a": [1, null]}'),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"enum": ["é\u2028"]}}}), '"é\u2028"'),
        (schema({"$ref": "/$defs/a", "$defs": {"a": {"enum": ["b"]}}}), '"b"'),  # as LiteLLM writes
        (Grammar(GrammarKind.JSON_OBJECT, '{"type":"object"}'), '{"a": [1, {"b": null}]}'),
        (regex(r"[0-9]{3}-x"), "123-x"),
        (choice("yes", 'no "maybe"\n', "é"), 'no "maybe"\n'),
        (lark('start: "a" inner "c"\ninner: /b+/'), "abbbc"),
        (gbnf('root ::= "a" inner "c"\ninner ::= [b]{3} # of them'), "abbbc"),
        (
            gbnf(r"""root ::= start "\u00e9\x41" . [^\u0061"\x00-\x1f] "]"
start ::= "\"/" """),
            '"/éA\nb]',
        ),
        (gbnf(JSON), '{"a": [1, -2.5e3, {"\\u00e9": null}], "b": ""}'),
    ],
)
def test_a_text_that_follows_its_grammar_is_complete(grammar: Grammar, text: str) -> None:
    assert follow(grammar, text).complete


def test_a_complete_text_may_end_or_go_on() -> None:
    matcher = follow(regex("[0-9]+"), "12")
    assert not matcher.complete
    assert END in allowed(matcher.masks(())[0])
    assert END not in allowed(grammars().matcher(regex("[0-9]+")).masks(())[0])


def test_masks_of_draft_tokens_are_those_of_the_steps() -> None:
    tokens = tokenizer().encode('{"name": "Ada", "kind": "red"}', special_tokens=False)
    together = grammars().matcher(schema(PERSON)).masks(tokens[:-1])
    matcher = grammars().matcher(schema(PERSON))
    for row, token in zip(together, tokens, strict=True):
        assert np.array_equal(matcher.masks(())[0], row)
        matcher.advance(token)


@pytest.mark.parametrize("grammar", [schema(PERSON), choice("abcdefgh"), regex("x{30}[0-9]")])
def test_forced_tokens_are_alone_in_their_masks(grammar: Grammar) -> None:
    matcher = grammars().matcher(grammar)
    forced = matcher.forced(40)
    assert forced == matcher.forced(40)
    assert matcher.forced(2) == forced[:2]
    after = matcher.masks((), forced)[0]
    for token in forced:
        assert allowed(matcher.masks(())[0]) == {token}
        matcher.advance(token)
    assert np.array_equal(matcher.masks(())[0], after)
    assert matcher.complete or len(allowed(after)) > 1


def test_masks_leave_the_matcher_where_it_was() -> None:
    matcher = follow(schema(PERSON), '{"name": "A')
    before = matcher.masks(())
    for text in ('da", "kind": "red"}', "da", "\n", ""):
        matcher.masks(tokenizer().encode(text, special_tokens=False))
        assert np.array_equal(matcher.masks(()), before)


def test_behind_a_token_that_ends_or_is_not_allowed_all_may_follow() -> None:
    matcher = follow(regex("[0-9]+"), "1")
    (letter,) = tokenizer().encode("a", special_tokens=False)
    for tokens in ((END, letter), (letter, letter)):
        first, *rest = matcher.masks(tokens)
        assert letter not in allowed(first)
        assert all((mask == ~np.uint32(0)).all() for mask in rest)


def test_draft_tokens_are_allowed_up_to_the_first_wrong_one() -> None:
    matcher = grammars().matcher(regex("[0-9]{3}"))
    encoded = tokenizer().encode("12a", special_tokens=False)
    assert matcher.allows(encoded) == len(encoded) - 1
    matcher.advance(encoded[0])
    with pytest.raises(GrammarError):
        matcher.advance(encoded[-1])


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema({"type": "king"}), "Invalid type"),
        (schema({"$ref": "http://example.com/schema.json"}), "/$ref: it is outside"),
        (schema({"$ref": "file:///etc/hostname"}), "/$ref: it is outside"),
        (schema({"properties": {"a": {"$ref": "#/b"}}}), "/properties/a/$ref: #/b does not exist"),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no text"),
        (schema({"enum": []}), ""),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), ""),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 500 + "]" * 500), "nested in each other"),
        (regex("(?=a)b"), "look-around"),
        (regex("("), "unclosed"),
        (regex("a" * (MAX_CHARACTERS + 1)), "characters"),
        (regex("a" * MAX_CERTAIN + "b"), f"more than {MAX_CERTAIN} bytes"),
        (choice("a" * 100_000), f"more than {MAX_CERTAIN} bytes"),
        (lark("start: x"), "unknown name"),
        (lark("start: start"), "no text"),
        (lark('start: "\x00'), ""),
        (gbnf("root ::= other"), "GBNF cannot be read: Rule 'other' not found"),
        (gbnf('rule ::= "a"'), "No 'root' rule"),
        (gbnf('root ::= "a'), "line 1"),
        (gbnf("root ::= " + "(" * 5000), "GBNF cannot be read"),
        (gbnf(r'root ::= "\ud800"'), "GBNF cannot be read"),
        (gbnf("root ::= root root"), "no text"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_reason(grammar: Grammar, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammars().matcher(grammar)
    assert str(caught.value)
    assert reason in str(caught.value)


def doubling(keyword: str, depth: int) -> dict[str, Any]:
    """A schema whose size without references is 2 ^ depth."""
    pairs = {
        f"d{level}": {keyword: [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": pairs | {f"d{depth}": {"type": "string"}}}


@pytest.mark.parametrize(
    ("grammar", "text", "ends"),
    [
        (schema(doubling("anyOf", 30)), '"ab"', True),
        (schema(doubling("allOf", 30)), '"ab', False),
        (schema({"type": "array", "items": {"$ref": "#"}}), "[[], [[]]]", True),
        (schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**9}), "[1", False),
        (schema({"type": "string", "pattern": "^(a?){50}a{50}$"}), f'"{"a" * 100}"', True),
        (schema({"enum": [f"value {number}" for number in range(5000)]}), '"value 4999"', True),
        (regex("(x+x+)+y"), "xxxxy", True),
        (regex(".*a.{200}"), "ba" + "c" * 199, False),
        (lark('start: start start | "a"'), "aaaa", True),
        (lark('start: (("a"{0,1000}){0,1000}){0,1000}'), "aaaa", True),
    ],
    ids=lambda value: value.text[:30] if isinstance(value, Grammar) else "",
)
def test_hostile_grammars_are_followed(grammar: Grammar, text: str, ends: bool) -> None:
    matcher = follow(grammar, text)
    assert (matcher.complete or END in allowed(matcher.masks(())[0])) == ends


def test_what_takes_more_than_a_step_may_ends_in_an_error() -> None:
    with pytest.raises(GrammarError, match="too many expressions"):
        follow(regex("(((a{1,100}){1,100}){1,100}){1,100}"), "aaaa")


def test_each_request_follows_a_grammar_on_its_own() -> None:
    made = Grammars(tokenizer(), 4096, frozenset({END}))
    first, second = made.matcher(choice("ab", "ac")), made.matcher(choice("ab", "ac"))
    (letter,) = tokenizer().encode("a", special_tokens=False)
    first.advance(letter)
    assert letter in allowed(second.masks(())[0])
    assert letter not in allowed(first.masks(())[0])


def test_the_cache_of_large_grammars_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used last stays, and whatever a living matcher follows."""
    monkeypatch.setattr("specops.text.grammar._GROWTH", 0.0)  # by a clock

    class Counting(Grammars):
        times = 0

        def _compile(self, grammar: Grammar) -> Any:
            self.times += 1
            return super()._compile(grammar)

    made = Counting(tokenizer(), 4096, frozenset({END}))
    made.most_bytes = 16 << 20
    small = [choice(str(number)) for number in range(16)]
    living, *large = (choice(str(number) * 16_000) for number in range(6))
    waits = made.matcher(living)
    for grammar in (*small, *large):
        made.matcher(grammar)
    assert made.compiled(large[0]) is None  # dropped; the last ones are cached
    assert made.compiled(large[-1]) is not None
    assert made.compiled(living) is not None
    for grammar in (large[-1], large[0]):
        made.matcher(grammar)
    assert made.times == len(small) + 1 + len(large) + 1
    assert not waits.complete


def test_clients_with_keys_know_nothing_of_each_others_grammars() -> None:
    made = Grammars(tokenizer(), 4096, frozenset({END}))
    for client in ("first", "second"):
        assert made.compiled(choice("secret"), client) is None
        made.matcher(choice("secret"), client)
        assert made.compiled(choice("secret"), client) is not None


def test_a_grammar_that_one_answer_has_worn_out_is_there_for_the_next() -> None:
    made = Grammars(tokenizer(), 4096, frozenset({END}))
    growing = regex(r"(.|\n)*a.{200}")
    letters, draw = tokenizer().encode("abcdefgh", special_tokens=False), random.Random(1)
    matcher = made.matcher(growing)

    def follow_on() -> None:
        while True:
            matcher.masks(())
            matcher.advance(draw.choice(letters))

    with pytest.raises(GrammarError, match="too many states"):
        follow_on()
    assert matcher._compiled is not None
    assert matcher._compiled.grown
    assert made.compiled(growing) is None
    assert made.compiled(growing, worn=True) is not None  # for the engine, which waits for nothing
    another = made.matcher(growing)
    another.advance(letters[0])
    assert len(allowed(another.masks(())[0])) > 100


class Counted:
    """The library's matcher, whose masks take seconds of a clock that the test makes."""

    def __init__(self, matcher: Any, seconds: float = 0.0) -> None:
        self._matcher, self.seconds, self.now = matcher, seconds, 0.0
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            self.now += self.seconds * (name == "unsafe_compute_mask_ptr")
            return getattr(self._matcher, name)(*arguments)

        return call


@pytest.mark.parametrize("text", ["x" * 16_000, "the quick brown fox " * 500])
def test_a_long_text_gives_its_tokens_directly(text: str) -> None:
    matcher = grammars().matcher(choice(text))
    counted = Counted(matcher._matcher)
    matcher._matcher = counted  # type: ignore[assignment]
    said: list[int] = []
    while not matcher.complete:
        forced = matcher.forced(16)
        after = matcher.masks((), forced)[0]
        for token in forced:
            matcher.advance(token)
        said += forced
        if matcher.complete:
            break
        if len(allowed(after)) == 1 and matcher.forced(1):
            assert allowed(after) == {*matcher.forced(1)}
    assert tokenizer().decode(said) == text
    assert counted.calls["compute_ff_tokens"] < 5
    assert counted.calls["unsafe_compute_mask_ptr"] < 5


def slow(matcher: Matcher, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Matcher:
    """Have each mask take so many seconds."""
    counted = Counted(matcher._matcher, seconds)
    matcher._matcher = counted  # type: ignore[assignment]
    monkeypatch.setattr("specops.text.grammar.time.thread_time", lambda: counted.now)
    return matcher


def test_a_grammar_gets_its_share_of_the_passes_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matcher = slow(grammars().matcher(regex("[a-z]+")), 0.004, monkeypatch)
    (letter,) = tokenizer().encode("a", special_tokens=False)

    def passes(count: int, seconds: float) -> None:
        for _ in range(count):
            matcher.masks(())
            matcher.advance(letter)
            matcher.settle(seconds)

    passes(100, 0.05)
    with pytest.raises(GrammarError, match="more than 25% of the model's time"):
        passes(100, 0.005)


def test_a_pass_does_not_wait_for_all_masks_of_a_slow_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matcher = slow(grammars().matcher(regex("[a-z]+")), 0.02, monkeypatch)
    letters = tokenizer().encode("abcdefgh", special_tokens=False)
    with pytest.raises(GrammarError, match="more than 50 ms in one pass"):
        matcher.masks(letters)


def test_a_grammar_whose_masks_take_long_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars().matcher(regex("[a-z]{9}")).probe()
    matcher = slow(grammars().matcher(regex("[a-z]{9}")), 0.03, monkeypatch)
    with pytest.raises(GrammarError, match="takes 30 ms per token; at most 20 ms are allowed"):
        matcher.probe()


def test_a_pause_of_the_machine_is_no_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processor time has what a hypervisor took from it: a reading of a second may be that."""
    (letter,) = tokenizer().encode("a", special_tokens=False)
    for pause in range(20):
        matcher = grammars().matcher(regex("[a-z]+"))
        readings = count()
        monkeypatch.setattr(
            "specops.text.grammar.time.thread_time",
            lambda readings=readings, pause=pause: float(next(readings) > pause),
        )
        matcher.probe()
        for _ in range(4):
            matcher.masks((letter, letter))
            matcher.advance(letter)
            matcher.settle(0.005)


def test_a_grammar_that_is_known_does_not_wait_for_one_that_is_being_compiled() -> None:
    begun, may = threading.Event(), threading.Event()

    class Waiting(Grammars):
        def _compile(self, grammar: Grammar) -> Any:
            if grammar != choice("known"):
                begun.set()
                assert may.wait(60)
            return super()._compile(grammar)

    made = Waiting(tokenizer(), 4096, frozenset({END}))
    made.matcher(choice("known"))
    compiling = threading.Thread(target=made.matcher, args=(choice("other"),))
    compiling.start()
    assert begun.wait(60)
    made.matcher(choice("known"))
    assert compiling.is_alive()
    may.set()
    compiling.join()
