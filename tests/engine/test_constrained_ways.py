"""Speculative constrained output is plain constrained output, to the token, in every way.

`python -m bench structured` compares 200 prompts of a real model.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import FinishReason, GenerationRequest, Grammar, GrammarKind, SamplingParams
from specops.text.tools.formats import Tool
from specops.text.tools.grammar import CallGrammar
from tests.checkpoints import make_checkpoint
from tests.generating import run
from tests.text.tools.scripts import BY_NAME

AT_ONCE = 8
PLACE = {"type": "object", "properties": {"city": {"enum": ["Bern", "Basel", "Zug"]}}}
SCHEMAS = (
    PLACE | {"required": ["city"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["red", "green", "dark green"]}, "minItems": 2},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "of": {"type": "integer"}},
        "required": ["name", "of"],
        "additionalProperties": False,
    },
)
TOOLS = (Tool("get_sky", "", SCHEMAS[2]), Tool("go", "", PLACE))
GRAMMARS = (
    *(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in SCHEMAS),
    Grammar(GrammarKind.REGEX, "(def (add|sub)[(]a, b[)]:\n)+"),
    Grammar(GrammarKind.CHOICE, '["The quick brown fox", "The quick brown dog"]'),
    *(
        CallGrammar(BY_NAME[name], {}, None, starts_in_reasoning=False).grammar(
            TOOLS, required=True, parallel=True
        )
        for name in ("lfm", "gemma4", "qwen3-coder")
    ),
)
_ids = count()


@pytest.fixture(scope="module", params=["attention", "convolutions"])
def engines(
    request: pytest.FixtureRequest,
    tiny_settings: Settings,
    tiny_head: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Engine]:
    """One with a draft model, one with a head; and a model whose draft is itself in 4 bits."""
    wide = replace(tiny_settings, slots=AT_ONCE, max_batched_tokens=64)
    if request.param == "attention":
        return [Engine.load(wide), Engine.load(replace(wide, draft=str(tiny_head)))]
    folder = str(make_checkpoint(tmp_path_factory.mktemp("lfm2") / "model", "lfm2"))
    own = {"target": folder, "draft": folder, "quant": "int8-32", "draft_quant": "int4-32-rtn"}
    return [Engine.load(replace(wide, **own))]


def requests(seeded: bool) -> Iterator[GenerationRequest]:
    """Prompts, each under a grammar: three for each grammar."""
    for number in range(3 * len(GRAMMARS)):
        drawn = (1.0, number) if seeded else (0.0, None)
        yield GenerationRequest(
            request_id="",
            prompt_tokens=tuple(range(1 + number, 30 + 3 * number)),
            max_new_tokens=32,
            sampling=SamplingParams(
                drawn[0], top_k=20, seed=drawn[1], grammar=GRAMMARS[number % len(GRAMMARS)]
            ),
        )


def answers(
    engine: Engine, asked: Sequence[GenerationRequest], at_once: int, seen: Counter[str]
) -> list[list[int]]:
    """The tokens of each; `seen` counts where they came from."""
    found = []
    for start in range(0, len(asked), at_once):
        some = asked[start : start + at_once]
        named = [replace(item, request_id=str(next(_ids))) for item in some]
        served = run(engine, *named)
        for item in named:
            assert served.finish(item) in (FinishReason.STOP, FinishReason.LENGTH)
            outputs = served.outputs[item.request_id]
            seen.update(piece.origin for output in outputs for piece in output.pieces)
            found.append(served.tokens(item))
    return found


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_every_drafter_comes_to_the_same_tokens_alone_and_together(
    engines: list[Engine], seeded: bool
) -> None:
    asked = list(requests(seeded))
    seen: Counter[str] = Counter()
    plain = answers(engines[0], asked, 1, Counter())
    drafters = set()
    for engine in engines:
        for drafter in engine.info.drafters:
            drafters.add(drafter)
            k_draft = 0 if drafter == "none" else 6
            ways = [replace(item, drafter=drafter, k_draft=k_draft) for item in asked]
            for at_once in (1, AT_ONCE):
                found = answers(engine, ways, at_once, seen)
                assert found == plain, (drafter, at_once)
    heads = {"head"} if len(engines) > 1 else set()
    assert drafters == {"draft", "suffix", "cascade", "none"} | heads
    assert {"grammar", "target", "draft", "suffix"} <= set(seen)
