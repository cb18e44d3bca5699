"""Prompts are of the kind that they say, held out, and the same every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import prompts
from bench.prompts import CATEGORIES, CODE, CREATIVE, EXTRACTIVE, STRUCTURED, Prompt
from specops.text.tokenizer import Tokenizer
from training.corpus import DEMO_DIR, read_held_out

EACH = 20


@pytest.fixture(scope="module")
def made() -> dict[str, list[Prompt]]:
    found = prompts.by_category(EACH)
    return {name: [item for item in found if item.category == name] for name in CATEGORIES}


def test_every_kind_has_its_share_of_different_texts_the_same_every_time(
    made: dict[str, list[Prompt]],
) -> None:
    assert prompts.by_category(EACH) == [item for items in made.values() for item in items]
    tokenizer = Tokenizer.load(DEMO_DIR / "target")
    for name, items in made.items():
        assert len({item.text for item in items}) == EACH
        assert all((item.sampling.temperature > 0) == (name == CREATIVE) for item in items)
        assert max(len(tokenizer.encode(item.text)) for item in items) <= 1024 - 128
    assert len({item.sampling.seed for item in made[CREATIVE]}) == EACH


def test_each_kind_comes_from_the_held_out_text(made: dict[str, list[Prompt]]) -> None:
    text = "\n".join(document.text for document in read_held_out())
    assert all(item.text.rstrip("\n") in text for item in made[CODE])
    words = " ".join(text.split())
    for item in made[CREATIVE]:
        assert " ".join(item.text.removeprefix('"""').split()) in words
    for item in made[STRUCTURED]:
        records = [json.loads(line.removesuffix(",")) for line in item.text.splitlines()]
        assert len(records) == 10
        assert all(set(record) == {"module", "name", "line", "args"} for record in records)
    for item in made[EXTRACTIVE]:
        passage, again = item.text.split("\n    # The same again:\n\n")
        assert passage.startswith(again)
        assert len(passage) > len(again)


def test_prompts_are_read_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\n", "category": "code"}\n\n{"prompt": "b"}\n')
    assert prompts.from_file(file) == [Prompt(CODE, "a\n"), Prompt(prompts.OWN, "b")]
