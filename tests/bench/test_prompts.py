"""Prompts are of the kind that they say, held out, and the same every time."""

import json
from pathlib import Path

from bench import prompts
from bench.prompts import CATEGORIES, CODE, CREATIVE, EXTRACTIVE, STRUCTURED, Prompt
from training.corpus import read_held_out

EACH = 8


def test_each_kind_comes_from_the_held_out_text() -> None:
    made = {name: prompts.by_category(EACH, (name,)) for name in CATEGORIES}
    assert made[EXTRACTIVE] == prompts.by_category(EACH, (EXTRACTIVE,))
    for name, items in made.items():
        assert len({item.text for item in items}) == EACH
        assert all((item.sampling.temperature > 0) == (name == CREATIVE) for item in items)
    assert len({item.sampling.seed for item in made[CREATIVE]}) == EACH
    text = "\n".join(document.text for document in read_held_out())
    assert all(item.text.rstrip("\n") in text for item in made[CODE])
    words = " ".join(text.split())
    for item in made[CREATIVE]:
        assert " ".join(item.text.removeprefix('"""').split()) in words
    for item in made[STRUCTURED]:
        records = [json.loads(line.removesuffix(",")) for line in item.text.splitlines()]
        assert [set(record) for record in records] == [{"module", "name", "line", "args"}] * 10
    for item in made[EXTRACTIVE]:
        passage, again = item.text.split("\n    # The same again:\n\n")
        assert passage.startswith(again) and len(passage) > len(again)  # noqa: PT018


def test_prompts_are_read_from_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\n", "category": "code"}\n\n{"prompt": "b"}\n')
    assert prompts.from_file(file) == [Prompt(CODE, "a\n"), Prompt(prompts.OWN, "b")]
